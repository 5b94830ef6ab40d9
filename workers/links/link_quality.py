"""How good a directed link is, by what went over it: latency, bandwidth, loss, trend, cost of a transfer.

A transfer takes `latency + bytes / bandwidth`. The receiver times it, from asking for it to having it, and
says so beside its receipt; eight bytes there and back (a ping) take the latency alone. A ping goes ahead of a
transfer, so that what the transfer took beyond its own ping is due to its size, whatever the latency does
meanwhile. That is the idea of pathchar (Jacobson 1997; Downey, SIGCOMM 1999), with moving averages of medians
(`workers.telemetry.load.Average`) in place of its minima: what counts is what a transfer takes now, not at
its best.

A transfer that was lost is made again: with a part p lost, p / (1 - p) attempts are lost for each that
arrives, and each costs the time until it is known to be lost (expected transmission time: De Couto et al.,
MobiCom 2003; Draves et al., MobiCom 2004).

Pure: no clock, no I/O. Memory is bounded, each report O(1).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from schemas.telemetry import LinkFigures, Trend
from workers.telemetry.load import Average

SMALL_BYTES = 1024
"""A transfer up to this size is as good as a ping."""

SIZES = 6
"""Sizes told apart, by powers of two; a seventh takes the place of the least used."""

SEEN = 64
"""Transfers after which how often a size was used counts half: the usual size follows the job."""

WINDOW = 8
"""Transfers, or pings, per window of the trend: the last one beside the one before."""

TREND = 1.5
TREND_MS = 1.0
"""A trend is a change of the median by this factor, and by this much at least."""

TELLING = 0.25
"""Where size makes up less than this part of the latency, it is noise: the bandwidth is not known."""

KEEP_LOSS = 31 / 32
"""Part of the counts of attempts that stays with each: loss is that of the last 32, roughly."""

PRIOR = 1.0
"""Attempts that count as successful before the first: one loss at the start is not a loss of all."""

MOST_MS = 1e7
MOST_BYTES = 2**50


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What sending a microbatch over a link costs: `transfer_ms` until it is there, of which it occupies the
    link for `wire_ms`."""

    transfer_ms: float
    wire_ms: float = 0.0


@dataclass(slots=True)
class _Size:
    """Transfers of about one size. `wire`: what they take beyond the latency."""

    bytes: int = 0
    used: float = 0.0
    wire: Average = field(default_factory=Average)
    took_ms: deque[float] = field(default_factory=lambda: deque(maxlen=2 * WINDOW))


class LinkQuality:
    """One direction of a link. What can't be believed is refused and counted."""

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

    # --- what happened ----------------------------------------------------------------------------------
    def pinged(self, took_ms: float) -> None:
        """A word went there and back."""
        if not _sound(took_ms):
            self.refused += 1
            return
        beside_ms, self._last_ping_ms = max(took_ms, self._last_ping_ms), took_ms
        self._latency.add(took_ms)
        self._pings.append(took_ms)
        while self._waiting:
            self._take(*self._waiting.popleft(), beside_ms)

    def measured(self, size_bytes: int, took_ms: float, *, ahead: bool = True) -> None:
        """A transfer arrived that had the link to itself. `ahead`: the last ping went ahead of it; else it
        waits for the next one, and the longer of the two counts."""
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
        held = self._size(size_bytes.bit_length())
        held.bytes = size_bytes
        held.used += 1
        if took_ms > ping_ms:  # else it was the ping that paused, and says nothing about size
            held.wire.add(took_ms - ping_ms)
        held.took_ms.append(took_ms)

    def arrived(self) -> None:
        """An attempt was not lost."""
        self._attempts = KEEP_LOSS * self._attempts + 1
        self._lost *= KEEP_LOSS

    def lost(self, after_ms: float) -> None:
        """An attempt has to be made again: its link broke, or was not built, `after_ms` after it began."""
        if not math.isfinite(after_ms) or not 0 <= after_ms <= MOST_MS:
            self.refused += 1
            return
        self._attempts = KEEP_LOSS * self._attempts + 1
        self._lost = KEEP_LOSS * self._lost + 1
        self._lost_ms.add(after_ms)

    def _size(self, power: int) -> _Size:
        if sum(size.used for size in self._sizes.values()) >= SEEN:
            for size in self._sizes.values():
                size.used /= 2
        held = self._sizes.get(power)
        if held is None:
            if len(self._sizes) >= SIZES:
                del self._sizes[min(self._sizes, key=lambda one: self._sizes[one].used)]
            held = self._sizes[power] = _Size()
        return held

    # --- what follows -------------------------------------------------------------------------------------
    @property
    def latency_ms(self) -> float | None:
        """Of a transfer however small: the receiver asks, the sender sends."""
        return self._latency.value if self._pings else None

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """By the usual size, or the largest; None where latency is nearly all that transfers take."""
        for size in (self._usual, max(self._sizes.values(), key=lambda one: one.bytes, default=None)):
            if size is not None and size.wire.value > TELLING * self._latency.value:
                return size.bytes / size.wire.value * 1e3
        return None

    @property
    def loss(self) -> float:
        """Part of the attempts that had to be made again."""
        return self._lost / (self._attempts + PRIOR)

    @property
    def usual_bytes(self) -> int:
        """The size that most transfers have; 0 before the first."""
        return self._usual.bytes if self._usual is not None else 0

    @property
    def cost(self) -> LinkCost | None:
        """Of a transfer of the usual size, what is lost included; None: nothing was measured."""
        usual = self._usual
        if usual is None and not self._pings:
            return None
        wire_ms = usual.wire.value if usual is not None else 0.0
        retries = self.loss / (1.0 - self.loss)
        transfer_ms = self._latency.value + wire_ms + retries * self._lost_ms.value
        return LinkCost(transfer_ms, wire_ms if wire_ms > TELLING * self._latency.value else 0.0)

    def trend(self) -> tuple[Trend, str]:
        """Whether transfers (or pings, where there are none) become slower or faster, and the evidence."""
        usual = self._usual
        if usual is not None and len(usual.took_ms) == 2 * WINDOW:
            seen, what = list(usual.took_ms), f"transfers of {usual.bytes} bytes"
        elif len(self._pings) == 2 * WINDOW:
            seen, what = list(self._pings), "pings"
        else:
            return "", ""
        before, now = median(seen[:WINDOW]), median(seen[WINDOW:])
        evidence = f"last {WINDOW} {what} {now:.1f} ms, {WINDOW} before {before:.1f} ms"
        if max(before, now) < TREND * min(before, now) or abs(now - before) < TREND_MS:
            return "steady", evidence
        return ("slower" if now > before else "faster"), evidence

    def figures(self) -> LinkFigures | None:
        """As telemetry tells them; None: nothing was measured."""
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
        return max(self._sizes.values(), key=lambda one: one.used, default=None)


@dataclass(slots=True)
class LinkBothWays:
    """A link as one end sees it: what it sends (the receiver says how long that took), and what it gets."""

    out: LinkQuality = field(default_factory=LinkQuality)
    back: LinkQuality = field(default_factory=LinkQuality)

    @property
    def cost(self) -> LinkCost | None:
        """Of a microbatch that goes there and comes back; the two ways do not share what they occupy."""
        out, back = self.out.cost, self.back.cost
        if out is None or back is None:
            return out or back
        return LinkCost(out.transfer_ms + back.transfer_ms, max(out.wire_ms, back.wire_ms))


class LinkReporting:
    """Which figures of a link are worth telling: news, and all of them now and then."""

    EVERY_S = 5.0
    CHANGE = 0.1

    def __init__(self) -> None:
        self._told: LinkFigures | None = None
        self._at = -math.inf

    def news(self, figures: LinkFigures | None, now: float) -> LinkFigures | None:
        """The figures, if they differ by `CHANGE` from the last that were told, or those are too old."""
        if figures is None or (now - self._at < self.EVERY_S and not self._differ(figures)):
            return None
        self._told, self._at = figures, now
        return figures

    def _differ(self, new: LinkFigures) -> bool:
        old = self._told
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
    return math.isfinite(took_ms) and 0 < took_ms <= MOST_MS
