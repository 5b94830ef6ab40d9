"""SMO, the service mesh orchestrator (draft §3, §4.4, §4.5): jobs from submission to clean-up.

segmentation.py   where to cut the model                         pure
placement.py      which unit runs in which slot                  pure
planning.py       task graph and first communication policy      pure
step_ledger.py    one step's accounting: claims, votes, decision pure
arbitration.py    what becomes of a module's suggestion          pure
mesh_view.py      what the orchestrator knows of nodes, gateways, routers, instances
journal.py        a job's record and events: every transition, checked and told
instances.py      starting, finding, stopping the instances of a job
step_loop.py      the step transaction's shell: begin, prepare, decide, commit
recovery.py       fault location with SRD and MIC, replacement, state transfer
job_run.py        one job's life
service.py        the service itself: what it serves, the queue
"""

from entities.orchestrator.service import Orchestrator, OrchestratorConfig

__all__ = ["Orchestrator", "OrchestratorConfig"]
