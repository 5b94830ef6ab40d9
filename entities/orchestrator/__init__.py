"""SMO, the service mesh orchestrator (draft §3, §4.4, §4.5): jobs from submission to clean-up.

It decides where a job's units run, when a step is committed, what becomes of faults and of modules'
suggestions. Gateways, node agents, instances and modules call it on the bus; of several orchestrators one
leads (`service`), and `leader` serves what the leader answers. It never touches a tensor.

transaction    the step transaction, pure          step           its shell: orders, repairs, validation
planning       task graph, cuts, placement, pure   queue          whose turn it is, within which quota
job            one job's life                      job_state      its record, events, instances, limits
membership     members that come, go and move      checkpointing  checkpoints and published files
faults         the fault queue, fault location     monitoring     alerts and figures
policy         suggestions, reputation, versions   mesh, nodes    what there is; cordons and drains
"""

from entities.orchestrator.leader import OrchestratorConfig
from entities.orchestrator.service import Orchestrator

__all__ = ["Orchestrator", "OrchestratorConfig"]
