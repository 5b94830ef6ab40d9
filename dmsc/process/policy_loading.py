"""Loads a policy: a built-in one by its name, or a user's from a file."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from policies.kit.policy import Policy
from schemas.errors import BadInput

BUILT_IN = {
    "checkpoint-interval": ("policies.built_in.checkpoint_interval", "CheckpointInterval"),
    "routing-bandit": ("policies.built_in.routing_bandit", "RoutingBandit"),
    "service-time-weights": ("policies.built_in.service_time_weights", "ServiceTimeWeights"),
    "stage-rebalancing": ("policies.built_in.stage_rebalancing", "StageRebalancing"),
    "topology-scoring": ("policies.built_in.topology_scoring", "TopologyScoring"),
    "transience": ("policies.built_in.transience", "Transience"),
    "link-trend": ("policies.built_in.link_trend", "LinkTrend"),
    "path-faults": ("policies.built_in.path_faults", "PathFaults"),
    "device-risk": ("policies.built_in.device_risk", "DeviceRisk"),
}
"""The policies that come with DMSC: name → module and class."""


def load_policy(source: str) -> Policy:
    """Make the policy that `source` names.

    Args:
        source: A built-in policy's name, `file.py`, or `file.py:Class` if the file has several policies.

    Raises:
        BadInput: The file or the class does not exist, or can't be loaded; one line says where.
    """
    if source in BUILT_IN:
        module_name, class_name = BUILT_IN[source]
        policy_class: type[Policy] = getattr(import_module(module_name), class_name)
        return policy_class()
    file, colon, name = source.rpartition(":")
    if not colon or not file.endswith(".py"):
        file, name = source, ""
    if not file.endswith(".py"):
        raise BadInput(
            f"{source}: neither an entity or policy ({', '.join(BUILT_IN)}) nor a file that ends in .py"
        )
    module = _load(Path(file))
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Policy) and value.__module__ == module.__name__
    ]
    chosen = [cls for cls in classes if not name or cls.__name__ == name]
    if not chosen:
        present = ", ".join(cls.__name__ for cls in classes) or "none"
        raise BadInput(
            f"{file}: no class {name or 'derived from policies.Policy'} in it (there is: {present})"
        )
    if len(chosen) > 1:
        names = ", ".join(cls.__name__ for cls in chosen)
        raise BadInput(f"{file}: has {names}; choose one with {file}:{chosen[0].__name__}")
    try:
        return chosen[0]()
    except Exception as error:
        raise BadInput(f"{file}: {chosen[0].__name__}() failed: {type(error).__name__}: {error}") from error


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    name = f"dmsc_policy_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path}: Python can't load it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # so that the file can import its neighbours
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise BadInput(f"{path}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        raise BadInput(f"{path}: {type(error).__name__}: {error}{_line(error, path)}") from error
    return module


def _line(error: Exception, path: Path) -> str:
    """` (line N)`: the innermost line of the file itself in the error's traceback."""
    number, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            number = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {number})" if number else ""
