"""The runtimes of an instance: they carry out what the pure machines decide, on links, compute thread and
bus.

`hop_runtime` is what both kinds share: the exchange with peers, the epoch, replicas. `data_runtime` makes
batches. `stage_runtime` obeys the orders of the step transaction: groups, prepare, commit, abort, state; its
`stage_flow` moves microbatches through the layers, its `stage_reduction` sums with the other replicas, and
its `followers` feeds newcomers. `workers.instance` makes one of them. They never decide the protocol: that is
`workers.transaction`.
"""
