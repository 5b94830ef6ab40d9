"""Dispatch of a step's microbatches to data instances, at the entry gateway (draft §4.4(2)).

It decides which active data instance of a job produces which microbatch: by the load that the routers report
(Type 4), evenly where no load is known. Each microbatch is bound once per (job, epoch, step, attempt).

`rules.py` holds the pure choice, which the simulator (`dmsc/simulation/`) runs too; `dispatcher.py` holds the
service that carries it out. The gateway's `service.py` serves `STEP_BEGIN` with it.
The dispatcher never raises an attempt and never commits or aborts a step: the orchestrator does. It never
chooses hops behind the data stage: the instances do.
"""
