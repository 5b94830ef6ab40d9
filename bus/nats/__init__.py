"""The connection to the NATS server, over nats-py: dialled, kept, made again after a loss, closed in any
state.

It decides when to dial and how long to wait, which subject an answer comes to (`reply_subjects`), how much
is buffered (`write_buffer`), and when the bus counts as heard (`liveness`). It translates nats-py's errors
into those of `schemas.errors`, and makes JetStream's requests itself (`jetstream`, `ordered_consumer`).
Only `bus` calls it. It never reads a message's body.
"""
