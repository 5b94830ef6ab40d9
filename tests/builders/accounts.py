"""Reports of nodes, and slices of the accounts."""

from __future__ import annotations

from typing import Any

from schemas.accounts import AccountRow, AccountSlice, OfferedSlot, SlotReport, SlotStretch

T0 = 1_793_520_000.0
"""A time at which a slice begins."""


def stretch(slot: int = 0, began: float = T0, until: float = T0 + 100, **more: Any) -> SlotStretch:
    """A slot's time with job j1; with `payer=None`, with nobody."""
    fields = {"payer": "j1", "incarnation": "i1"} | more
    kind = "idle" if fields["payer"] is None else "job"
    return SlotStretch(slot=slot, began=began, until=until, payer_kind=kind, **fields)


def report(*stretches: SlotStretch, number: int = 0, at: float = T0 + 100, **more: Any) -> SlotReport:
    """Of a node with two slots that it has offered since `since`."""
    since = more.pop("since", T0)
    labels = {"price": more.pop("price", None), "carbon": more.pop("carbon", None)}
    slots = tuple(OfferedSlot(slot=slot, kind="cpu", since=since, until=at, **labels) for slot in (0, 1))
    fields = {"cluster": "a", "node": "n", "incarnation": "x1", "slots": slots} | more
    return SlotReport(number=number, at=at, stretches=stretches, **fields)


def row(payer: str = "j1", **amounts: Any) -> AccountRow:
    """What a job used in a slice, in cluster a; of the payer "" the mesh's own account."""
    kind = "job" if payer else "idle"
    fields = {"user": "ruth" if payer else "", "cluster": "a", "kind": "cpu"} | amounts
    return AccountRow(payer_kind=kind, payer=payer, **fields)


def slice_of(*rows: AccountRow, start: float = T0) -> AccountSlice:
    """One slice."""
    return AccountSlice(start=int(start), rows=rows)
