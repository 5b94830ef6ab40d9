"""What a node agent (MIC) judges of its instances: how they get on, and which chains stand still (ADR-0082).

It reads the samples that instances send anyway, and reports to the orchestrator what is stalled, or slower
than the plan expects; the orchestrator asks it when it locates a fault. It never stops an instance.

- `chain_detector`: when an instance is stalled or underperforming, with hysteresis; pure
- `instance_judge`: takes the samples, looks at the processes, reports and answers
"""
