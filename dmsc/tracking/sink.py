"""What a sink of figures does for the tracker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from dmsc.tracking.figures import SinkPosition, TrackedPoint, TrackedRun
from schemas.errors import Unavailable


class SinkAway(Unavailable):
    """The sink's server does not answer now; the same call may be repeated."""

    code = "sink_away"


class Sink(Protocol):
    """Stores the figures of runs. Its methods block; one call runs at a time.

    A call that raised `SinkAway`, or during which the process died, may have stored a part: what is stored
    again after `begin` must not be there twice.
    """

    name: str
    position_file: Path
    """Where the tracker notes how far it has read the stream for this sink. If it is lost, `begin` tells."""

    def begin(self, run: TrackedRun) -> SinkPosition:
        """Open a run, new or known; return what is stored of it."""

    def write(self, job: str, points: Sequence[TrackedPoint], position: SinkPosition) -> None:
        """Store these points of an open run, and that all events up to `position` are stored."""

    def close(self, job: str | None = None) -> None:
        """Close a run, or all. What was written stays."""
