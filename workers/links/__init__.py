"""Links: tensors between two instances, and sums among the replicas of one stage.

It decides when a link is built or retired (`link_table`), how a hop is offered, answered and sent
(`hop_exchange`), how good a link is (`link_quality`), and how a stage's copy and its redo queue travel
(`peer_copy`, `redo_queue`). Stage runtimes call it. It never decides who receives a microbatch: that is
`workers.routing`. `link_shaping` emulates bad networks, for tests and benchmarks.
"""
