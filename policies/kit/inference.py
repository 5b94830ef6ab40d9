"""A policy's requests to its model, and the results (draft §4.2). `policies.module` runs the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Inference:
    """One request to the model, made by `Policy.infer`.

    `key` names its subject; a later request of the same job and key replaces one that still waits. `inputs`
    are plain data or numpy arrays, which are pickled.
    """

    job: str
    key: str
    inputs: Any


@dataclass(frozen=True, slots=True)
class Inferred:
    """One result of the model: `value` as returned, computed in `took_s` seconds."""

    job: str
    key: str
    value: Any
    took_s: float
