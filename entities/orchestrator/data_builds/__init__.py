"""Builds of data sets (`dmsc data build`): units of pure work, each committed once (ADR-0065).

It decides which units a build has, which node does which, what a failed attempt means, and when a version is
there. `leader.py` hands it commands and results; it orders units from node agents. It reads no record of a
data set, and runs no step: processes of nodes do. Whoever works, dies or leads does not show in a manifest.

unit_ledger.py    one phase: units planned, bound, done, committed; which node gets a unit; pure
phases.py         the orders of each phase; pure
progress.py       figures of a phase, its pace; pure
builds.py         `Builds`: all builds of a term: submitted, taken over, cancelled; versions deleted
build_run.py      `BuildRun`: one build from phase to phase
lane_holding.py   the lanes of one build: what the queue sees of it, gives and takes
unit_dispatch.py  orders to node agents, and their answers
unit_rows.py      the ledger's bucket: a row for each committed unit, created once
build_store.py    a build's record and events
late_versions.py  what jobs read that were submitted before their build was done
versions.py       versions and their manifests: a new one is a compare-and-set
leftovers.py      objects to which nobody refers go
"""
