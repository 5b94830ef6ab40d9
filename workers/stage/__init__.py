"""The runtime of one instance (MI, draft §3): the asyncio shells around the pure machines of `transaction`.

A shell receives orders and tensors, passes them to its machine and carries out the effects: it computes on
the compute thread, sends over the links and publishes claims. `instance` builds one runtime and subscribes it
to the job's orders. Nothing here plans, commits or chooses a replacement: that is the orchestrator's.

- `hop_runtime`: the base of both kinds of instance: the exchange, link faults, tasks.
- `stage_flow`, `stage_runtime`: a stage's microbatches; its orders in the step transaction.
- `data_runtime`: a data instance.
- `followers`: newcomers that receive a snapshot and then each step.
- `startup_progress`: progress reports to the registry until the instance is ready.
"""
