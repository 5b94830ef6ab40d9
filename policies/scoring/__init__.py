"""Scoring of suggestions after the fact, and replay of recorded runs (draft §4.2, ADR-0021).

It decides what a suggestion was worth, from what happened while it was valid. Each live module scores its own
suggestions; `dmsc replay` scores those that a policy makes on a record. Everything is pure: no clock, no bus.
The scores promote nothing by themselves: that is the orchestrator's decision.

- `scoreboard`: open suggestions of one version, followed until they can be scored.
- `scores`: a formula per kind of action; summaries of many scores.
- `replay`: a recorded run fed to a policy.
"""
