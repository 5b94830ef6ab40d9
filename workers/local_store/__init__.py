"""The local store of an instance (draft §6): its configuration, samples, events, versions and orders in
SQLite.

It decides what is kept, how much, and what happens to a damaged file. `recorder` writes what the instance
does, from a queue, so that no step waits; queries come over the bus (draft §6.3). It never decides anything
for the instance.
"""
