"""Which job may start now: quotas, and the line of jobs that wait for slots (ADR-0037).

The leader asks `JobAdmission` before it takes a job; `JobRun` asks `turn` before it places one. Nothing here
places or starts anything: `planning.placement` does.

admission.py    `JobAdmission`: whether a user's quota allows one more job, or a wider one
job_queue.py    `turn`: whose turn it is; pure
slot_demand.py  `SlotDemand`: which slots running jobs hold, and which jobs wait for some
"""
