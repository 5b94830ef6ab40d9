"""The keys in which job files differ, as dotted paths. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.base import Part
from schemas.job import JobSpec

IGNORED = frozenset({"name"})


class KeyDifference(Part):
    """A key of the job file with the value in each job; a job whose file lacks the key is left out."""

    path: str
    values: dict[str, Any]


def flattened(document: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted path → value of each leaf; a list is one value, an empty mapping, too."""
    if not isinstance(document, Mapping) or not document:
        return {prefix: document}
    leaves: dict[str, Any] = {}
    for key, value in document.items():
        leaves |= flattened(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def differences(specs: Mapping[str, JobSpec]) -> tuple[KeyDifference, ...]:
    """The keys whose values are not the same in all jobs, in the order of the job file."""
    leaves = {job: flattened(spec.model_dump(mode="json")) for job, spec in specs.items()}
    found = []
    for path in dict.fromkeys(path for one in leaves.values() for path in one):
        values = {job: one[path] for job, one in leaves.items() if path in one}
        distinct = {repr(value) for value in values.values()}
        if path not in IGNORED and (len(distinct) > 1 or len(values) < len(leaves)):
            found.append(KeyDifference(path=path, values=values))
    return tuple(found)
