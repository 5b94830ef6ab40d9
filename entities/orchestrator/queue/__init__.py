"""Which job may start now: quotas, and the one owner of the queue (ADR-0037, ADR-0073).

The leader asks `JobAdmission` before it takes a job; a `JobRun` that needs slots takes a turn in `JobQueue`.
Who comes first and who waits decides `entities.queue`; where instances go decides `planning.placement`.

admission.py    `JobAdmission`: whether a user's quota allows one more job, or a wider one; tenants' quotas
job_queue.py    `JobQueue`: has all waiting jobs decided about at once, and carries that out
granted_plan.py  the plan that a job is placed with, made on a thread; pure
job_trials.py   `JobTrial`: whether a job has a plan on certain slots, during a decision (ADR-0107)
promised_slots.py  `PromisedSlots`: which slots are promised to which job
park_orders.py  `ParkOrders`: who has been told to park, and does once the notice is over
slot_holder.py  `SlotHolder`, `LaneHolder`: what jobs and builds show to the queue, and take from it
queued_builds.py  `QueuedBuilds`: builds of data sets in the queue (ADR-0088)
lanes.py        places for units of builds, and which of them are open; pure
capacity_signal.py  `CapacitySignal`: publishes the slots that have to be there for all to start (ADR-0086)
plan_service.py `PlanService`: plans of jobs that are not there yet, few at once (ADR-0079)
reservation_book.py  `ReservationBook`: slots that are kept for a time
mesh_slots.py   nodes, records and placements as the core sees them; pure
"""
