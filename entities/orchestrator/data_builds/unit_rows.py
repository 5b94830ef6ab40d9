"""The ledger's bucket: one row for each committed unit, created once (`UnitCommit`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import Writing
from bus.subjects import UNIT_COMMIT
from schemas.data_set.builds import UnitCommit
from schemas.data_set.units import UnitPhase, UnitResult
from schemas.errors import Conflict, Unavailable, UnreadableRecord

log = get_logger("orchestrator")

Row = tuple[UnitPhase, str]
"""A row within one scope: phase and key of the unit."""
Result = TypeVar("Result")
REMOVED_AT_ONCE = 500


class UnitRows:
    """The rows of one scope: of all builds of one user, name, work and place.

    `retry_s`: pause before a call is repeated that the bus did not take.
    """

    def __init__(self, bus: Bus, scope: str, build: str, *, retry_s: float = 0.2) -> None:
        self._bucket = bus.bucket(UNIT_COMMIT)
        self._scope = scope
        self._build = build
        self._retry_s = retry_s

    async def load(self) -> dict[Row, UnitCommit]:
        """All rows. Plans of other builds, and units that they left out, go: sources may differ now."""
        entries = await self._insistently(partial(self._bucket.entries, strict=True, scope=self._scope))
        rows: dict[Row, UnitCommit] = {}
        stale: list[Row] = []
        for entry in entries:
            row: UnitCommit = entry.message
            place = (row.result.phase, row.unit)
            if row.build != self._build and (row.skipped or row.result.phase == "plan"):
                stale.append(place)
            else:
                rows[place] = row
        await self.remove(stale)
        return rows

    async def commit(self, unit: str, result: UnitResult, skipped: str) -> UnitCommit:
        """Creates the unit's row; returns the row that is there, ours or another."""
        row = UnitCommit(scope=self._scope, unit=unit, build=self._build, result=result, skipped=skipped)
        tokens: dict[str, Any] = {"scope": self._scope, "phase": result.phase, "unit": unit}

        async def write() -> UnitCommit:
            try:
                await self._bucket.create(row, **tokens)
            except Conflict:
                try:
                    entry = await self._bucket.get(leader=True, **tokens)
                except UnreadableRecord:
                    entry = None
                if entry is None:
                    raise Unavailable(f"unit {unit}: its row was removed meanwhile") from None
                found: UnitCommit = entry.message
                return found
            return row

        return await self._insistently(write)

    async def remove(self, rows: list[Row]) -> None:
        """Removes rows; what is not there is no error."""
        for start in range(0, len(rows), REMOVED_AT_ONCE):
            piece = rows[start : start + REMOVED_AT_ONCE]
            await self._insistently(partial(self._remove, piece))

    async def _remove(self, rows: list[Row]) -> None:
        entries = {entry.key: entry.revision for entry in await self._bucket.entries(scope=self._scope)}
        writings = []
        for phase, unit in rows:
            tokens = {"scope": self._scope, "phase": phase, "unit": unit}
            revision = entries.get(UNIT_COMMIT.key(**tokens))
            if revision is not None:
                writings.append(Writing(tokens, None, revision))
        for outcome in await self._bucket.write_many(writings):
            if isinstance(outcome, Unavailable):
                raise outcome

    async def _insistently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        while True:
            try:
                return await call()
            except Unavailable as error:
                log.warning("the ledger waits for the bus", build=self._build, reason=error.text)
                await asyncio.sleep(self._retry_s)


def by_unit(rows: Mapping[Row, UnitCommit], phase: UnitPhase) -> dict[str, tuple[UnitResult, str]]:
    """Key → result, and why it was skipped, of one phase."""
    return {unit: (row.result, row.skipped) for (of, unit), row in rows.items() if of == phase}
