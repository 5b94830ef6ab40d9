"""Microservice instances (MI, draft §3): processes that hold stages of the model and stream tensors.

An instance computes its stage, chooses the next hop of each microbatch and votes in the step transaction; it
never decides a commit and never plans. Node agents start it through a fork server (`process`). Only this
package imports torch and pynvml.

- `instance`: the life of one instance, from registration to leave.
- `stage`, `transaction`, `routing`, `compute`, `state`: its work on microbatches, and its weights.
- `links`, `transport`: tensors from one instance to another.
- `store`, `telemetry`: what it records about itself, and what it measures.
- `process`, `sandbox`, `tasks`: fork server, confinement of users' code, short-lived processes.
- `models`, `user_code`: models that come with DMSC, and code that users bring.
"""

from schemas.former_names import keep_former_names

keep_former_names()
