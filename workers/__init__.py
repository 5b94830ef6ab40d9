"""Microservice instances (MI, draft §3): they hold stages of the model and stream tensors.

Only here, and in policies that infer with it, are torch and pynvml imported. A node agent has each instance
forked (`process`), the instance confines itself (`sandbox`) and then serves one unit of one job
(`instance`).

instance     one incarnation's life: register, build, serve its orders, leave
stage        the runtimes of a stage and of a data unit: effects of the machines carried out
transaction  the instance's part of the step transaction, pure
routing      which instance of the next stage gets a microbatch
links        tensors between two instances, and among a stage's replicas; transport: gloo below them
compute      model, optimizer, gradient sum, on the compute thread
data         which samples a batch has, and the readers of what people have
data_builds  units of a data set's build: rows to records, to tokens, to shards
recipe       optimizers, groups of parameters, averages, metrics: how weights are updated and measured
state        checkpoints, weights, a stage's state in and out
tasks        short-lived workers: analysis, sample, files
local_store  the local store (draft §6); telemetry: what a device and a process report
models       factories that come with DMSC; user_code: loading those of users; requirements: what these need

Workers and entities never import each other: they meet on the bus.
"""

from schemas.former_names import keep_former_names

keep_former_names()
