"""The guard: who may say and hear what (docs/security.md, ADR-0022, ADR-0031).

It decides, from the table of subjects alone, what each identity may publish and subscribe to
(`permissions`), and which calls of JetStream a broker may make for it (`call_rights`, `jetstream_calls`).
It answers the server's questions about connections (`auth_callout`), ends connections (`connection_admin`),
and writes the server's accounts and keys. The authorizer's services, brokers and the embedded server call
it; `brokered_jetstream` is the requester's side. It never decides which role a user has: that is the
authorizer.
"""
