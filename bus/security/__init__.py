"""Identities and secrets: who somebody is on the bus, signed, and what only some may read.

`credentials` are chains of signatures from the mesh's root to an instance, `trust_roots` says which roots
count, `renewal` follows replaced ones, `sealing` encrypts fields for the entities that need them
(ADR-0033). Dialling, the guard and the commands that make credentials call it. It never decides what an
identity may do: that is `bus.guard`.
"""
