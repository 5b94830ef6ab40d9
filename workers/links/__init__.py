"""Tensor links between instances (DESIGN §6): built, measured, used for hops, reductions and state transfers.

It decides how an offer travels (notice on the bus, tensors on a link, receipt), when a link is broken or
stuck, and what a link costs. `instance` opens the exchange, `stage` sends and receives through it, `routing`
reads the costs. What to send and what to accept is not decided here, but by the callbacks of the instance.

- `hop_exchange`: offers, notices and answers, on any number of links.
- `link_table`, `tensor_link`: an instance's links; one link over gloo.
- `link_quality`, `link_shaping`: measurements of a link; emulated bad networks for tests.
- `reduction`: all-reduce among the replicas of a stage.
- `peer_copy`, `redo_queue`: a stage's replica in another instance's memory.
"""
