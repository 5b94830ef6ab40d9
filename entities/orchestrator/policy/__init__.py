"""Functional modules at the orchestrator (draft §4.2): their suggestions, their reputation, their versions.

`arbitration` decides what becomes of a suggestion, by `suggestion_rules`; `module_reputation` keeps each
version's state, rate and strikes; `promotion_rules` decides which version is active (all pure). The
services carry it out and keep it on the bus. It never computes a suggestion.
"""
