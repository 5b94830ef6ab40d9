"""Chaos runs (`dmsc chaos`): injects a seeded plan of faults into a job or a service, and reports the cost.

This package decides when which fault hits which process, and from the job's events whether anything was lost
or counted twice; `services/` does the same for the answers of a model service. `dmsc chaos` and benchmarks
call it. It injects faults from outside: the mesh has no code for it (ADR-0010), and no process of another
machine or another mesh is ever signalled.

history.py       pure: job events and decisions → valid commits, lost and doubled work
holding.py       faults that last for a while
injection.py     hits one victim, and verifies that it was hit
patience.py      repeats a request until the mesh answers
plan.py          pure: the plan of faults, and the choice of victims
plot.py          the report as a picture
present.py       the report as text
processes.py     the mesh's processes on this machine: finds, verifies and signals them
report.py        pure: history and faults → stalls, goodput, waste, verdict
run.py           the asyncio shell around these
store_faults.py  faults of stored values and disks
watch.py         a job's events and decisions while it runs
"""
