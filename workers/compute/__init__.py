"""Arithmetic of an instance: the model's layers, the data, the optimizer, and the exact sum of gradients.

It decides what is computed and in which order of addition, so that weights are bit-identical however work
was routed (`gradient_sum`, `determinism`). All of it runs on one thread (`compute_thread`), so that
heartbeats go on. Stages, analysis and state call it. It never speaks to the bus and never decides which
microbatch comes next.
"""
