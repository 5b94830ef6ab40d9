"""What a unit asks of the units before it, pure: which microbatches' samples, and of whom (ADR-0062).

A microbatch's samples are a pure function of its number, whoever makes them. So whatever was asked of an
instance that is lost, silent or slow is asked of another one, and the first answer counts; no fence is
needed, and nothing is lost or doubled.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from schemas.data_plane import HopLoad, MicrobatchNotice, RouteTable
from schemas.step import Member
from workers.routing.next_hop import Binder

Key = tuple[bool, int, int]
"""(evaluate, step, microbatch)."""


@dataclass(frozen=True, kw_only=True)
class PullConfig:
    """How long an instance may keep its askers waiting. Seconds."""

    again_s: float = 5.0
    """From then on another one is asked as well. Less asks twice for what is only slow."""
    look_s: float = 0.25
    """Seconds between two looks at what has taken too long."""
    suspect_s: float = 2.0
    """For so long nothing is asked of an instance that could not be reached, if there is another one."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Effect: ask this instance for the samples of a microbatch."""

    key: Key
    of: Member


@dataclass(slots=True)
class _OpenPull:
    of: Member | None = None
    asked_at: float = 0.0


@dataclass(slots=True)
class AnsweringMachine:
    """A unit before the entry, as far as the step transaction goes: it is asked, and has no state to fence.

    Whoever asks gets the same samples, of whatever epoch it is: they depend on nothing but the job.
    """

    member: Member
    epoch: int
    attempt: int = 0
    step: int = 0
    fenced: set[Member] = field(default_factory=set)

    def offered(self, notice: MicrobatchNotice) -> str:
        """The answer to an offer: `accepted` or `stale`."""
        if notice.direction != "pull" or notice.receiver != self.member:
            return "stale"
        if not notice.evaluate:
            self.step = max(self.step, notice.step)
        return "accepted"

    def bind(self) -> list[Any]:
        """Nothing: it hands on only what it is asked for."""
        return []


class PullMachine:
    """Of one unit that asks.

    Args:
        stage: Number of the units that it asks.
        binder: For these alone: windows, and who is free first.
        config: Its patience.
    """

    def __init__(self, stage: int, binder: Binder, config: PullConfig = PullConfig()) -> None:
        self.stage = stage
        self.config = config
        self._binder = binder
        self._wanted: dict[Key, _OpenPull] = {}
        self._table: RouteTable | None = None
        self._suspects: dict[Member, float] = {}

    @property
    def waiting(self) -> int:
        """Microbatches whose samples have not come yet."""
        return len(self._wanted)

    def want(self, key: Key, now: float) -> list[Pull]:
        """The samples are needed. Idempotent."""
        if key in self._wanted:
            return []
        self._wanted[key] = _OpenPull()
        return self.bind(now)

    def unwant(self, key: Key, now: float) -> list[Pull]:
        """They are not needed any more."""
        return self.bind(now) if self._over(key, None) else []

    def wants(self, key: Key) -> bool:
        return key in self._wanted

    def arrived(self, key: Key, sender: Member, load: HopLoad | None, now: float) -> list[Pull]:
        """They have come, from `sender`; more than once changes nothing."""
        return self.bind(now) if self._over(key, sender, load) else []

    def _over(self, key: Key, sender: Member | None, load: HopLoad | None = None) -> bool:
        entry = self._wanted.pop(key, None)
        if entry is None:
            return False
        if entry.of is not None:
            self._binder.returned(entry.of.sid, load if entry.of == sender else None)
        return True

    def bind(self, now: float) -> list[Pull]:
        """Asks for what nobody was asked for yet, as far as windows allow: validations first, for which
        training waits; then by step.
        """
        effects = []
        unasked = [key for key, entry in self._wanted.items() if entry.of is None]
        for key in sorted(unasked, key=lambda key: (not key[0], *key[1:])):
            member = self._binder.bind(self.stage)
            if member is None:
                break
            self._wanted[key] = _OpenPull(member, now)
            effects.append(Pull(key, member))
        return effects

    # --- those that are asked -------------------------------------------------------------------------------
    def route(self, table: RouteTable, now: float) -> list[Pull]:
        """Takes a new table: what was asked of an incarnation that is not in it is asked of others."""
        self._table = table
        self._suspects = {member: until for member, until in self._suspects.items() if until > now}
        return self._review(now)

    def failed(self, member: Member, now: float) -> list[Pull]:
        """An instance could not be reached, or its link has ended: perhaps it is dead."""
        self._suspects[member] = now + self.config.suspect_s
        return self._review(now)

    def passed(self, now: float) -> list[Pull]:
        """Time has passed: suspicions end, and what has taken too long is asked of others."""
        late = {
            entry.of
            for entry in self._wanted.values()
            if entry.of is not None and now - entry.asked_at > self.config.again_s
        }
        over = [member for member, until in self._suspects.items() if until <= now]
        for member in over:
            del self._suspects[member]
        for member in late:
            self._suspects[member] = now + self.config.suspect_s
        return self._review(now) if late or over else []

    def _review(self, now: float) -> list[Pull]:
        if self._table is None:
            return []
        entries = [
            entry
            for entry in self._table.entries
            if Member.of(entry.sid, entry.incarnation) not in self._suspects
        ]
        if not any(entry.weight > 0 for entry in entries):
            entries = list(self._table.entries)  # whoever there is
        self._binder.update(self._table.model_copy(update={"entries": tuple(entries)}))
        self._release({Member.of(entry.sid, entry.incarnation) for entry in entries} - self._suspects.keys())
        return self.bind(now)

    def _release(self, present: Set[Member]) -> None:
        for entry in self._wanted.values():
            if entry.of is not None and entry.of not in present:
                self._binder.returned(entry.of.sid)
                entry.of = None
