"""The quality of a directed link, from its traffic: latency, bandwidth, loss, trend, cost of a transfer.

A transfer takes `latency + bytes / bandwidth`. The receiver times it, from requesting it to having it, and
sends the time with its receipt; eight bytes there and back (a ping) take only the latency. A ping precedes a
transfer, so that the time beyond that ping is due to the transfer's size, however the latency changes. That
is the idea of pathchar (Jacobson 1997; Downey, SIGCOMM 1999), with moving averages of medians
(`workers.telemetry.load.Average`) in place of its minima: the estimate is of a transfer's time now, not at
its best.

A lost transfer is repeated: with a share p lost, p / (1 - p) attempts are lost for each that arrives, and
each costs the time until it is known to be lost (expected transmission time: De Couto et al., MobiCom 2003;
Draves et al., MobiCom 2004).

Pure: no clock, no I/O. Memory is bounded, each report O(1).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from schemas.limits import MOST_MS
from schemas.telemetry import LinkFigures, Trend
from workers.telemetry.load import Average

SMALL_BYTES = 1024
"""A transfer up to this size counts as a ping."""

SIZES = 6
"""Sizes kept apart, by powers of two; a seventh replaces the least used."""

SEEN = 64
"""Transfers after which the use counts of all sizes are halved, so that the usual size follows the job."""

WINDOW = 8
"""Transfers, or pings, per window of the trend, which compares the last window with the one before."""

TREND = 1.5
"""A trend is a change of the median by at least this factor."""

SIGNIFICANT = 0.25
"""A transfer's time beyond the latency below this share of it is noise: the bandwidth is unknown then."""

KEEP_LOSS = 31 / 32
"""Share of the attempt counts that stays at each attempt: the loss is roughly that of the last 32."""

PRIOR = 1.0
"""Attempts that count as successful before the first: one loss at the start is not a loss of all."""

MOST_BYTES = 2**50


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The cost of a microbatch over a link: `transfer_ms` to arrive, of which `wire_ms` occupy the link."""

    transfer_ms: float
    wire_ms: float = 0.0


@dataclass(slots=True)
class _Size:
    """Transfers of about one size. `wire`: their time beyond the latency, in milliseconds."""

    bytes: int = 0
    used: float = 0.0
    wire: Average = field(default_factory=Average)
    took_ms: deque[float] = field(default_factory=lambda: deque(maxlen=2 * WINDOW))


class LinkQuality:
    """One direction of a link. Impossible measurements are refused and counted."""

    def __init__(self) -> None:
        self.refused = 0
        self._latency = Average()
        self._last_ping_ms = 0.0
        self._pings: deque[float] = deque(maxlen=2 * WINDOW)
        self._waiting: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._sizes: dict[int, _Size] = {}
        self._attempts = 0.0
        self._lost = 0.0
        self._lost_ms = Average()

    # --- measurements -----------------------------------------------------------------------------------
    def pinged(self, took_ms: float) -> None:
        """Takes the round-trip time of a ping."""
        if not _sound(took_ms):
            self.refused += 1
            return
        ping_ms, self._last_ping_ms = max(took_ms, self._last_ping_ms), took_ms
        self._latency.add(took_ms)
        self._pings.append(took_ms)
        while self._waiting:
            self._take(*self._waiting.popleft(), ping_ms)

    def measured(self, size_bytes: int, took_ms: float, *, ahead: bool = True) -> None:
        """Takes the time of a transfer that had the link to itself.

        Args:
            ahead: The last ping preceded it. Else it waits for the next ping, and the longer of the two
                counts.
        """
        if not _sound(took_ms) or not 0 <= size_bytes <= MOST_BYTES:
            self.refused += 1
            return
        if size_bytes <= SMALL_BYTES:
            self.pinged(took_ms)
            return
        if ahead and self._pings:
            self._take(size_bytes, took_ms, self._last_ping_ms)
        else:
            self._waiting.append((size_bytes, took_ms))

    def _take(self, size_bytes: int, took_ms: float, ping_ms: float) -> None:
        size = self._size(size_bytes.bit_length())
        size.bytes = size_bytes
        size.used += 1
        if took_ms > ping_ms:  # else the ping was delayed, and the difference says nothing about size
            size.wire.add(took_ms - ping_ms)
        size.took_ms.append(took_ms)

    def arrived(self) -> None:
        """Counts an attempt that was not lost."""
        self._attempts = KEEP_LOSS * self._attempts + 1
        self._lost *= KEEP_LOSS

    def lost(self, after_ms: float) -> None:
        """Counts a lost attempt: its link broke, or could not be built, `after_ms` after it began."""
        if not 0 <= after_ms <= MOST_MS:
            self.refused += 1
            return
        self._attempts = KEEP_LOSS * self._attempts + 1
        self._lost = KEEP_LOSS * self._lost + 1
        self._lost_ms.add(after_ms)

    def _size(self, power: int) -> _Size:
        if sum(size.used for size in self._sizes.values()) >= SEEN:
            for size in self._sizes.values():
                size.used /= 2
        found = self._sizes.get(power)
        if found is None:
            if len(self._sizes) >= SIZES:
                del self._sizes[min(self._sizes, key=lambda key: self._sizes[key].used)]
            found = self._sizes[power] = _Size()
        return found

    # --- estimates ----------------------------------------------------------------------------------------
    @property
    def latency_ms(self) -> float | None:
        """Time of the smallest transfer: the receiver's request and the sender's reply."""
        return self._latency.value if self._pings else None

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Bandwidth from transfers of the usual size, or the largest; None if latency dominates them."""
        for size in (self._usual, max(self._sizes.values(), key=lambda size: size.bytes, default=None)):
            if size is not None and size.wire.value > SIGNIFICANT * self._latency.value:
                return size.bytes / size.wire.value * 1e3
        return None

    @property
    def loss(self) -> float:
        """Share of the attempts that had to be repeated."""
        return self._lost / (self._attempts + PRIOR)

    @property
    def usual_bytes(self) -> int:
        """The size that most transfers have; 0 before the first."""
        return self._usual.bytes if self._usual is not None else 0

    @property
    def cost(self) -> LinkCost | None:
        """Cost of a transfer of the usual size, lost attempts included; None: nothing was measured."""
        usual = self._usual
        if usual is None and not self._pings:
            return None
        wire_ms = usual.wire.value if usual is not None else 0.0
        retries = self.loss / (1.0 - self.loss)
        transfer_ms = self._latency.value + wire_ms + retries * self._lost_ms.value
        return LinkCost(transfer_ms, wire_ms if wire_ms > SIGNIFICANT * self._latency.value else 0.0)

    def trend(self, least_ms: float = 1.0) -> tuple[Trend, str]:
        """Whether transfers (or pings, if there are none) become slower or faster, and the evidence.

        A change by less than `least_ms` is no trend.
        """
        usual = self._usual
        if usual is not None and len(usual.took_ms) == 2 * WINDOW:
            times_ms, what = list(usual.took_ms), f"transfers of {usual.bytes} bytes"
        elif len(self._pings) == 2 * WINDOW:
            times_ms, what = list(self._pings), "pings"
        else:
            return "", ""
        before, now = median(times_ms[:WINDOW]), median(times_ms[WINDOW:])
        evidence = f"last {WINDOW} {what} {now:.1f} ms, {WINDOW} before {before:.1f} ms"
        if max(before, now) < TREND * min(before, now) or abs(now - before) < least_ms:
            return "steady", evidence
        return ("slower" if now > before else "faster"), evidence

    def figures(self) -> LinkFigures | None:
        """The figures for telemetry; None: nothing was measured."""
        cost = self.cost
        if cost is None and not self._attempts:
            return None
        trend, evidence = self.trend()
        latency_ms, bandwidth = self.latency_ms, self.bandwidth_bytes_per_s
        return LinkFigures(
            latency_ms=None if latency_ms is None else round(latency_ms, 3),
            bandwidth_bytes_per_s=None if bandwidth is None else round(bandwidth),
            loss=round(self.loss, 4),
            bytes=self.usual_bytes,
            transfer_ms=None if cost is None else round(cost.transfer_ms, 3),
            trend=trend,
            evidence=evidence,
        )

    @property
    def _usual(self) -> _Size | None:
        return max(self._sizes.values(), key=lambda size: size.used, default=None)


@dataclass(slots=True)
class LinkBothWays:
    """A link as one end sees it: sent transfers (timed by the receiver) and received ones."""

    out: LinkQuality = field(default_factory=LinkQuality)
    back: LinkQuality = field(default_factory=LinkQuality)

    @property
    def cost(self) -> LinkCost | None:
        """Cost of a microbatch there and back; the two directions do not share the wire."""
        out, back = self.out.cost, self.back.cost
        if out is None or back is None:
            return out or back
        return LinkCost(out.transfer_ms + back.transfer_ms, max(out.wire_ms, back.wire_ms))


class LinkReporting:
    """Decides when to report a link's figures: when they have changed, and every `EVERY_S` seconds."""

    EVERY_S = 5.0
    CHANGE = 0.1

    def __init__(self) -> None:
        self._reported: LinkFigures | None = None
        self._at = -math.inf

    def news(self, figures: LinkFigures | None, now: float) -> LinkFigures | None:
        """The figures, if they differ by `CHANGE` from the last reported ones, or those are too old."""
        if figures is None or (now - self._at < self.EVERY_S and not self._differs(figures)):
            return None
        self._reported, self._at = figures, now
        return figures

    def _differs(self, new: LinkFigures) -> bool:
        old = self._reported
        if old is None or (old.trend, old.bytes) != (new.trend, new.bytes):
            return True
        pairs = (
            (old.latency_ms, new.latency_ms),
            (old.bandwidth_bytes_per_s, new.bandwidth_bytes_per_s),
            (old.transfer_ms, new.transfer_ms),
        )
        if abs(old.loss - new.loss) > self.CHANGE / 10:
            return True
        return any(
            (a is None) != (b is None)
            or (a is not None and b is not None and abs(a - b) > self.CHANGE * max(a, b))
            for a, b in pairs
        )


def _sound(took_ms: float) -> bool:
    return 0 < took_ms <= MOST_MS
