"""How links are built, kept and measured: one configuration for all links of an instance."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.limits import LEAST_BYTES_PER_S, REPEAT_FIRST_S, REPEAT_MOST_S, SLOWEST_BYTES_PER_S
from workers.links.link_shaping import Shaping
from workers.transport.gloo import GroupConfig


@dataclass(frozen=True, kw_only=True)
class LinkConfig(GroupConfig):
    """How links are built and kept. A build takes 1–20 ms."""

    transfer_timeout_s: float = 30.0
    """Timeout of an accepted transfer; its size at `slowest_bytes_per_s`, or at a quarter of the measured
    rate if that is less, is added. The agent of a stopped peer reports it long before."""
    slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S
    withdrawn_s: float = 5.0
    """How long a withdrawn offer stays open so that the receiver can decline it; then its link is dropped."""
    ping_s: float = 0.5
    """Seconds between pings of an idle link, so that links without work are measured too."""
    ping_gap_s: float = 0.1
    """A ping precedes the first two transfers, and a later one if the last ping is older than this."""
    ping_timeout_s: float = 10.0
    """Timeout of a ping: after it, another may be sent."""
    waiting_alive_s: float = 1.0
    """How often a prepare that waits for the sums of tied stages says so. Their members have deadlines of
    their own, and a stage that was lost may take minutes to come back; meanwhile this one is not silent."""
    most: int = 64
    """Most links kept; each costs two threads and one socket."""
    target: str = "cpu"
    """Device on which received tensors are delivered."""
    shaping: Shaping | None = None
    """Emulates bad links, for tests and benchmarks."""


def next_pause(pause_s: float, answer: str | None) -> float:
    """The pause after the next repetition of a notice: doubling without an answer, short after `later`."""
    return REPEAT_FIRST_S if answer == "later" else min(pause_s * 2, REPEAT_MOST_S)


def slowest_bytes_per_s(
    measured_bytes_per_s: float | None, assumed_bytes_per_s: float = SLOWEST_BYTES_PER_S
) -> float:
    """The slowest rate at which a link may move before it counts as broken."""
    if measured_bytes_per_s is None:
        return assumed_bytes_per_s
    return min(assumed_bytes_per_s, max(measured_bytes_per_s / 4, LEAST_BYTES_PER_S))
