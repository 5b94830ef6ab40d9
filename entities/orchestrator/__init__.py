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
training.py       steps, boundaries, losses, newcomers, roll-backs
replacement.py    new incarnations for lost ones; hand_over.py: for those that leave their node
fault_location.py what a fault was and how far it reaches, with SRD and MIC
fault_queue.py    every fault from report to end, with its limits; job_faults.py: one job's
quarantine.py     microbatches that fail wherever they run; omission.py leaves their steps out
cordons.py        places that get no new instances; cordoning.py keeps them; draining.py empties nodes
job_run.py        one job's life
service.py        what the leader serves: the queue, each message to its job
lease.py          who may lead, and for how long                 pure
leadership.py     claiming, renewing, giving back the lead
standing.py       the service itself: follows until it leads, leads until it is deposed
"""

from entities.orchestrator.service import OrchestratorConfig
from entities.orchestrator.standing import Orchestrator

__all__ = ["Orchestrator", "OrchestratorConfig"]
