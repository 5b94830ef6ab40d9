"""The step transaction (DESIGN §5, docs/step-transaction.md), as the orchestrator decides it.

A training step is a distributed transaction. Every stage has replicas with equal weights; a step has a fixed
number of microbatches. Either all living members of all stages apply the step with the same gradient, or
nobody does. Any process may be killed at any time, and the weights come out bit-identical.

The phases of a step (`states.py` holds the legal transitions of these and of all other states):

closed      No step is open: the job is at a boundary (validation, checkpoint, start). `Opened` opens one.
gathering   Instances compute microbatches and claim each one that is in their sum. Once all microbatches of a
            stage are claimed and its reduction group is formed, the stage prepares: its members all-reduce a
            copy of their sums and vote. The ledger checks that the voted sets are disjoint and complete, that
            claims link up from stage to stage, and that replicas agree on the reduced gradient.
deciding    The decision is being written by compare-and-set. That write is the commit point.
committing  Members apply the decision. The next step is open for claims already.

A loss while the step is open starts a fence round: all living members stop accepting anything from the lost
one and report what they hold; its microbatches get new owners, whose neighbours offer the inputs again; the
stage builds its group in a new generation without it. A loss while deciding or committing waits: the decision
stands. What should not happen begins the step again with a higher attempt.

Everything here is pure: `decide(event, now) -> effects`. There is no I/O, clock or randomness. `step/`
carries the effects out and brings the answers back as events; `dmsc/simulation` and `tests/sim` run the same
code under a virtual clock. Every order carries (epoch, step, attempt), so that a late one is ignored.

step_machine.py    `StepMachine`: the decisions, by phase
step_events.py     its vocabulary: the events that it takes, the effects that it asks for
step_ledger.py     `StepLedger`: claims and votes of one attempt; makes the decision or says what is wrong
states.py          each state variable with its named transitions, as docs/step-transaction.md draws them
stage_group.py     `StageGroup`: one stage's members and their reduction group
reduction_layout.py  who sums how much of a stage's gradients for all, where that was suggested
fencing.py         `Fencing`: the fence rounds of the open step, and the path updates that follow from them
preparing.py       which stages prepare now, alone or with those that they share parameters with
path_repair.py     who takes over the microbatches of a lost owner
newcomers.py       `Newcomers`: instances that receive their stage's state and have no vote yet
takeover_rules.py  where a new orchestrator goes on with a running job
"""
