"""The accounts of a recorded run: the accountant's rules over the run's own messages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bus import subjects
from bus.recording.run_record import Frame
from dmsc.replay.recordings import Archive, open_recording
from dmsc.state.settings import find_bus
from dmsc.state.state_folder import default_state
from entities.accountant.ledger import Charge, JobClaims, RowKey, take_report
from entities.accountant.prices_file import read_tariff
from entities.accountant.statement import make_statement
from schemas.accounts import (
    AccountKey,
    AccountRow,
    AccountSlice,
    AccountStatement,
    CountedNode,
    SlotReport,
)
from schemas.errors import BadInput, BusUnreachable
from schemas.step import MicrobatchClaim
from schemas.tariff import Tariff


class RecordedAccounts:
    """Takes a run's frames in their order, and makes slices of what its job used.

    A recording has the reports of all nodes while the job ran, and other jobs' slots in them; those are left
    out, as is what was idle.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._nodes: dict[str, CountedNode] = {}
        self._claims: dict[str, JobClaims] = {}
        self._places: dict[str, tuple[str, str]] = {}
        self._rows: dict[int, dict[RowKey, dict[str, float]]] = {}
        self.reports = 0

    def take(self, frame: Frame) -> None:
        """Counts one frame; those of other rows add nothing."""
        if frame.row is subjects.SLOT_REPORT:
            report, envelope = frame.open()
            assert isinstance(report, SlotReport)
            self.reports += 1
            name = envelope.sender.name
            taken = take_report(self._nodes.get(name, CountedNode()), report, frame.at)
            self._nodes[name] = taken.node
            for stretch in taken.node.stretches.values():
                self._places[stretch.incarnation] = (taken.node.cluster, stretch.kind)
            self._add(taken.charges)
        elif frame.row is subjects.STEP_CLAIM:
            claim, envelope = frame.open()
            assert isinstance(claim, MicrobatchClaim)
            place = self._places.get(claim.owner.incarnation, ("", ""))
            claims = self._claims.setdefault(claim.job, JobClaims())
            charge = claims.take(claim, envelope.sent_at, place, frame.at)
            self._add(() if charge is None else (charge,))

    def _add(self, charges: Iterable[Charge]) -> None:
        for charge in charges:
            if charge.key.payer != self._job:
                continue
            row = self._rows.setdefault(charge.start, {}).setdefault(charge.key, {})
            for name, value in charge.amounts.items():
                row[name] = row.get(name, 0) + value

    def slices(self) -> list[AccountSlice]:
        """What was counted so far."""
        return [
            AccountSlice(start=start, rows=tuple(_row(key, amounts) for key, amounts in rows.items()))
            for start, rows in sorted(self._rows.items())
        ]


def _row(key: RowKey, amounts: dict[str, Any]) -> AccountRow:
    return AccountRow(**key._asdict(), **amounts)


async def account_of_recording(
    source: str, prices: Path | None, key: AccountKey, state: Path | None
) -> AccountStatement:
    """The statement of a recorded run.

    Raises:
        NotFound, BadInput, DamagedRun, Unavailable: As for `open_recording`; the prices are wrong; the run
            was recorded before nodes reported who held their slots.
    """
    tariff = Tariff() if prices is None else read_tariff(prices)
    try:
        address = find_bus(None, None, state)
    except BusUnreachable:
        address = None
    first = last = 0.0
    async with open_recording(source, address, Archive(state or default_state())) as recording:
        accounts = RecordedAccounts(recording.job)
        async for frame in recording.frames:
            first, last = first or frame.at, frame.at
            accounts.take(frame)
        if not accounts.reports:
            raise BadInput(f"{recording.job}: recorded by a version that did not tell who held which slot")
    statement = make_statement(accounts.slices(), tariff, key, first, last + 1)
    return statement.model_copy(update={"idle": None, "unaccounted_s": 0.0})
