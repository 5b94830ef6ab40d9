"""The bus: NATS behind the mesh's own words. Only this package imports nats and msgpack.

Everything above it speaks in messages of `schemas` and in rows of `bus.subjects`. It decides how a message
travels, who may say and hear it, and what happens to one that can't be used. It never decides what a
message means.

connection   `Bus`, what every service holds: publish, request, command, serve, append, history, buckets
subjects     the one table of subjects; `subject_row` has the class of its rows
wire         envelopes, packed messages, correlation, redaction
nats         the connection to the server: dialled, kept, made again; JetStream's requests
messaging    handlers, streams, key-value, objects, dead letters
security     identities, credentials, sealed secrets
guard        who may say and hear what; the server's questions about connections
broker       reads and writes for whoever may not speak to JetStream (ADR-0031)
mesh         registration, discovery
tap          decodes whatever travels; recording: runs in files
server       the embedded nats-server; files: artifacts behind URLs
parent_death ends a process with its parent; scheduling_class: who displaces whom from a core
tasks        background tasks
logs         structured logging; `log_shipping` brings its lines to the bus
"""

from schemas.former_names import keep_former_names

keep_former_names()
