"""How a stage's weights are updated: optimizers, groups of parameters, averages, schedules, metrics.

Called on the compute thread by `workers.compute`, and by the analysis, which tries a job's recipe before it
runs. Whatever is here works parameter by parameter, so that no cut into stages changes a bit (ADR-0049). It
never sees the bus, and decides no learning rate: that comes with the order to apply a step.

parameter_groups.py   which options a parameter has, by its name and dimensions
adamw.py              the fused AdamW, for all parameters at once
single_parameter.py   any torch optimizer, one object per parameter
optimizer_table.py    the optimizers by name, and those of users
lion.py, muon.py      two that torch does not have, or not for every parameter
uncompiled.py         torch's optimizers without its compiler
state_layout.py       optimizer state of any shape as JSON and tensors
average.py            the moving average of the weights (EMA)
probe.py              refuses what would make bits depend on the cut, before training
user_schedule.py      schedules that are functions of users
metrics.py            metrics of evaluation microbatches
"""
