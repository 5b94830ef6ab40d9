"""Shaped links: an emulation of bad networks on the data plane, for tests and benchmarks.

Kernel netem in a network namespace is the better tool, but many systems lack it, and instances of one node
share its loopback. So this module delays everything that a process sends over a link, as netem delays the
outgoing packets of an interface: tensors, receipts, pings, and the receiver's requests for transfers. Lower
layers (TCP's own retransmissions, gloo's handshakes) are not emulated. Do not train with it.

The environment variable `DMSC_LINK_SHAPING` of a node agent names a file for all instances that it starts:

    {"links": [{"from": "job-1-s0-r0", "to": "*-s1-r1", "latency_ms": 300, "bytes_per_s": 2e6, "loss": 0.02}]}

`from` and `to` are SIDs, in which `*` matches any part. The first matching entry applies, in that direction
only. `loss` is the share of transfers whose link breaks. The file may appear, change and disappear at any
time; a change applies from the next transfer on. A file that can't be read shapes nothing and is logged.
A sandboxed instance sees no such file: the node needs `--trust-researchers`.

The script of an emulated slot (`schemas.slot_conditions`) shapes all that is sent from the slot, where no
entry of the file applies, and sandboxed instances as well.
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
from schemas.slot_conditions import SlotPhase
from workers.devices.emulated_slot import EmulatedSlotConditions

log = get_logger("workers.links.link_shaping")

ENVIRONMENT = "DMSC_LINK_SHAPING"
WORD_BYTES = 8
"""Sends up to this size, receipts and pings, are delayed but never lost."""


class Shape(Part):
    """One direction of a link, or of several."""

    sender: str = Field(alias="from")
    receiver: str = Field(alias="to")
    latency_ms: float = Field(0.0, ge=0, le=60_000)
    bytes_per_s: float | None = Field(None, gt=0)
    loss: float = Field(0.0, ge=0, lt=1)


class Shapes(Part):
    """The content of the file."""

    links: tuple[Shape, ...] = ()


@dataclass
class Shaping:
    """The shapes of the file's present content, and those of the slot that this process stands in."""

    path: Path | None
    slot: EmulatedSlotConditions | None = None
    _file_version: tuple[int, int] | None = None
    _shapes: Shapes = field(default_factory=Shapes)
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    @classmethod
    def of_environment(
        cls, environment: Mapping[str, str], slot: EmulatedSlotConditions | None = None
    ) -> Shaping | None:
        path = environment.get(ENVIRONMENT)
        if not path and (slot is None or slot.script is None):
            return None
        return cls(Path(path) if path else None, slot)

    def of(self, sender: str, receiver: str) -> Shape | SlotPhase | None:
        """The present shape of the direction from `sender` to `receiver`; None: not shaped."""
        named = self._named(sender, receiver)
        return named if named is not None or self.slot is None else self.slot.link_now()

    def _named(self, sender: str, receiver: str) -> Shape | None:
        """What the file says of this direction."""
        if self.path is None:
            return None
        try:
            status = self.path.stat()
            file_version = (status.st_mtime_ns, status.st_size)
            if file_version != self._file_version:
                self._file_version = file_version
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
        """The line for the sends of one link."""
        return ShapedLine(lambda: self.of(sender, receiver), self._random)


class ShapedLine:
    """One direction of a link: first come, first served at its rate, then the latency."""

    def __init__(self, shape: Callable[[], Shape | SlotPhase | None], chance: random.Random) -> None:
        self._shape = shape
        self._loop = asyncio.get_running_loop()
        self._random = chance
        self._free_at = 0.0

    def post(self, size: int, put: Callable[[], None], lost: Callable[[], None]) -> None:
        """Calls `put` when the last of `size` bytes would arrive, or `lost` then. From any thread."""
        self._loop.call_soon_threadsafe(self._queue, size, put, lost)

    def _queue(self, size: int, put: Callable[[], None], lost: Callable[[], None]) -> None:
        shape, now = self._shape(), self._loop.time()
        if shape is None:
            put()
            return
        wire_s = size / shape.bytes_per_s if shape.bytes_per_s else 0.0
        self._free_at = max(now, self._free_at) + wire_s
        is_lost = size > WORD_BYTES and self._random.random() < shape.loss
        self._loop.call_at(self._free_at + shape.latency_ms / 1e3, lost if is_lost else put)
