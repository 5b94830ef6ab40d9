"""The queue's core: which job starts, changes its size, parks, or waits, and why (ADR-0072). Pure.

The orchestrator, `dmsc simulate --queue` and `benchmarks/job_queue.py` call `decide`. Nothing here starts or
stops anything, reads a clock, or places a stage: `SlotTrial` asks whoever can.

queued_job.py      what a job asks for, and how far it is: `JobRequest`, `QueuedJob`, `ActiveJob`
slot_pools.py      the slots of the mesh in pools of equal ones, and the free ones of a decision
ordering.py        who comes first: by submission, priority, fair share, attained service
tenant_shares.py   what tenants hold, have used, own and borrow
reservations.py    slots that are kept for a tenant or job for a time
availability.py    when slots come free, by predicted ends
displacement.py    how running jobs make room: they shrink, or park
plan_trials.py     room for a job for which a count of slots says too little
growth.py          what is done with slots that no waiting job can use, and where that ends
decision.py        what a decision says
scheduling.py      `decide`
virtual_queue.py   the same decisions in virtual time: a simulation, and the expected start of a job
explanation.py     a job's position, what blocks it, when it is expected to start, what would change that
"""
