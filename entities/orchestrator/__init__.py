"""SMO, the service mesh orchestrator (draft §3, §4.4, §4.5): it runs jobs from submission to clean-up.

It decides where a model is cut, which instance runs where, whether a step is committed, what happens after a
loss, and which suggestions of functional modules are adopted. Any number of orchestrators may run; one of
them leads (ADR-0008). `dmsc` starts the service; gateways, routers, node agents and modules talk to it on the
bus. It computes no gradient, moves no tensor, and reads no file of a job outside the bus (ADR-0040).

service.py      `Orchestrator`: follows until it has the lead, leads until it loses it
leader.py       `Leader`: what the leading orchestrator serves; hands each message to its job
job/            one job's life, and its training loop
job_state/      what is recorded and counted of one job; its instances
step/           the service around the step transaction: orders, answers, repair of lost claims
transaction/    the step transaction itself; pure, no I/O: the protocol is described there
recovery/       from a loss to a replacement that works: joining, node partitions, copies at peers
membership/     members that come and go by wish: scaling, drain, a change of stage, machines that go away
checkpointing/  when checkpoints are taken; writing, publishing, restoring and removing them
planning/       segmentation, placement, task graph, numbers of replicas; pure
data_builds/    builds of data sets: units, who works on which, what is committed, versions
queue/          quotas, and the line of jobs that wait for slots
mesh/, nodes/   the view of nodes and services; cordons and drains of nodes
faults/         where a fault is, how far it reaches, and the queue of open faults
monitoring/     alerts and figures of a running job
policy/         suggestions of functional modules, their reputation, promotion of their versions
"""

from entities.orchestrator.leader import OrchestratorConfig
from entities.orchestrator.service import Orchestrator

__all__ = ["Orchestrator", "OrchestratorConfig"]
