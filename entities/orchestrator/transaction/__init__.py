"""The step transaction, pure: the front page of the protocol is docs/step-transaction.md.

A step is begun, its microbatches are claimed by those in whose gradient sum they are, all members prepare,
one record is written, and all commit. A death ends a round: living members are fenced, lost microbatches
are assigned again, and the step goes on. `step_machine` takes events and returns effects (both in
`step_events`); its parts are `stage_group`, `newcomers`, `fence_round` and `path_repair`; `step_ledger`
accounts for claims and votes; `takeover_rules` says where a new orchestrator goes on. `step`, the simulator
and `tests/sim` run the same objects. No I/O, no clock.
"""
