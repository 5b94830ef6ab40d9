"""Who was answered by which version of a service, and what of its devices is theirs for it. Pure (ADR-0160).

Gateways say how many tokens each user was given, from a beginning; so a report that is lost, or comes twice,
changes nothing. Of what a version's devices did in a slice, the part that was work goes to these users, by
their tokens. The rest, above all waiting, stays the owner's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from entities.accountant.ledger import Charge, RowKey
from schemas.accounts import (
    REPORT_EARLY_S,
    REPORT_LATE_S,
    SHARED,
    SLICE_S,
    AccountRow,
    CountedUse,
    CountedUses,
    UseReport,
)


@dataclass(frozen=True, slots=True)
class TakenUse:
    """How far the gateway is counted now, and what the report adds. `refused`: why it adds nothing."""

    uses: CountedUses
    charges: tuple[Charge, ...] = ()
    refused: str = ""


def payer_of(job: str, user: str) -> str:
    """The payer of what a user was given by a version."""
    return f"{job}/{user}"


def job_and_user(payer: str) -> tuple[str, str]:
    """The version's job and the user of such a payer."""
    job, _, user = payer.partition("/")
    return job, user


def take_use(counted: CountedUses, report: UseReport, now: float) -> TakenUse:
    """Counts a gateway's report.

    Args:
        counted: How far its reports are counted.
        report: The report.
        now: The accountant's clock, seconds since the epoch.
    """
    if not now - REPORT_LATE_S <= report.at <= now + REPORT_EARLY_S:
        return TakenUse(counted, refused=f"it is of another time: {report.at - now:+.0f} s by this clock")
    same = report.incarnation == counted.incarnation
    if same and report.number <= counted.number:
        return TakenUse(counted)  # an older one, or the same again
    start = int(report.at // SLICE_S) * SLICE_S
    charges: list[Charge] = []
    present: dict[str, CountedUse] = {}
    for use in report.uses:
        key = f"{use.job}/{use.user}/{use.began!r}"
        known = counted.uses.get(key) if same else None
        before = known or CountedUse()
        more = {
            "prompt_tokens": max(0, use.prompt_tokens - before.prompt_tokens),
            "tokens": max(0, use.tokens - before.tokens),
            "answers": max(0, use.answers - before.answers),
        }
        if any(more.values()):
            charges.append(Charge(start, RowKey("service", payer_of(use.job, use.user), "", ""), more))
        present[key] = CountedUse(
            prompt_tokens=max(use.prompt_tokens, before.prompt_tokens),
            tokens=max(use.tokens, before.tokens),
            answers=max(use.answers, before.answers),
        )
    uses = CountedUses(incarnation=report.incarnation, number=report.number, uses=present)
    return TakenUse(uses, tuple(charges))


def shared_by_use(rows: Sequence[AccountRow]) -> list[AccountRow]:
    """The rows of one slice, in which the work of versions is its users'. All sums stay the same."""
    uses: dict[str, list[AccountRow]] = {}
    for row in rows:
        if row.payer_kind == "service":
            uses.setdefault(job_and_user(row.payer)[0], []).append(row)
    if not uses:
        return list(rows)
    found: list[AccountRow] = []
    for row in rows:
        its = uses.get(row.payer, ()) if row.payer_kind == "job" else ()
        found += _shared(row, its) if its else (row,)
    return found


def _shared(row: AccountRow, uses: Sequence[AccountRow]) -> Iterable[AccountRow]:
    weights = [use.tokens + use.prompt_tokens for use in uses]
    if not any(weights):  # tensors: each answer counts the same
        weights = [use.answers for use in uses]
    whole, worked_s = sum(weights), min(row.held_s, row.busy_s)
    if not whole or not worked_s:
        return (row,)
    part = worked_s / row.held_s
    owner = _part(row, 1.0 - part) | {"held_s": row.held_s - worked_s, "busy_s": 0.0}
    found = [row.model_copy(update={**owner, "recomputed_s": row.recomputed_s})]
    for use, weight in zip(uses, weights, strict=True):
        share = weight / whole
        own = _part(row, part * share) | {"held_s": worked_s * share, "busy_s": worked_s * share}
        whose = {"user": use.user, "tenant": use.tenant}
        nothing = {"units": 0, "recomputed_units": 0, "recomputed_s": 0.0, "stored_byte_s": 0.0}
        found.append(row.model_copy(update={**own, **whose, **nothing}))
    return found


def _part(row: AccountRow, share: float) -> dict[str, float]:
    return {name: getattr(row, name) * share for name in SHARED}
