"""From a model to a placed task graph, pure (draft §4.5(1), (3), §7.2).

`segmentation` decides where to cut the model, `placement` which unit runs in which slot, `task_graph` puts
both together with the first communication policy, `scaling` changes replicas, `stage_moves` is the account
of moves between stages. Jobs and the queue call it. No I/O, no clock.
"""
