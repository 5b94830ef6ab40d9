"""What devices were used for, by whom, and what that costs (docs/accounts.md).

A payer is a kind and an id, so that services join jobs without a change. Slices hold amounts and no prices:
those are looked up when a statement is made (ADR-0126).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Message, Part, Time, Token
from schemas.tariff import BudgetRule

PRICE_LABEL, CARBON_LABEL = "price", "carbon"
"""Labels of a slot: money for an hour of it, and g of CO2e for a kWh that it uses."""
SLICE_S = 900
"""Seconds of one slice: markets price energy by quarters of an hour."""
SLICES_KEPT_S = 400 * 86_400.0
"""How long slices are kept."""
TOLD_AGAIN_S = 120.0
"""For so long what has ended stands in a node's reports: one or two that are lost are made good."""
REPORT_LATE_S, REPORT_EARLY_S = 8 * 86_400.0, 300.0
"""A report from a time beyond these, by the accountant's clock, is not believed: the stream keeps a week."""
LONGEST_PASS_MS = 86_400_000.0
"""A claim of a longer pass is not believed."""

PayerKind = Literal["job", "service", "idle"]
"""Whom a slot's time is charged to; `idle`: to nobody, the mesh's own account. Of `service`, the payer is a
version's job and a user, `JOB/USER`: what that user was given (`UseReport`)."""
AccountKey = Literal["job", "user", "tenant", "service"]
"""What the lines of a statement are about."""
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class OfferedSlot(Part):
    """A slot that a node offers, or offered, from `since` to `until`; its labels `price` and `carbon`."""

    slot: int = Field(ge=0)
    kind: str = Field(max_length=120)
    since: Time
    until: Time
    price: Amount | None = None
    carbon: Amount | None = None


class SlotStretch(Part):
    """Time of one slot with one holder, or without any.

    `energy_j` is what its device used meanwhile, where that is measured; `sent_bytes` what its instance sent
    over links; `busy_s` and `recomputed_s` what an instance that serves computed, and computed anew after a
    loss (of others claims say it). All count from `began`.
    """

    slot: int = Field(ge=0)
    began: Time
    until: Time
    payer_kind: PayerKind = "idle"
    payer: Token | None = None
    incarnation: Token | None = None
    energy_j: Amount | None = None
    sent_bytes: Count = 0
    busy_s: Amount = 0.0
    recomputed_s: Amount = 0.0


class SlotReport(Message, wire="account.slots"):
    """MIC → accountant: who held which slot, up to `at`.

    Everything counts from a beginning, so that a report that is lost or comes twice changes nothing. What has
    ended is told again for two minutes.
    """

    cluster: Token
    node: Token
    incarnation: Token
    number: int = Field(ge=0, description="of the reports of this incarnation")
    at: Time
    slots: tuple[OfferedSlot, ...] = Field((), max_length=4096)
    stretches: tuple[SlotStretch, ...] = Field((), max_length=16384)


class ServiceUse(Part):
    """What one user was given by one version, from `began` on: tokens of prompts and answers, answers."""

    job: Token
    user: str = Field(max_length=120)
    began: Time
    prompt_tokens: Count = 0
    tokens: Count = 0
    answers: Count = 0


MOST_USES = 16_384
"""Users and versions in one report."""


class UseReport(Message, wire="account.use"):
    """MG → accountant: whom this gateway has answered, up to `at`.

    Everything counts from a beginning, so that a report that is lost or comes twice changes nothing. What
    does not change any more is told again for two minutes.
    """

    gateway: Token
    incarnation: Token
    number: int = Field(ge=0, description="of the reports of this incarnation")
    at: Time
    uses: tuple[ServiceUse, ...] = Field((), max_length=MOST_USES)


class AccountRow(Part):
    """What one payer used in one slice, on one kind of device in one cluster.

    `held_s`: device-seconds. Of them `busy_s` went into work that was new and `recomputed_s` into work that
    had been done before; the rest waited. `metered_s` are those whose energy, `energy_j`, was measured.
    `label_price_s` and `label_carbon_s` are the labels of its slots × seconds, over `labelled_s` and
    `carbon_s`. Of the payer `idle`, `offered_s` is all that the nodes offered. `service`: of which the
    payer's job is a version. Rows of users who were given something have its tokens and nothing else.
    """

    payer_kind: PayerKind
    payer: str = ""
    user: str = ""
    tenant: str = ""
    service: str = ""
    cluster: str = ""
    kind: str = ""
    held_s: Amount = 0.0
    busy_s: Amount = 0.0
    recomputed_s: Amount = 0.0
    units: Count = 0
    recomputed_units: Count = 0
    energy_j: Amount = 0.0
    metered_s: Amount = 0.0
    sent_bytes: Amount = 0.0
    stored_byte_s: Amount = 0.0
    label_price_s: Amount = 0.0
    labelled_s: Amount = 0.0
    label_carbon_s: Amount = 0.0
    carbon_s: Amount = 0.0
    offered_s: Amount = 0.0
    prompt_tokens: Count = 0
    tokens: Count = 0
    answers: Count = 0


AMOUNTS = tuple(
    name
    for name in AccountRow.model_fields
    if name not in ("payer_kind", "payer", "user", "tenant", "service", "cluster", "kind")
)
"""The fields of a row that are added up."""
SHARED = (
    *("energy_j", "metered_s", "sent_bytes"),
    *("label_price_s", "labelled_s", "label_carbon_s", "carbon_s"),
)
"""Of them, those that go with the seconds of a device."""


class AccountSlice(Message, wire="account.slice"):
    """All that was used in one slice of time. In the bucket `accounts`, by its beginning.

    `positions`: up to which message of which stream it is complete, so that none counts twice.
    """

    start: int = Field(ge=0)
    rows: tuple[AccountRow, ...] = ()
    positions: dict[str, int] = {}


class CountedStretch(Part):
    """How far a stretch, or a slot's offer, is in the slices."""

    until: Time
    energy_j: Amount = 0.0
    sent_bytes: Count = 0
    busy_s: Amount = 0.0
    recomputed_s: Amount = 0.0
    incarnation: str = ""
    kind: str = ""


class CountedUse(Part):
    """How much of what a user was given is in the slices."""

    prompt_tokens: Count = 0
    tokens: Count = 0
    answers: Count = 0


class CountedUses(Part):
    """How far a gateway's reports are in the slices. Keys are `job/user/began`."""

    incarnation: str = ""
    number: int = -1
    uses: dict[str, CountedUse] = {}


class CountedNode(Part):
    """How far a node's reports are in the slices. Keys are `slot/began`."""

    incarnation: str = ""
    number: int = -1
    cluster: str = ""
    at: Time = 0.0
    floor: Time = Field(0.0, description="nothing before this is counted: an earlier incarnation told of it")
    offers: dict[str, CountedStretch] = {}
    stretches: dict[str, CountedStretch] = {}


class CountedStep(Part):
    """The units of one step that were claimed: stage, microbatch, and a mark of each claim."""

    step: int
    again: bool = False
    units: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


class CountedWork(Part):
    """How far a job's claims are in the slices: its newest steps. Below `oldest` all was computed once."""

    oldest: int = 0
    steps: tuple[CountedStep, ...] = ()
    scored: tuple[CountedStep, ...] = Field((), description="the same of validations")


class AccountPosition(Message, wire="account.position"):
    """How far the accounts are, of the mesh (`book`), a node, a job or a gateway. In `account_positions`."""

    positions: dict[str, int] = {}
    node: CountedNode | None = None
    work: CountedWork | None = None
    uses: CountedUses | None = None


class AccountQuery(Message, wire="account.query"):
    """MG → accountant: what was used and what did it cost, from `since` to `until`?

    `user`: theirs alone; `service`: by or for its versions alone.
    """

    by: AccountKey = "job"
    since: Time
    until: Time
    user: str | None = Field(None, max_length=120)
    service: str | None = Field(None, max_length=120)


class AccountLine(Part):
    """What one job, user, tenant or service used and costs. `price` and `g_co2e` are null where unknown.

    `measured` is the share of its device-seconds whose energy was measured; the rest is modelled. Of
    services: tokens of prompts and answers, and answers; 1,000 tokens are of both kinds together.
    """

    name: str
    user: str = ""
    tenant: str = ""
    held_s: float
    busy_s: float
    waiting_s: float
    recomputed_s: float
    units: int
    recomputed_units: int
    kwh: float
    measured: float = Field(ge=0, le=1)
    price: float | None = None
    g_co2e: float | None = None
    stored_gib_h: float = 0.0
    sent_gib: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    answers: int = 0
    device_s_per_1000: float | None = Field(None, description="device-seconds for 1,000 tokens; null: none")
    price_per_1000: float | None = Field(None, description="likewise")


class BudgetUse(Part):
    """How much of a budget is used. `share` is that of the limit that is used up most."""

    budget: BudgetRule
    since: Time
    used: dict[str, float] = {}
    share: Amount = 0.0
    state: Literal["within", "near", "used up"] = "within"
    why: str = ""


class BudgetState(Message, wire="account.budget"):
    """Accountant → SMO: a budget and its use. In the bucket `budgets`; one that is used up may hold jobs."""

    use: BudgetUse
    at: Time


class AccountStatement(Message, wire="account.statement"):
    """What was used in a period, by whom, and what it costs.

    `offered_s` is the capacity of all slots. `unaccounted_s` is what of it is in no line and not idle; it is
    near 0, or the accounts do not close. With `only`, the lines are those of one user, with `service` of one
    service, and no capacity is told.
    """

    by: AccountKey
    since: Time
    until: Time
    counted_until: Time = 0.0
    currency: str = ""
    only: str | None = None
    service: str | None = None
    lines: tuple[AccountLine, ...] = ()
    total: AccountLine
    idle: AccountLine | None = None
    offered_s: float = 0.0
    unaccounted_s: float = 0.0
    budgets: tuple[BudgetUse, ...] = ()
    notes: tuple[str, ...] = ()
