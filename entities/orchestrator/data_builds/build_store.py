"""A build's record and its events: each change is recorded by compare-and-set, then published."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import KeyValueEntry
from bus.subjects import BUILD_EVENT, BUILD_RECORD
from entities.orchestrator.job_state.owned_record import OwnedRecord
from schemas.data_set.builds import (
    BUILD_TRANSITIONS,
    MOST_FAILURES,
    BuildEvent,
    BuildRecord,
    BuildState,
    PhaseProgress,
)
from schemas.data_set.units import UnitPhase
from schemas.errors import DmscError, IllegalTransition
from schemas.usage import JobUsage

log = get_logger("orchestrator")

HISTORY = 32
"""Changes of state and phase that a record keeps."""


@dataclass(frozen=True, kw_only=True)
class BuildStoreTimes:
    """When a build's record is written, in seconds."""

    retry_s: float = 0.2
    """Pause before a failed write is repeated."""
    record_every_s: float = 2.0
    """Shortest time between writes of figures; states and phases are written at once."""


class BuildStore:
    """Writes one build's record and events.

    `revision`: that of the present record; 0: there is none. `confirmed` returns once this orchestrator
    surely leads. Every call that writes raises `Fenced` once another one has written the record.
    """

    def __init__(
        self,
        bus: Bus,
        record: BuildRecord,
        revision: int,
        confirmed: Callable[[], Awaitable[None]],
        times: BuildStoreTimes = BuildStoreTimes(),
    ) -> None:
        self.record = record
        self._bus = bus
        self._times = times
        self._owned = OwnedRecord(
            bus.bucket(BUILD_RECORD),
            {"build": record.build},
            revision,
            self._is_ours,
            confirmed,
            times.retry_s,
        )
        self._written_at = 0.0

    async def move(self, state: BuildState, reason: str = "", **figures: Any) -> None:
        """Records and publishes that the build enters `state`, or why it stays there.

        Raises:
            IllegalTransition: the table of transitions forbids it.
        """
        before = self.record.state
        if state is not before and state not in BUILD_TRANSITIONS[before]:
            history = " | ".join(self.record.history)
            raise IllegalTransition(f"build {self.record.build}: {before} → {state} (history: {history})")
        line = f"{state}: {reason}" if reason else str(state)
        self._change(
            state=state,
            reason=reason,
            changed_at=time.time(),
            history=(*self.record.history, line)[-HISTORY:],
            **figures,
        )
        await self._write()
        log.info("build", build=self.record.build, state=str(state), reason=reason)
        version, digest = self.record.version, self.record.digest
        await self._tell("state", text=reason, state=state, version=version, digest=digest)

    async def progress(
        self, progress: PhaseProgress, rows_per_s: float, left_s: float | None, *, began: bool = False
    ) -> None:
        """Takes a phase's figures into the record; `began`: it begins or ends, which is told at once."""
        progress = progress.model_copy(update={"failures": self._failures_of(progress.phase)})
        self._change(phases=self._phases_with(progress), rows_per_s=rows_per_s, left_s=left_s)
        if not began and time.monotonic() - self._written_at < self._times.record_every_s:
            return
        await self._write()
        kind = "phase" if began else "progress"
        await self._tell(kind, progress=progress, rows_per_s=rows_per_s, left_s=left_s)

    async def failure(self, phase: UnitPhase, text: str) -> None:
        """An attempt at a unit of this phase has failed: counted in the record, which outlasts its writer."""
        count = self._failures_of(phase) + 1
        phases = tuple(
            each.model_copy(update={"failures": count}) if each.phase == phase else each
            for each in self.record.phases
        )
        self._change(phases=phases, failures=(*self.record.failures, text)[-MOST_FAILURES:])
        await self._write()
        await self._tell("failure", text=text)

    def _failures_of(self, phase: UnitPhase) -> int:
        return sum(each.failures for each in self.record.phases if each.phase == phase)

    def _phases_with(self, progress: PhaseProgress) -> tuple[PhaseProgress, ...]:
        others = tuple(each for each in self.record.phases if each.phase != progress.phase)
        return (*others, progress)

    def used(self, usage: JobUsage) -> None:
        """Takes what the build has used into the record; it is written with the next change."""
        self._change(usage=usage)

    async def say(self, text: str) -> None:
        """Records as the reason what will become of the build, and tells its followers."""
        await self.move(self.record.state, text)

    async def note(self, **figures: Any) -> None:
        """Changes fields of the record, and writes it."""
        self._change(**figures)
        await self._write()

    def _change(self, **figures: Any) -> None:
        self.record = self.record.model_copy(update=figures)

    async def _tell(self, kind: str, **fields: Any) -> None:
        event = BuildEvent.model_validate(
            {"build": self.record.build, "kind": kind, "at": time.time(), **fields}
        )
        with contextlib.suppress(DmscError):  # the record says the same
            await self._bus.append(BUILD_EVENT, event, deadline_s=5.0, build=self.record.build)

    async def _write(self) -> None:
        self._written_at = time.monotonic()
        await self._owned.write(lambda: self.record)

    def _is_ours(self, entry: KeyValueEntry) -> bool:
        return entry.envelope.sender.incarnation == self._bus.sender.incarnation
