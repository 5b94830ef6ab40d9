"""The embedded nats-server: a child process, no container and no installation (ADR-0005).

It decides how the server is configured, started, watched and stopped, alone or as a cluster of three on one
machine, and whether its store takes writes (`store_watch`). `dmsc up` and tests call it. It never connects
as a client of the mesh.
"""
