"""The runtimes of an instance: they carry out what the pure machines decide, on links, compute thread and
bus.

`stage_flow` moves microbatches through a stage, `stage_runtime` adds groups, prepare, commit, abort and
state; `data_runtime` makes batches; `hop_runtime` is what both share; `followers` feeds newcomers.
`workers.instance` makes one of them. They never decide the protocol: that is `workers.transaction`.
"""
