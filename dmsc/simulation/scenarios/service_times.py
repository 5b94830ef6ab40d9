"""Draws service times. Each stage has its own random source, so that stages do not affect each other."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from dmsc.simulation.scenarios.scenario import ServiceTime
from schemas.errors import BadInput

Draw = Callable[[], float]
"""A function that returns the next service time in seconds."""


def draws(service: ServiceTime, seed: str, folder: Path) -> Draw:
    """Make a seeded source of service times. Files are relative to the scenario's `folder`.

    Raises:
        BadInput: The file can't be read, or has no usable number.
    """
    rng = random.Random(seed)
    if service.mean_ms is None:
        values = [value / 1e3 for value in service.values_ms or _read(service, folder)]
        return lambda: rng.choice(values)
    mean_s = service.mean_ms / 1e3
    if service.distribution == "lognormal":
        sigma = math.sqrt(math.log1p(service.cv**2))
        mu = math.log(mean_s) - sigma**2 / 2
        return lambda: rng.lognormvariate(mu, sigma)
    if service.distribution == "gamma":
        shape = 1 / service.cv**2
        return lambda: rng.gammavariate(shape, mean_s / shape)
    return lambda: mean_s


def _read(service: ServiceTime, folder: Path) -> Sequence[float]:
    """The numbers of `file`, in milliseconds."""
    assert service.file is not None
    path = folder / service.file
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if service.column is None:
                texts = [line.strip() for line in file if line.strip() and not line.startswith("#")]
            else:
                rows = csv.DictReader(file)
                if service.column not in (rows.fieldnames or ()):
                    raise BadInput(
                        f"{path}: no column {service.column!r}; it has {', '.join(rows.fieldnames or ())}"
                    )
                texts = [row[service.column] for row in rows]
        values = [float(text) for text in texts]
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not a list of milliseconds: {error}") from error
    if not values or any(not 0 < value <= 1e9 for value in values):
        raise BadInput(f"{path}: needs numbers above 0, in milliseconds")
    return values
