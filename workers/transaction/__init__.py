"""An instance's part of the step transaction (DESIGN §5), pure: events in, effects out.

The machines decide what to accept, which microbatch to bind to which neighbour, and what to send again after
a fence. The shells in `workers.stage` feed them and carry out their effects; `dmsc.simulation` and
`tests/sim` run the same classes under a virtual clock. There is no I/O and no clock here, and torch is
imported for type checking only.

- `stage_machine`, `data_machine`: one stage instance, one data instance.
- `microbatch`: the states of one microbatch at one instance.
- `consistent_snapshot`: which fence round this instance has answered.
"""
