"""What a suggestion was worth, by what then happened (docs/policies-scoring.md, ADR-0021).

`scores` is one score in [0, 1] per kind of action, `scoreboard` follows a version's suggestions until they
can be scored, `replay` feeds a recorded run to a policy. A module's host and `dmsc policy score` call it.
It never promotes a version: that is the orchestrator.
"""
