"""What instances' links took, on a grid of equal steps, for the policies that watch them (pure).

Instances tell a link's figures when they change, and every five seconds (ADR-0019); in between the last ones
hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isfinite

import numpy as np

from policies.numerics.features import Floats
from schemas.telemetry import InstanceSample

STEP_S = 5.0
SILENT_STEPS = 12
"""After which a link is left out: its sender does not tell of it any more."""
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
        self._incarnations: dict[str, dict[str, str]] = {}

    def take(self, sample: InstanceSample, at: float) -> None:
        """Work in a sample's figures, received at `at` (seconds). Another incarnation's links begin anew."""
        links = self._jobs.setdefault(sample.job, {})
        known = self._incarnations.setdefault(sample.job, {})
        if known.get(sample.sid, sample.incarnation) != sample.incarnation:
            for link in [link for link in links if sample.sid in link]:
                del links[link]
        known[sample.sid] = sample.incarnation
        slot = int(at // STEP_S)
        for each in sample.links:
            figure = None if each.figures is None else each.figures.transfer_ms
            if figure is None or not isfinite(figure) or figure < 0:
                continue
            kept = links.setdefault((sample.sid, each.peer), deque(maxlen=self._steps))
            if kept and kept[-1][0] == slot:
                kept.pop()
            kept.append((slot, figure))

    def forget(self, job: str) -> None:
        """It has ended."""
        self._jobs.pop(job, None)
        self._incarnations.pop(job, None)

    def links(self, job: str, until: int, steps: int, most: int) -> list[Link]:
        """Those known for the last `steps` slots up to `until`, in order; of more than `most` the slowest.

        Left out: what began later, or fell silent.
        """
        begin, found = until - steps + 1, []
        for link, kept in self._jobs.get(job, {}).items():
            last = next(((slot, value) for slot, value in reversed(kept) if slot <= until), None)
            if last is not None and kept[0][0] <= begin and last[0] >= until - SILENT_STEPS:
                found.append((-last[1], link))
        return sorted(link for _, link in sorted(found)[:most])

    def table(self, job: str, links: Sequence[Link], until: int, steps: int) -> Floats:
        """Milliseconds of these links in the last `steps` slots up to `until`, shape `(steps, links)`.

        Raises:
            KeyError: one of them is not known any more.
        """
        slots = np.arange(until - steps + 1, until + 1)
        table = np.empty((steps, len(links)))
        for column, link in enumerate(links):
            at, values = (np.array(side) for side in zip(*self._jobs[job][link], strict=True))
            table[:, column] = values[np.maximum(np.searchsorted(at, slots, side="right") - 1, 0)]
        return table
