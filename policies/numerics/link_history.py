"""Transfer times of instances' links on a grid of equal steps, for policies (pure).

Instances report a link's figures when they change, and every five seconds (ADR-0019); between reports the
last figures hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import ClassVar

import numpy as np
from typing_extensions import TypedDict

from policies.numerics.features import Floats
from schemas.telemetry import InstanceSample

SILENT_STEPS = 12
"""Steps without a report after which a link is left out."""
MOST_SILENT_STEPS = 720
"""Steps, an hour, that a link may lie behind the newest of all to be kept: nobody heard its job's end."""
DIGITS = 4
"""Decimals of the milliseconds that are remembered: a tenth of a microsecond, far below what clocks tell."""
Link = tuple[str, str]
"""Sender and receiver."""


class LinksOfJob(TypedDict):
    """The links of one job as plain data: each with sender, receiver, slots and milliseconds."""

    incarnations: dict[str, str]
    links: list[tuple[str, str, list[int], list[float]]]


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
            series.append((slot, round(transfer_ms, DIGITS)))

    def forget(self, job: str) -> None:
        """Drops an ended job."""
        self._jobs.pop(job, None)
        self._incarnations.pop(job, None)

    def as_data(self, most: int) -> dict[str, LinksOfJob]:
        """All series of the last hour as plain data; of more than `most` figures the slowest links'."""
        lasts = [values[-1][0] for links in self._jobs.values() for values in links.values()]
        newest = max(lasts, default=0)
        series = [
            (-values[-1][1], job, link, values)
            for job, links in self._jobs.items()
            for link, values in links.items()
            if values[-1][0] >= newest - MOST_SILENT_STEPS
        ]
        state: dict[str, LinksOfJob] = {}
        count = 0
        for _, job, link, values in sorted(series, key=lambda item: item[:3]):
            count += len(values)
            if count > most:
                break
            slots, times = zip(*values, strict=True)
            of_job = state.setdefault(job, LinksOfJob(incarnations={}, links=[]))
            of_job["links"].append((*link, list(slots), list(times)))
            known = self._incarnations[job]
            of_job["incarnations"].update((sid, known[sid]) for sid in link if sid in known)
        for of_job in state.values():
            of_job["links"].sort()
        return state

    def restore(self, state: Mapping[str, LinksOfJob]) -> None:
        """Goes on from what `as_data` returned.

        Raises:
            ValueError: A series has no figures, or they are not in order.
        """
        jobs: dict[str, dict[Link, deque[tuple[int, float]]]] = {}
        for job, of_job in state.items():
            links = jobs.setdefault(job, {})
            for sender, receiver, slots, times in of_job["links"]:
                if not slots or len(slots) != len(times) or any(np.diff(slots) <= 0) or min(times) < 0:
                    raise ValueError(f"the figures of {sender} → {receiver} are out of order")
                links[sender, receiver] = deque(zip(slots, times, strict=True), maxlen=self._steps)
        self._jobs = jobs
        self._incarnations = {job: dict(of_job["incarnations"]) for job, of_job in state.items()}

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
