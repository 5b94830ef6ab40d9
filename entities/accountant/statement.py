"""Slices and prices in, the lines of a statement out. Pure; a recorded run's slices give the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from entities.accountant.service_use import job_and_user, shared_by_use
from schemas.accounts import (
    SLICE_S,
    AccountKey,
    AccountLine,
    AccountRow,
    AccountSlice,
    AccountStatement,
)
from schemas.tariff import RateName, Tariff
from schemas.usage import HOUR_S, JOULES_PER_KWH

GIB = 1 << 30
MONTH_H = 730.0
NOTED_SHARE = 0.001
"""Of the device-hours: what has no price is named from this share on."""


@dataclass(slots=True)
class AccountTotals:
    """What was used by one payer, or several, and what it costs."""

    user: str = ""
    tenant: str = ""
    held_s: float = 0.0
    busy_s: float = 0.0
    recomputed_s: float = 0.0
    units: int = 0
    recomputed_units: int = 0
    kwh: float = 0.0
    metered_s: float = 0.0
    price: float = 0.0
    priced_s: float = 0.0
    grams: float = 0.0
    weighed_kwh: float = 0.0
    stored_byte_s: float = 0.0
    stored_price: float = 0.0
    sent_bytes: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    answers: int = 0
    users: set[str] = field(default_factory=set)

    def line(self, name: str) -> AccountLine:
        """As a line of a statement. Time that was held and neither busy nor recomputed was waiting."""
        worked = self.busy_s + self.recomputed_s
        # Passes are timed by instances and slots by agents; a boundary between two slices may part them.
        scale = min(1.0, self.held_s / worked) if worked > 0 and self.held_s > 0 else 1.0
        busy_s, recomputed_s = self.busy_s * scale, self.recomputed_s * scale
        price = self.price + self.stored_price if self.priced_s or self.stored_price else None
        thousands = (self.prompt_tokens + self.tokens) / 1000
        return AccountLine(
            name=name,
            user=self.user,
            tenant=self.tenant,
            held_s=self.held_s,
            busy_s=busy_s,
            waiting_s=max(0.0, self.held_s - busy_s - recomputed_s),
            recomputed_s=recomputed_s,
            units=self.units,
            recomputed_units=self.recomputed_units,
            kwh=self.kwh,
            measured=min(1.0, self.metered_s / self.held_s) if self.held_s else 0.0,
            price=price,
            g_co2e=self.grams if self.weighed_kwh else None,
            stored_gib_h=self.stored_byte_s / GIB / HOUR_S,
            sent_gib=self.sent_bytes / GIB,
            prompt_tokens=self.prompt_tokens,
            tokens=self.tokens,
            answers=self.answers,
            device_s_per_1000=self.held_s / thousands if thousands else None,
            price_per_1000=price / thousands if thousands and price is not None else None,
        )

    def add(self, row: AccountRow, start: int, tariff: Tariff) -> None:
        """Adds a row of the slice that begins at `start`, by that time's prices."""
        end, watts = start + SLICE_S, tariff.watts_of(row.kind)
        worked_s = min(row.held_s, row.busy_s + row.recomputed_s)
        modelled_j = worked_s * watts.busy + (row.held_s - worked_s) * watts.idle
        unmetered = max(0.0, 1.0 - row.metered_s / row.held_s) if row.held_s else 0.0
        kwh = (row.energy_j + modelled_j * unmetered) / JOULES_PER_KWH
        self.held_s += row.held_s
        self.busy_s += row.busy_s
        self.recomputed_s += row.recomputed_s
        self.units += row.units
        self.recomputed_units += row.recomputed_units
        self.metered_s += row.metered_s
        self.kwh += kwh
        self.sent_bytes += row.sent_bytes
        self.stored_byte_s += row.stored_byte_s
        self.prompt_tokens += row.prompt_tokens
        self.tokens += row.tokens
        self.answers += row.answers
        self._price(row, start, end, kwh, tariff)
        self._weigh(row, start, end, kwh, tariff)

    def _price(self, row: AccountRow, start: int, end: int, kwh: float, tariff: Tariff) -> None:
        names: tuple[RateName, ...] = ("price_per_device_hour", "price_per_kwh")
        device, energy = (tariff.mean(row.cluster, name, start, end) for name in names)
        amounts = (row.held_s / HOUR_S * device.mean, kwh * energy.mean)
        known = max(device.known, energy.known)
        if known:
            self.price += amounts[0] * device.known + amounts[1] * energy.known
            self.priced_s += row.held_s * known
        elif row.labelled_s:
            self.price += row.label_price_s / HOUR_S
            self.priced_s += row.labelled_s
        if tariff.price_per_gib_month is not None:
            gib_months = row.stored_byte_s / GIB / HOUR_S / MONTH_H
            self.stored_price += gib_months * tariff.price_per_gib_month
        if tariff.price_per_sent_gib is not None:
            self.stored_price += row.sent_bytes / GIB * tariff.price_per_sent_gib

    def _weigh(self, row: AccountRow, start: int, end: int, kwh: float, tariff: Tariff) -> None:
        rate = tariff.mean(row.cluster, "g_co2e_per_kwh", start, end)
        if rate.known:
            self.grams += kwh * rate.known * rate.mean
            self.weighed_kwh += kwh * rate.known
        elif row.carbon_s and row.held_s:
            share = row.carbon_s / row.held_s
            self.grams += kwh * share * row.label_carbon_s / row.carbon_s
            self.weighed_kwh += kwh * share


def make_statement(
    slices: Iterable[AccountSlice],
    tariff: Tariff,
    by: AccountKey,
    since: float,
    until: float,
    *,
    only: str | None = None,
    service: str | None = None,
) -> AccountStatement:
    """What was used from `since` to `until`, in whole slices: those that begin within that time.

    Args:
        slices: the slices; others are left out.
        tariff: prices, carbon and watts.
        by: what the lines are about.
        since, until: seconds since the epoch.
        only: the user whose lines are told; None: of all.
        service: the service whose versions count; None: all that was used.
    """
    totals: dict[str, AccountTotals] = defaultdict(AccountTotals)
    whole, idle = AccountTotals(), AccountTotals()
    offered_s, clusters, last = 0.0, set(), 0
    first = int(since // SLICE_S) * SLICE_S
    for each in slices:
        if not first <= each.start < until:
            continue
        last = max(last, each.start + SLICE_S)
        for row in shared_by_use(each.rows):
            clusters.add(row.cluster)
            if row.payer_kind == "idle":
                idle.add(row, each.start, tariff)
                offered_s += row.offered_s
                continue
            if (only is not None and row.user != only) or (service is not None and row.service != service):
                continue
            whole.add(row, each.start, tariff)
            if (name := _name(row, by)) is not None:
                own = totals[name]
                own.add(row, each.start, tariff)
                own.users.add(row.user)
                own.tenant = own.tenant or row.tenant
                own.user = row.user if len(own.users) == 1 else ""
    lines = [total.line(name) for name, total in totals.items()]
    lines.sort(key=lambda line: (-(line.price or 0.0), -line.held_s, line.name))
    alone = only is not None or service is not None
    return AccountStatement(
        by=by,
        since=first,
        until=until,
        counted_until=last,
        currency=tariff.currency,
        only=only,
        service=service,
        lines=tuple(lines),
        total=whole.line("total"),
        idle=None if alone else idle.line("idle"),
        offered_s=0.0 if alone else offered_s,
        unaccounted_s=0.0 if alone else offered_s - whole.held_s - idle.held_s,
        notes=_notes(whole, tariff, clusters - {""}),
    )


def _name(row: AccountRow, by: AccountKey) -> str | None:
    """The line to which a row belongs; None: to none of this kind."""
    if by == "job":
        return job_and_user(row.payer)[0] if row.payer_kind == "service" else row.payer
    if by == "service":
        return row.service or None
    if by == "user":
        return row.user or "unknown"
    return row.tenant or "none"


def _notes(whole: AccountTotals, tariff: Tariff, clusters: set[str]) -> tuple[str, ...]:
    notes = []
    unpriced_s = whole.held_s - whole.priced_s
    if whole.held_s and unpriced_s > NOTED_SHARE * whole.held_s and (tariff.clusters or whole.priced_s):
        hours = unpriced_s / HOUR_S
        notes.append(f"{hours:.3g} device-hours have no price: neither a series nor a label says one")
    if strange := tariff.unknown_clusters(clusters):
        notes.append(strange)
    return tuple(notes)
