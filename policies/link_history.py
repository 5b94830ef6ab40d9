"""What instances' links took, on a grid of equal steps, for the policies that watch them (pure).

Instances tell a link's figures when they change, and every five seconds (ADR-0019); in between the last ones
hold.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from policies.features import Floats
from schemas.telemetry import InstanceSample

STEP_S = 5.0
Link = tuple[str, str]
"""Sender and receiver."""


class LinkHistory:
    """Transfer times of all links of all jobs. `take` is the only way in.

    Args:
        steps: kept of each link.
    """

    def __init__(self, steps: int = 160) -> None:
        self._steps = steps
        self._jobs: dict[str, dict[Link, deque[tuple[int, float]]]] = {}

    def take(self, sample: InstanceSample, at: float) -> None:
        """Work in a sample's figures, received at `at` (seconds)."""
        for link in sample.links:
            if link.figures is None or link.figures.transfer_ms is None:
                continue
            links = self._jobs.setdefault(sample.job, {})
            kept = links.setdefault((sample.sid, link.peer), deque(maxlen=self._steps))
            slot = int(at // STEP_S)
            if kept and kept[-1][0] == slot:
                kept.pop()
            kept.append((slot, link.figures.transfer_ms))

    def forget(self, job: str) -> None:
        self._jobs.pop(job, None)

    def table(self, job: str, until: int, steps: int) -> tuple[list[Link], Floats]:
        """The links known for all of the last `steps` slots up to `until`, and their milliseconds.

        Returns:
            Links in order, and `(steps, links)`. Left out: what began later, or fell silent for a minute.
        """
        begin = until - steps + 1
        names: list[Link] = []
        columns: list[Floats] = []
        for link, kept in sorted(self._jobs.get(job, {}).items()):
            known = [(slot, value) for slot, value in kept if slot <= until]
            if not known or known[0][0] > begin or known[-1][0] < until - 12:
                continue
            slots, values = (np.array(side) for side in zip(*known, strict=True))
            names.append(link)
            columns.append(values[np.searchsorted(slots, np.arange(begin, until + 1), side="right") - 1])
        return names, np.stack(columns, axis=1) if columns else np.zeros((steps, 0))
