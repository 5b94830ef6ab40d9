"""NATS, once: connection, subjects, services, streams, key-value, objects, embedded server, tap.

Only this package imports nats and msgpack. Everything above it speaks in messages of `schemas/` and in
subjects of `bus.subjects`.
"""

from schemas.former_names import keep_former_names

keep_former_names()
