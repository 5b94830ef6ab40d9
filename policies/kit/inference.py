"""What a policy asks of its model, and what comes back (draft §4.2). The model's process:
`policies.module`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Inference:
    """What to give to the model. `Policy.infer` makes it.

    `key` says what it is about; a later one of the same job and key takes the place of one that still waits.
    `inputs` are plain data or numpy arrays: they travel by pickle.
    """

    job: str
    key: str
    inputs: Any


@dataclass(frozen=True, slots=True)
class Inferred:
    """What the model answered: `value` as it returned it, computed in `took_s` seconds."""

    job: str
    key: str
    value: Any
    took_s: float
