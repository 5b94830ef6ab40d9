"""Reputations of modules in the bucket `standings`, for the next orchestrator: ordered states and counts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from bus import subjects
from bus.connection import Bus
from entities.orchestrator.policy.module_reputation import STRANGERS, Key, ModuleReputation, OrderedState
from schemas.module_status import version_token
from schemas.policy import ModuleStanding


class ReputationStore:
    """Reads and writes reputations during one term. A record is written only if it has changed.

    A module that crashed and never came back is forgotten after `kept_s` seconds.
    """

    def __init__(self, bus: Bus, *, kept_s: float = 7 * 86_400.0) -> None:
        self._kept_s = kept_s
        self._bucket = bus.bucket(subjects.MODULE_STANDING)
        self._written: dict[Key, ModuleStanding] = {}

    async def load(self) -> dict[Key, ModuleReputation]:
        """Reads the reputations that the former orchestrator left."""
        since_epoch = time.time() - time.monotonic()
        for entry in await self._bucket.entries(strict=True):
            record = entry.message
            if isinstance(record, ModuleStanding):
                self._written[record.module, record.version] = record
        return {key: from_record(record, since_epoch) for key, record in self._written.items()}

    async def keep(self, standings: Mapping[Key, ModuleReputation]) -> None:
        """Makes the bucket agree with `standings`; records stay written if a later write fails."""
        since_epoch = time.time() - time.monotonic()
        for key, standing in standings.items():
            record = as_record(key, standing, since_epoch)
            if key == STRANGERS or _same(self._written.get(key), record):
                continue
            await self._bucket.put(record, ttl_s=self._kept_s, module=key[0], version=version_token(key[1]))
            self._written[key] = record
        for key in self._written.keys() - standings.keys():
            await self._bucket.delete(module=key[0], version=version_token(key[1]))
            del self._written[key]


def as_record(key: Key, standing: ModuleReputation, since_epoch: float) -> ModuleStanding:
    """The record of a reputation. `since_epoch`: the seconds since the epoch at monotonic time 0."""
    wanted = standing.wanted
    return ModuleStanding(
        module=key[0],
        version=key[1],
        sid=standing.sid,
        incarnation=standing.incarnation,
        state=standing.state,
        jobs=standing.jobs,
        without=standing.without,
        said=standing.said,
        wanted=wanted.state,
        enabled=tuple(sorted(wanted.enabled)),
        disabled=tuple(sorted(wanted.disabled)),
        suggestions=standing.suggestions,
        adopted=standing.adopted,
        strikes=standing.strikes,
        crashes=standing.crashes,
        crashed_at=tuple(round(at + since_epoch, 1) for at in standing.crashed_at),
        suspended_until=round(standing.suspended_until + since_epoch, 1) if standing.suspended_for else None,
        suspended_for=standing.suspended_for,
        owner=standing.owner,
    )


def from_record(record: ModuleStanding, since_epoch: float) -> ModuleReputation:
    """The reputation of a record, with times of this process's clock; its allowance starts full."""
    until = record.suspended_until
    return ModuleReputation(
        sid=record.sid,
        incarnation=record.incarnation,
        state=record.state,
        jobs=record.jobs,
        without=record.without,
        said=record.said,
        wanted=OrderedState(
            state=record.wanted, enabled=frozenset(record.enabled), disabled=frozenset(record.disabled)
        ),
        suggestions=record.suggestions,
        adopted=record.adopted,
        strikes=record.strikes,
        crashes=record.crashes,
        crashed_at=tuple(at - since_epoch for at in record.crashed_at),
        suspended_until=-math.inf if until is None else until - since_epoch,
        suspended_for=record.suspended_for,
        owner=record.owner,
    )


def _same(written: ModuleStanding | None, record: ModuleStanding) -> bool:
    """Whether two records are the same but for times: the offset between the clocks varies a little."""
    if written is None:
        return False
    times = {"crashed_at": written.crashed_at, "suspended_until": written.suspended_until}
    alike = len(written.crashed_at) == len(record.crashed_at) and written.crashes == record.crashes
    return alike and record.model_copy(update=times) == written
