"""The policies that come with DMSC (draft §5.4; docs/policies-built-in.md).

Each file holds one policy (`stage_weights` a base of three): when it may speak, what it suggests, and its
evidence. `dmsc` loads them by name;
the engine of the kit calls them. A policy only suggests, and prefers silence to a guess. The models behind
them are in `policies.numerics`.

- `service_time_weights`, `topology_scoring`, `routing_bandit`: weights of a stage; `stage_weights`: what they
  have in common.
- `stage_rebalancing`: moves of instances to the slowest stage.
- `link_trend`, `path_faults`, `device_risk`, `transience`: instances to avoid.
- `checkpoint_interval`: the expected time between failures.
- `canary_judge`: versions of served models that go back.
"""
