"""A functional module (draft §4.2, Figure 2): one policy as a service on the bus.

`ingestion` lets data in, `service` has the policy decide on a thread of its own, `lifecycle` and `orders`
obey the orchestrator, `questions` answers synchronous queries, `inference_host` runs the policy's model in
another process. `dmsc policy run` starts one. It never decides what becomes of a suggestion: that is the
orchestrator.
"""
