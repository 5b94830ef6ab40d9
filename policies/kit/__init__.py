"""The policy kit (draft §4.2): what authors derive from, and the pure engine that runs a policy.

It decides when a policy is called, what it may see, how many suggestions it may make and what follows from
its errors. `policies.module` feeds the engine from the bus, `policies.scoring.replay` from a record,
`policies.trial` from a test. The kit has no clock of its own; only `store_reads` and `instance_store` use the
bus.

- `policy`: the base class, its events and its helpers for suggestions.
- `view`: what a policy sees of a job.
- `engine`: events in, suggestions out, within limits.
- `drift`: whether forecasts of changes fit what came of them.
- `inference`, `store_reads`: requests to the policy's model and to instances' local stores.
- `instance_store`, `graph_features`: a typed reader of local stores; a job's topology as matrices.
"""

from policies.kit.policy import Policy, Suggestions

__all__ = ["Policy", "Suggestions"]
