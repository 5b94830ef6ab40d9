"""Identities, credentials and keys: who somebody is on the bus, and who can read a secret.

It decides whether a chain of signatures proves an identity, who may hand on a credential to whom, which roots
count during a rotation, and to which key a secret is sealed. `bus.nats.dialer` presents credentials,
`bus.guard` checks them, `bus.messaging` seals and opens secrets; `dmsc`, the authorizer and node agents make
credentials. It decides nothing about permissions: that is `bus.guard`.

identity.py     what a credential says about its holder
credentials.py  roots and credentials: issue, delegate, present, check
renewal.py      replaces a credential in a running process
trust_roots.py  the present root and the one before it
kind_keys.py    the key pairs that processes of a kind share
sealing.py      seals secrets in messages
signing.py      signs records for the mesh
nats_jwt.py     NATS's keys and JWTs
"""
