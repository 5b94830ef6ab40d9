"""The instance's part of the step transaction, pure (docs/step-transaction.md).

`stage_machine` and `data_machine` take events and return effects: offers, claims, computations, answers to
fences. `microbatch` is the table of a microbatch's states, `consistent_snapshot` what an instance reported
of the open step. Stage runtimes, the simulator and `tests/sim` run the same objects. No I/O, no clock.
"""
