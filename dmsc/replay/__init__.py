"""Recorded runs: finds, exports and archives them, and tries a policy against them (docs/replay.md).

The commands `replay`, `runs`, `policy score` and `policy plot` call it. It decides where a run's record is
read from and compares a policy's suggestions with the recorded ones. The policy, its scores and the
orchestrator's rules are the mesh's own code; nothing is sent to a mesh.

present.py     a replay as table and as JSON
recordings.py  the record of a run: a file, the archive, or a running mesh
training.py    runs for trainers of modules
scores.py      scores of modules, from a mesh or from a record
session.py     one pass over a record, with the orchestrator's rules for the policy's suggestions
"""
