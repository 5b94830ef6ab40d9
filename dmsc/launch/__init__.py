"""Runs a mesh, or a host of several meshes, on this machine as child processes (`dmsc up`).

This package decides which processes a mesh consists of, starts the NATS servers and these processes, waits
until the mesh is ready, restarts processes that die and stops everything in order. `dmsc up`, `down`,
`demo`, `chaos`, `doctor` and `credential rotate` call it. It serves no entity itself, except a second
authorizer and a second broker that run in the supervising process. It places no instances: the orchestrator
does.

checks.py          the checks of `dmsc doctor`
hosting.py         several meshes (tenants) on one server (ADR-0028)
incubation.py      the incubator of the node agents' fork servers (ADR-0030)
layout.py          which processes make a mesh; pure
log_rotation.py    keeps log files bounded
mesh.py            one mesh: start, readiness, stop
mesh_options.py    the options of `dmsc up`
ports.py           free ports of this machine
prefork_server.py  forks child processes within milliseconds (ADR-0029)
rotation.py        a new root of credentials for a running mesh (ADR-0039)
starting_view.py   the progress that a person sees
supervisor.py      starts, restarts and stops child processes
tenancy.py         a mesh that is a tenant of a host
"""
