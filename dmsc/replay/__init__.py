"""Recorded runs: found, exported, archived, and tried again with another policy (docs/replay.md).

recordings.py   where a run's record is: a file, this mesh's archive, a mesh that runs
session.py      one pass over a record: the policy's suggestions beside those made, all of them scored
rules.py        what the orchestrator's rules would have said of the policy's suggestions
present.py      how that is shown
"""
