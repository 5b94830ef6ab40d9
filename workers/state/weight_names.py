"""What the tensors of a folder are called in the job's model: the rules of `initial_weights.map`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from schemas.errors import BadModel
from schemas.job_file.initial_weights import InitialWeights, OwnNames

Renamed = Callable[[str], tuple[str, ...]]
"""A tensor's name in the files → its names in the model; none: it is not to be loaded."""


def renaming(source: InitialWeights) -> Renamed:
    """The rules as a function; see `InitialWeights` for what they mean."""
    rules = [_rule(theirs, ours) for theirs, ours in source.map.items()]

    def renamed(name: str) -> tuple[str, ...]:
        for rule in rules:
            if (names := rule(name)) is not None:
                return names
        return (name,)

    return renamed


def _rule(theirs: str, ours: OwnNames) -> Callable[[str], tuple[str, ...] | None]:
    targets = (ours,) if isinstance(ours, str) else ours or ()
    if theirs.startswith("^"):
        pattern = re.compile(theirs)

        def by_pattern(name: str) -> tuple[str, ...] | None:
            match = pattern.match(name)
            if match is None:
                return None
            return tuple(match.expand(target) + name[match.end() :] for target in targets)

        return by_pattern
    parts = theirs.rstrip(".").split(".") if theirs.rstrip(".") else []

    def by_parts(name: str) -> tuple[str, ...] | None:
        own = name.split(".")
        if len(own) < len(parts) or any(
            part not in ("*", mine) for part, mine in zip(parts, own, strict=False)
        ):
            return None
        stars = [mine for part, mine in zip(parts, own, strict=False) if part == "*"]
        return tuple(_joined(target, stars, own[len(parts) :]) for target in targets)

    return by_parts


def _joined(target: str, stars: Iterable[str], rest: Iterable[str]) -> str:
    numbers = iter(stars)
    head = target.rstrip(".").split(".") if target.rstrip(".") else []
    return ".".join((*(next(numbers) if part == "*" else part for part in head), *rest))


def own_names(theirs: Iterable[str], source: InitialWeights) -> Mapping[str, str]:
    """Name in the model → name in the files.

    Raises:
        BadModel: The rules give one name to two tensors.
    """
    renamed = renaming(source)
    found: dict[str, str] = {}
    for name in theirs:
        for own in renamed(name):
            if (other := found.setdefault(own, name)) != name:
                raise BadModel(f"initial_weights {source.url}: the map calls both {other} and {name} {own}")
    return found
