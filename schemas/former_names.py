"""Former import names: those of the previous release work until the next one, with a `DeprecationWarning`.

Users' modules, notebooks and job files (`workers.balancers:PowerOfTwo`) import some of our modules. A former
name gives the present module, the same object, and the warning names it. Only a name that no other finder
knows is looked up here, so imports of present names cost nothing.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

FORMER = {
    "bus.artifacts": "bus.files.artifacts",
    "bus.buckets": "bus.messaging.key_value",
    "bus.credentials": "bus.security.credentials",
    "bus.discovery": "bus.mesh.discovery",
    "bus.embedded": "bus.server.embedded",
    "bus.guard_keys": "bus.guard.guard_keys",
    "bus.identity": "bus.security.identity",
    "bus.objects": "bus.messaging.object_store",
    "bus.presence": "bus.mesh.registration",
    "bus.services": "bus.messaging.handlers",
    "bus.streams": "bus.messaging.streams",
    "bus.subject": "bus.subject_row",
    "policies.built_in.fault_signatures": "policies.contrib.fault_signatures",
    "policies.features": "policies.numerics.features",
    "policies.graph_features": "policies.kit.graph_features",
    "policies.inference": "policies.kit.inference",
    "policies.instance_store": "policies.kit.instance_store",
    "policies.numerics.logistic": "policies.contrib.logistic",
    "policies.store_reads": "policies.kit.store_reads",
    "policies.view": "policies.kit.view",
    "schemas.door": "schemas.gateway_api",
    "schemas.kept": "schemas.stored_values",
    "schemas.stage_move": "schemas.changes",
    "workers.balancers": "workers.routing.balancers",
    "workers.expected_completion": "workers.routing.expected_completion",
}
"""A module's former name → its present name. Kept for one release."""

FORMER_CLASSES = {
    "bus.buckets": {"Entry": "KeyValueEntry"},
    "bus.presence": {"Presence": "RegistrationClient"},
    "bus.streams": {"Recorded": "StreamRecord"},
    "policies.instance_store": {"Stored": "StoredRow"},
    "schemas.kept": {"kept": "read_stored"},
    "schemas.stage_move": {"MoveForecast": "Forecast", "MoveState": "ChangeState", "StageMove": "JobChange"},
}
"""A module's former name → former and present names of its classes and functions that were renamed."""


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in FORMER else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        warnings.warn(
            f"{name} is called {FORMER[name]} now; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        present = importlib.import_module(FORMER[name])
        for former_class, present_class in FORMER_CLASSES.get(name, {}).items():
            setattr(present, former_class, getattr(present, present_class))
        sys.modules[name] = present


def keep_former_names() -> None:
    """Register the former names with Python's import system; a second call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
