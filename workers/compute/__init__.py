"""The numerical work of an instance: model, batches, gradients, optimizer (draft §5.3, DESIGN §5).

It decides how a model is cut into stages, how gradients are summed exactly (ADR-0006), and which error is due
to which microbatch. The stage runtime calls it on one compute thread, `tasks` in short-lived processes. It
never sends anything and knows no orchestrator; its results depend on seed, step and microbatch only.

- `stage_compute`, `compute_thread`: a stage's state on the compute thread; the thread.
- `model`, `optimizer`, `gradient_sum`, `data`: layers, AdamW, exact sums, batches.
- `determinism`: deterministic arithmetic, and what has none.
- `attribution`: the microbatch of a failed computation.
- `layer_profile`: layers checked and measured one by one.
"""
