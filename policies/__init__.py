"""Functional modules (draft §4.2): the kit for policies and the built-in ones.

A policy suggests; the orchestrator decides (ADR-0002). This package exports what the author of a policy
needs: `Policy` to derive from, `JobView` to read, `InstanceStore` for own tools. `dmsc` loads policies and
runs them as modules. Nothing here changes training by itself, and a policy that fails affects only its own
module.

- `kit`: the interface of policies, and the engine that runs one.
- `module`: one policy as a service on the bus.
- `built_in`, `contrib`: the policies of DMSC; examples and tools beside them.
- `numerics`: the models behind them, pure.
- `scoring`: the worth of past suggestions; replay of a recorded run.
- `training`: learnt states from recorded runs.
- `trial`: a policy without a mesh, for tests and notebooks.
"""

from __future__ import annotations

from policies.kit.inference import Inference, Inferred
from policies.kit.instance_store import InstanceStore
from policies.kit.policy import Policy, Suggestions
from policies.kit.store_reads import StoreRead
from policies.kit.view import InstanceView, JobView, OwnSuggestion
from schemas.former_names import keep_former_names

__all__ = [
    "Inference",
    "Inferred",
    "InstanceStore",
    "InstanceView",
    "JobView",
    "OwnSuggestion",
    "Policy",
    "StoreRead",
    "Suggestions",
]

keep_former_names()
