"""Devices on which instances compute, by kind: how they are found, and what decides about their bits.

The fork server finds the devices of its node, the standard stage (`workers.tasks.standard_stage`) measures
them. Nothing here decides where something runs: the orchestrator does, by what nodes register.
"""
