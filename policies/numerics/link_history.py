"""Transfer times of instances' links on a grid of equal steps, for policies (pure).

Instances report a link's figures when they change, and every five seconds (ADR-0019); between reports the
last figures hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isfinite
from typing import ClassVar

import numpy as np

from policies.numerics.features import Floats
from schemas.telemetry import InstanceSample

SILENT_STEPS = 12
"""Steps without a report after which a link is left out."""
Link = tuple[str, str]
"""Sender and receiver."""


class LinkHistory:
    """Transfer times of all links of all jobs. `take` is the only way in.

    Args:
        steps: Steps kept of each link.
    """

    step_s: ClassVar[float] = 5.0
    """Seconds of one step."""

    def __init__(self, steps: int = 160) -> None:
        self._steps = steps
        self._jobs: dict[str, dict[Link, deque[tuple[int, float]]]] = {}
        self._incarnations: dict[str, dict[str, str]] = {}

    def take(self, sample: InstanceSample, at: float) -> None:
        """Adds a sample's figures, received at `at` (seconds). A new incarnation's links begin anew."""
        links = self._jobs.setdefault(sample.job, {})
        incarnations = self._incarnations.setdefault(sample.job, {})
        if incarnations.get(sample.sid, sample.incarnation) != sample.incarnation:
            for link in [link for link in links if sample.sid in link]:
                del links[link]
        incarnations[sample.sid] = sample.incarnation
        slot = int(at // self.step_s)
        for link_sample in sample.links:
            figures = link_sample.figures
            transfer_ms = None if figures is None else figures.transfer_ms
            if transfer_ms is None or not isfinite(transfer_ms) or transfer_ms < 0:
                continue
            series = links.setdefault((sample.sid, link_sample.peer), deque(maxlen=self._steps))
            if series and series[-1][0] == slot:
                series.pop()
            series.append((slot, transfer_ms))

    def forget(self, job: str) -> None:
        """Drops an ended job."""
        self._jobs.pop(job, None)
        self._incarnations.pop(job, None)

    def links(self, job: str, until: int, steps: int, most: int) -> list[Link]:
        """Links with figures for the last `steps` slots up to `until`, in order; at most the `most` slowest.

        Links that began later or fell silent are left out.
        """
        begin, candidates = until - steps + 1, []
        for link, series in self._jobs.get(job, {}).items():
            last = next(((slot, value) for slot, value in reversed(series) if slot <= until), None)
            if last is not None and series[0][0] <= begin and last[0] >= until - SILENT_STEPS:
                candidates.append((-last[1], link))
        return sorted(link for _, link in sorted(candidates)[:most])

    def table(self, job: str, links: Sequence[Link], until: int, steps: int) -> Floats:
        """Milliseconds of these links in the last `steps` slots up to `until`, shape `(steps, links)`.

        Raises:
            KeyError: A link is not known any more.
        """
        slots = np.arange(until - steps + 1, until + 1)
        table = np.empty((steps, len(links)))
        for column, link in enumerate(links):
            at, values = (np.array(side) for side in zip(*self._jobs[job][link], strict=True))
            table[:, column] = values[np.maximum(np.searchsorted(at, slots, side="right") - 1, 0)]
        return table
