"""Which policies a mesh runs, and loading one: a built-in one by its name, or a user's from a file.

`dmsc up` reads the names alone, before it forks what runs them: the kit is imported only to load a policy.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from schemas.errors import BadInput

if TYPE_CHECKING:
    from policies.kit.policy import Policy

BUILT_IN = {
    "canary-judge": ("policies.built_in.canary_judge", "CanaryJudge"),
    "change-outcomes": ("policies.built_in.change_outcomes", "ChangeOutcomes"),
    "checkpoint-interval": ("policies.built_in.checkpoint_interval", "CheckpointInterval"),
    "routing-bandit": ("policies.built_in.routing_bandit", "RoutingBandit"),
    "service-time-weights": ("policies.built_in.service_time_weights", "ServiceTimeWeights"),
    "stage-rebalancing": ("policies.built_in.stage_rebalancing", "StageRebalancing"),
    "topology-scoring": ("policies.built_in.topology_scoring", "TopologyScoring"),
    "transience": ("policies.built_in.transience", "Transience"),
    "link-trend": ("policies.built_in.link_trend", "LinkTrend"),
    "path-faults": ("policies.built_in.path_faults", "PathFaults"),
    "port-faults": ("policies.contrib.port_faults", "PortFaults"),
    "device-risk": ("policies.built_in.device_risk", "DeviceRisk"),
}
"""The policies that come with DMSC: name → module and class."""
DEFAULT_POLICIES = ("stage-rebalancing", "canary-judge")
"""What a mesh runs unless told otherwise: those that `make bench-mind` finds faster (ADR-0097), and whoever
has versions of services go back (ADR-0151)."""
NONE, DEFAULT = "none", "default"
"""For `--policy`: no module at all; the policies of `DEFAULT_POLICIES`."""


def chosen_policies(words: Sequence[str]) -> tuple[str, ...]:
    """The policies that values of `--policy` name, each once and in their order; `(NONE,)`: none at all.

    Args:
        words: Built-in policies' names, files, `default`, `none`, or several of them separated by commas.

    Raises:
        BadInput: A name of no policy, or `none` beside others; one line says which.
    """
    named = [name.strip() for word in words for name in word.split(",")]
    found = list(dict.fromkeys(each for name in named for each in _meant(name)))
    if NONE in found and len(found) > 1:
        other = next(name for name in named if name != NONE)
        raise BadInput(f"--policy none starts no module: leave out {other}, or none")
    return tuple(found)


def _meant(name: str) -> tuple[str, ...]:
    if name == DEFAULT:
        return DEFAULT_POLICIES
    if name != NONE and not is_policy(name):
        raise BadInput(f"--policy {name or repr('')}: {unknown(name, DEFAULT, NONE)}")
    return (name,)


def check_policies(words: Sequence[str]) -> tuple[str, ...]:
    """The same, of files that are there.

    Raises:
        BadInput: As `chosen_policies`, and for a file that does not exist.
    """
    chosen = chosen_policies(words)
    for source in chosen:
        file, _ = file_and_class(source)
        if file and not Path(file).is_file():
            raise BadInput(f"--policy {source}: no such file")
    return chosen


def is_policy(name: str) -> bool:
    """Whether it is a built-in policy's name, or may be a file of policies."""
    return name in BUILT_IN or file_and_class(name)[0] != ""


def unknown(name: str, *beside: str) -> str:
    """What is wrong with a name that stands for nothing: names that are near it, or else all of them.

    Args:
        name: What was given.
        beside: Names that may be given in place of a policy's.
    """
    known = [*beside, *BUILT_IN]
    near = get_close_matches(name, known, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return f"neither the name of a policy nor a file that ends in .py; {hint}"


def file_and_class(source: str) -> tuple[str, str]:
    """`file.py` or `file.py:Class`; both empty: it is no file's name."""
    file, colon, name = source.rpartition(":")
    if not colon or not file.endswith(".py"):
        file, name = source, ""
    return (file, name) if file.endswith(".py") else ("", "")


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
    file, name = file_and_class(source)
    if not file:
        raise BadInput(f"{source}: {unknown(source)}")
    from policies.kit.policy import Policy

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
