"""What the author of a policy needs (docs/policies.md): derive from `Policy`, read a `JobView`, return
suggestions.

`engine` turns events into suggestions, the same way for a running module, a replay and a trial; `inference`
is what a policy asks of its model; `store_reads` and `instance_store` read instances' local stores (draft
§6.3); `graph_features` are features of a job's topology. It is pure: no I/O, no clock.
"""

from policies.kit.policy import Policy, Suggestions

__all__ = ["Policy", "Suggestions"]
