"""When an instance of this node is stalled, and when it is slower than the plan expects (draft §5.5). Pure.

Stalled: it has work and has finished none of it for many times as long as that takes. Underperforming: its
service time is a multiple of what the plan expects of its slot, in several samples in a row; its end needs as
many below a lower multiple. (`entities.detection.fail_slow` compares an instance with its own past instead.)
Time, samples and what the system shows of processes come in as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from entities.cluster.config import ChainConfig
from entities.cluster.core import ProcessState, ProcessWork
from schemas.fault import ChainCondition, FaultScope
from schemas.telemetry import InstanceSample


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceProbe:
    """An instance's process as the operating system shows it, and the work that it has done so far."""

    state: ProcessState
    work: ProcessWork = field(default_factory=ProcessWork)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCondition:
    """How an instance gets on; see `schemas.fault.ClusterReport`."""

    condition: ChainCondition = "well"
    scope: FaultScope = "none"
    kind: Literal["transient", "structural"] = "transient"
    slowness: float = 1.0
    evidence: str = ""

    def says_the_same(self, other: InstanceCondition) -> bool:
        return (self.condition, self.scope, self.kind) == (other.condition, other.scope, other.kind)


WELL = InstanceCondition()


@dataclass(slots=True)
class _Observed:
    """What is known of one incarnation."""

    sample: InstanceSample
    heard_at: float
    gap_s: float
    progressed_at: float
    work: ProcessWork | None = None
    """Of its process when it was last seen to get on."""
    slowness: float = 1.0
    strikes: int = 0
    slow: bool = False
    judged: int = 0
    """Samples that were judged by their service time."""
    broken: dict[str, float] = field(default_factory=dict)
    """Peers to which its links do not work, and when one last failed."""
    last: InstanceCondition = field(default=WELL)

    @property
    def has_work(self) -> bool:
        sample = self.sample
        return not sample.obeys and (sample.queue > 0 or sample.computing_ms > 0)

    @property
    def waits(self) -> bool:
        sample = self.sample
        return not (self.has_work or sample.obeys) and sample.in_flight > 0 and bool(sample.waits_for)


class ChainDetector:
    """Judges the stage instances of one node."""

    def __init__(self, config: ChainConfig = ChainConfig()) -> None:
        self._config = config
        self._observed: dict[str, _Observed] = {}

    def observe(self, sample: InstanceSample, expected_ms: float, now: float) -> None:
        """Take a sample.

        Args:
            sample: of an instance of this node.
            expected_ms: the time of a microbatch that the plan expects of its slot; 0: not known.
            now: seconds, from any beginning.
        """
        seen = self._observed.get(sample.sid)
        if seen is None or seen.sample.incarnation != sample.incarnation:
            seen = self._observed[sample.sid] = _Observed(sample, now, 1.0, now)
            self._note_links(seen, now)
            return
        before, seen.sample = seen.sample, sample
        seen.gap_s = max(1.0, now - seen.heard_at)
        seen.heard_at = now
        moved = sample.waits_for != before.waits_for or sample.in_flight != before.in_flight
        if sample.computed != before.computed or not (seen.has_work or seen.waits) or (seen.waits and moved):
            seen.progressed_at, seen.work = now, None
        self._note_links(seen, now)
        if sample.microbatches != before.microbatches and sample.service_ms > 0:
            self._weigh(seen, expected_ms)

    def _note_links(self, seen: _Observed, now: float) -> None:
        """A link that failed is broken until something has gone over another one."""
        for link in seen.sample.links:
            if link.errors:
                seen.broken[link.peer] = now
            elif link.sent_bytes or link.received_bytes or link.transfers:
                seen.broken.pop(link.peer, None)

    def broken_links(self, sid: str, now: float) -> tuple[str, ...]:
        """The peers to which an instance's links do not work, by its samples; what is long ago counts not."""
        seen = self._observed.get(sid)
        if seen is None:
            return ()
        return tuple(
            peer for peer, at in sorted(seen.broken.items()) if now - at <= self._config.broken_link_s
        )

    def _weigh(self, seen: _Observed, expected_ms: float) -> None:
        config = self._config
        if expected_ms <= 0:
            return
        seen.judged += 1
        excess_ms = seen.sample.service_ms - expected_ms
        seen.slowness = seen.sample.service_ms / expected_ms if excess_ms >= config.least_excess_ms else 1.0
        strike = seen.slowness < config.well if seen.slow else seen.slowness >= config.slow
        seen.strikes = seen.strikes + 1 if strike else 0
        if seen.strikes >= config.confirm:
            seen.slow, seen.strikes = not seen.slow, 0

    def review(self, now: float, probes: Mapping[str, InstanceProbe]) -> dict[str, InstanceCondition]:
        """The conditions that have changed since the last review, by SID.

        Args:
            now: as of `observe`.
            probes: the processes of the instances that are on this node, by SID; all others are forgotten.
        """
        changed = {}
        for sid in self._observed.keys() - probes.keys():
            gone = self._observed.pop(sid)
            if gone.last.condition != "well":
                changed[sid] = InstanceCondition(evidence=f"{sid} has ended")
        all_slow = len(self._observed) > 1 and all(seen.slow for seen in self._observed.values())
        for sid, seen in sorted(self._observed.items()):
            stalled = self._stalled(seen, probes[sid], now)
            condition = stalled or self._slow(seen, "node" if all_slow else "instance")
            if not condition.says_the_same(seen.last):
                if condition.condition == "well":
                    condition = InstanceCondition(slowness=seen.slowness, evidence=f"{sid} is well again")
                changed[sid] = seen.last = condition
        return changed

    def _stalled(self, seen: _Observed, probe: InstanceProbe, now: float) -> InstanceCondition | None:
        config, sample = self._config, seen.sample
        if probe.state == "stopped":
            text = f"{sample.sid}: its process is stopped, with {_work_of(sample)}"
            return InstanceCondition(condition="stalled", scope="instance", evidence=text)
        if not (seen.has_work or seen.waits):
            return None
        silent_s, still_s = now - seen.heard_at, now - seen.progressed_at
        usual_s = sample.service_ms / 1e3
        limit_s = max(config.stalled_least_s, config.stalled_times * usual_s)
        if not sample.microbatches:
            limit_s = max(limit_s, config.first_s)
        if seen.work is None:
            seen.work = probe.work
        is_silent = silent_s > max(config.silent_s, 5 * seen.gap_s)
        if not is_silent and still_s <= limit_s:
            return None
        if seen.waits:
            names = ", ".join(sample.waits_for)
            text = f"{sample.sid} waits for {names} for {still_s:.0f} s, {_times(still_s, usual_s)}"
            return InstanceCondition(condition="stalled", scope="none", evidence=text)
        computes = probe.work.gets_on(seen.work, still_s)
        hung = not computes or still_s > config.hung_times * limit_s
        how = "though it computes" if computes else "and does not compute"
        what = f"has finished nothing for {still_s:.0f} s"
        if is_silent:
            what = f"says nothing for {silent_s:.0f} s"
        text = f"{sample.sid} {what}, {_times(still_s, usual_s)}, with {_work_of(sample)}, {how}"
        kind: Literal["transient", "structural"] = "structural" if hung else "transient"
        return InstanceCondition(condition="stalled", scope="instance", kind=kind, evidence=text)

    def _slow(self, seen: _Observed, scope: FaultScope) -> InstanceCondition:
        if not seen.slow:
            return WELL
        sample, config = seen.sample, self._config
        text = (
            f"{sample.sid} takes {sample.service_ms:.1f} ms per microbatch, {seen.slowness:.1f}× what the "
            f"plan expects of its slot; {config.confirm} samples in a row"
        )
        if scope == "node":
            text += "; so do all instances of the node"
        return InstanceCondition(
            condition="underperforming", scope=scope, slowness=seen.slowness, evidence=text
        )

    def of(self, sid: str, incarnation: str) -> InstanceCondition | None:
        """The condition of this incarnation at the last review; None: it has sent no sample."""
        seen = self._observed.get(sid)
        return None if seen is None or seen.sample.incarnation != incarnation else seen.last

    def waits_for(self, sid: str) -> tuple[str, ...]:
        """The instances that this one waits for, by its last sample."""
        seen = self._observed.get(sid)
        return () if seen is None else seen.sample.waits_for

    def waiting(self, sid: str) -> tuple[str, ...]:
        """The instances of this node that wait for this one, by their last samples."""
        observed = self._observed.items()
        return tuple(sorted(other for other, seen in observed if seen.waits and sid in seen.sample.waits_for))

    def does_well(self, sid: str) -> bool:
        """Whether enough samples of an instance have been judged, and it is not slow."""
        seen = self._observed.get(sid)
        return seen is not None and seen.judged >= self._config.confirm and not seen.slow


def _work_of(sample: InstanceSample) -> str:
    at_hand = "1 microbatch at hand and " if sample.computing_ms > 0 else ""
    return f"{at_hand}{sample.queue} queued"


def _times(still_s: float, usual_s: float) -> str:
    return f"{still_s / usual_s:.0f} times as long as a microbatch takes" if usual_s > 0 else "its first work"
