"""The orchestrator's own loop: what it would change of a running job, by what its steps show (ADR-0095).

It decides which degradation, delay or imbalance is worth a change, and when. It suggests like a functional
module: arbitration, automation, the job's account of changes and its verdict apply as to anybody
(`policy.policy_service`). The leader calls it each second; it changes nothing itself, and the weights' bits
never depend on it.

Versions of services have no steps: `load_scaling.py` has as many of their replicas wanted as what gateways
say of them (`served_load.py`) needs (`version_load.py`, pure; ADR-0157).
"""
