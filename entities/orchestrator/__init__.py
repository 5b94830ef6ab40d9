"""SMO, the service mesh orchestrator (draft §3, §4.4, §4.5): jobs from submission to clean-up.

segmentation.py   where to cut the model                         pure
placement.py      which unit runs in which slot                  pure
planning.py       task graph and first communication policy      pure
step_ledger.py    one step's accounting: claims, votes, decision pure
step_machine.py   the step transaction, decided                  pure
                  its parts: stage_group.py, newcomers.py, fence_round.py, path_mending.py
arbitration.py    what becomes of a module's suggestion          pure
module_standing.py  how each version of a module stands        pure
promotion.py      which version is active, and stays          pure; promotions.py keeps it and switches
policy_desk.py    modules' suggestions, judged and carried out; standing_records.py: how they stand, kept
mesh_view.py      what the orchestrator knows of nodes, gateways, routers, instances
journal.py        a job's record and events: every transition, checked and told
instances.py      starting, finding, stopping the instances of a job
step_loop.py      the step transaction's shell: has the machine decide, carries out what it asks for
step_orders.py    its orders: begin, fence, assign, form, prepare, commit; claim_repair.py: what the bus lost
validation_pass.py  the loss on held-out data, at a boundary
training.py       steps, boundaries, roll-backs, steps that are left out
progress.py       how far a job is: its open step, the loop that runs it
troubles.py       what breaks a step, and whether it makes sense to go on: setbacks.py, quarantine.py
recruits.py       new incarnations on their way into the job; replacement.py finds room and starts them
crew_changes.py   what was asked for: other numbers of replicas; nodes to be left, by hand_over.py
standbys.py       standbys work while they are all that a stage has
alerts.py         loss spikes, gradient norms, stragglers, heat; robust_trigger.py: the test   pure
job_figures.py    a job's speed and convergence, for metrics     pure
telling.py        what people are told of it all, in order
guarded_tasks.py  tasks beside an owner's own work, the first failure of which it meets where it waits
fault_location.py what a fault was and how far it reaches, with SRD and MIC
fault_queue.py    every fault from report to end, with its limits; job_faults.py: one job's
omission.py       leaves a step out whose microbatch fails wherever it runs
cordons.py        places that get no new instances; cordoning.py keeps them; draining.py empties nodes
job_run.py        one job's life; outages.py: what of it waits for the bus, outside the steps
service.py        what the leader serves: the queue, each message to its job
lease.py          who may lead, and for how long                 pure
leadership.py     claiming, renewing, giving back the lead
standing.py       the service itself: follows until it leads, leads until it is deposed
"""

from entities.orchestrator.leader import OrchestratorConfig
from entities.orchestrator.service import Orchestrator

__all__ = ["Orchestrator", "OrchestratorConfig"]
