"""A functional module (draft §4.2, Figure 2): one policy as a service on the bus.

It decides when a round of the policy's code begins, what happens if that code hangs or crashes, and which
state of its lifecycle the module is in. `dmsc` starts it; the orchestrator orders it about and decides on its
suggestions. It never changes a route or a job itself.

- `service`: the module: rebuild after a start, rounds, suggestions, synchronous answers.
- `ingestion`, `recent`: the inbox of events; the last minutes of a stream.
- `lifecycle`, `orders`: the module's state, reported to the orchestrator; the orchestrator's orders.
- `questions`, `fault_answers`: synchronous queries over the bus; what to do about a fault at hand.
- `policy_thread`: the thread of the policy's code.
- `inference_host`, `inference_process`: the policy's model in a process of its own.
"""
