"""What a serving instance computes: sessions in waves, with bits that don't depend on their company.

It decides what comes of the rows of a wave, and no more: a stage's layers over them (`stage_model`,
`exact_arithmetic`, `packed_rows`, `prepacked`), keys and values under a budget (`kv_cache`), rows kept for a
neighbour (`retained_rows`), the next token (`sampler`), whether the promise holds here (`cache_check`,
`probe`), how many tokens a model takes (`model_context`), models without sessions (`one_shot`), and text
(`tokens`, `conversations`: without torch).
`workers.serving.runtime`, which decides whose rows are in a wave, and the gateway call it.

It never touches the bus, a clock or a socket, and starts no thread. A cache here is never state: a session is
its tokens, and all else is computed again from them (ADR-0130 … 0133).
"""
