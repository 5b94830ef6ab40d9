"""Simulates a mesh under a virtual clock (`dmsc simulate`, docs/simulator.md).

The decisions are those of the mesh: the pure cores of registry, router, orchestrator, gateway, policies and
workers run here unchanged. This package decides only what a simulation must replace: compute times, transfer
times and delays of orders. `dmsc simulate`, benchmarks and tests call it; `tests/sim` uses its kernel. It
never uses a bus, real time or threads, so the same scenario and seed give the same result.

instances.py   simulated instances around the workers' machines
leader.py      what each effect of the step machine has instances do; `tests/sim` shares it
kernel.py      the virtual clock and its queue of events
membership.py  a job's instances, their registration, routes and hops
messages.py    what travels between instances, without validation
network.py     transfer times between clusters
routing.py     the connection to the cores of router, senders and policies
training.py    a job's steps, around the orchestrator's step machine
world.py       a whole scenario
scenarios/     scenario files, service times, link traces
results/       parallel runs, the report, and how it is shown
"""
