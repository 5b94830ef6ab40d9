"""Shaped links: an emulation of bad networks at the data plane, for tests and benchmarks.

Where the kernel has netem in a network namespace, that is the better tool. Many have not, and instances of
one node share its loopback. So what a process hands to a link can be delayed here, as netem would delay what
goes out of an interface: tensors, receipts, pings, and the receiver's asking for a transfer. What lies below
(TCP's own retransmissions, gloo's handshakes) is not emulated. Nobody should train with it.

The environment variable `DMSC_LINK_SHAPING` of a node agent names a file for all instances that it starts:

    {"links": [{"from": "job-1-s0-r0", "to": "*-s1-r1", "latency_ms": 300, "bytes_per_s": 2e6, "loss": 0.02}]}

`from` and `to` are SIDs, `*` for any part; the first that fits counts, for that direction alone. `loss` is
the part of transfers whose link breaks. The file may appear, change and go at any time: it counts from the
next transfer on. One that can't be read shapes nothing and is logged.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import Field, ValidationError

from bus.logs import get_logger
from schemas.base import Part

log = get_logger("workers.links.link_shaping")

ENVIRONMENT = "DMSC_LINK_SHAPING"
WORD_BYTES = 8
"""Receipts and pings: delayed, never lost."""


class Shape(Part):
    """One direction of a link, or of several."""

    sender: str = Field(alias="from")
    receiver: str = Field(alias="to")
    latency_ms: float = Field(0.0, ge=0, le=60_000)
    bytes_per_s: float | None = Field(None, gt=0)
    loss: float = Field(0.0, ge=0, lt=1)


class Shapes(Part):
    """The file."""

    links: tuple[Shape, ...] = ()


@dataclass
class Shaping:
    """The file as it stands."""

    path: Path
    _seen: tuple[int, int] | None = None
    _shapes: Shapes = field(default_factory=Shapes)
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Shaping | None:
        named = environment.get(ENVIRONMENT)
        return cls(Path(named)) if named else None

    def of(self, sender: str, receiver: str) -> Shape | None:
        """How what `sender` sends to `receiver` is shaped now."""
        try:
            status = self.path.stat()
            seen = (status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                self._seen = seen
                self._shapes = Shapes.model_validate_json(self.path.read_bytes())
                log.warning("links are shaped", file=str(self.path), links=len(self._shapes.links))
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            log.error("links are not shaped", file=str(self.path), error=str(error).split("\n")[0])
            self._shapes = Shapes()
        for shape in self._shapes.links:
            if fnmatchcase(sender, shape.sender) and fnmatchcase(receiver, shape.receiver):
                return shape
        return None

    def line(self, sender: str, receiver: str) -> ShapedLine:
        """What a link puts its sends through."""
        return ShapedLine(lambda: self.of(sender, receiver), self._random)


class ShapedLine:
    """One direction: first come, first served at its rate, then the latency. Called from any thread."""

    def __init__(self, shape: Callable[[], Shape | None], chance: random.Random) -> None:
        self._shape = shape
        self._loop = asyncio.get_running_loop()
        self._random = chance
        self._free_at = 0.0

    def post(self, size: int, put: Callable[[], None], lost: Callable[[], None]) -> None:
        """Calls `put` when the last of `size` bytes would be there, or `lost`."""
        self._loop.call_soon_threadsafe(self._queue, size, put, lost)

    def _queue(self, size: int, put: Callable[[], None], lost: Callable[[], None]) -> None:
        shape, now = self._shape(), self._loop.time()
        if shape is None:
            put()
            return
        wire_s = size / shape.bytes_per_s if shape.bytes_per_s else 0.0
        self._free_at = max(now, self._free_at) + wire_s
        gone = size > WORD_BYTES and self._random.random() < shape.loss
        self._loop.call_at(self._free_at + shape.latency_ms / 1e3, lost if gone else put)
