"""The audit stream: refusals and privileged acts, in a chain of hashes.

`hash` is the SHA-256 of the record's canonical JSON (sorted keys, no spaces, UTF-8) without `hash` itself,
and without fields that have their default value, so that a later version may add fields. Each record has the
hash of the record before as `previous`, so a changed, removed or inserted record breaks the chain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from schemas.base import Message, Part, Time
from schemas.signals import Role

AuditKind = Literal["refused", "act", "users", "access-file", "eviction", "connection", "folded"]

GENESIS = ""
"""`previous` of the first record."""


class AuditRecord(Message, wire="audit.record"):
    """One entry. `at` is seconds since the epoch by the authorizer's clock.

    Kinds: `refused` (a refused request), `act` (an act that the rules mark `audit`), `users` (users and
    tokens changed), `access-file` (the rules were reloaded), `eviction` (connections were closed),
    `connection` (a connection was refused: `resource` is the name that the caller gave, and the host),
    `folded` (`count` refusals beyond the rate of single records; `resource` and `reason` are those of the
    last one).
    """

    id: str = Field(description="unique: tells a record that was stored from one that was not")
    number: int = Field(1, ge=1)
    at: Time
    authorizer: str
    kind: AuditKind
    user: str = ""
    role: Role | None = None
    action: str = Field("", max_length=200)
    resource: str = Field("", max_length=512)
    allow: bool = False
    rule: str = ""
    reason: str = Field("", max_length=500)
    gateway: str = ""
    count: int = Field(1, ge=1)
    previous: str = GENESIS
    hash: str = ""


class AuditEntry(Part):
    """A record and its place in the stream."""

    sequence: int
    record: AuditRecord


class AuditHead(Part):
    """The last record of a chain, as an authorizer keeps it outside the bus.

    `signature` is the hexadecimal signature of `signed`; empty if the authorizer has no key.
    """

    number: int = Field(ge=1)
    hash: str
    at: Time
    authorizer: str
    signature: str = ""

    @property
    def signed(self) -> bytes:
        text = f"dmsc audit head\n{self.number}\n{self.hash}\n{self.at!r}\n{self.authorizer}"
        return text.encode()


class AuditPage(Message, wire="audit.page"):
    """Entries in order. `next_start` is the start of the next page; None at the present end."""

    entries: tuple[AuditEntry, ...]
    next_start: int | None = None


def hash_of(record: AuditRecord) -> str:
    """The hexadecimal hash of a record's canonical form."""
    plain = record.model_dump(mode="json", exclude={"hash"}, exclude_defaults=True)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def chained(record: AuditRecord, number: int, last: AuditRecord | None) -> AuditRecord:
    """The record in the chain after `last`: numbered, linked and hashed.

    `number` is the sequence that the stream will give it. The stream never gives a sequence twice, so the
    next record shows if somebody has removed records from the end.
    """
    linked = record.model_copy(update={"number": number, "previous": GENESIS if last is None else last.hash})
    return linked.model_copy(update={"hash": hash_of(linked)})


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification. `broken` is the sequence of the first record that does not fit.

    `why` says why it does not fit. `first` and `last` are record numbers. `head` is the last record's hash: a
    copy of it elsewhere can show later that no record was removed at the end.
    """

    records: int
    first: int = 0
    last: int = 0
    head: str = ""
    broken: int | None = None
    why: str = ""


def verify(
    entries: Iterable[AuditEntry], *, head: str | None = None, heads: Iterable[AuditHead] = ()
) -> Verification:
    """Verify the chain from the first of these entries.

    A chain that does not begin with record 1 has lost its beginning, by the stream's limit or by removal.

    Args:
        entries: the records in order.
        head: a hash that was noted earlier; it must be the hash of one of the records.
        heads: archived heads of the chain; those before the first entry can't be compared.
    """
    count, first, before = 0, 0, None
    seen = head is None
    known: dict[int, list[AuditHead]] = {}
    for one in heads:
        known.setdefault(one.number, []).append(one)
    forked = ""
    for entry in entries:
        record = entry.record
        why = _misfit(record, before)
        if why:
            return Verification(
                records=count,
                first=first,
                last=before.number if before else 0,
                head=before.hash if before else "",
                broken=entry.sequence,
                why=why,
            )
        count += 1
        first = first or record.number
        before = record
        for noted in known.get(record.number, ()):
            if noted.hash != record.hash and not forked:
                forked = (
                    f"record {noted.number} is another than the one that {noted.authorizer} kept"
                    f" ({noted.hash}): the chain was rolled back and written anew"
                )
        seen = seen or record.hash == head
    last, end = (before.number, before.hash) if before else (0, "")
    beyond = max((number for number in known if number > last), default=0)
    if beyond and not forked:
        noted = known[beyond][0]
        forked = (
            f"record {beyond}, which {noted.authorizer} kept ({noted.hash}), is not there any more:"
            f" {beyond - last} were cut off behind record {last}"
        )
    if forked:
        return Verification(records=count, first=first, last=last, head=end, broken=0, why=forked)
    if not seen:
        return Verification(
            records=count,
            first=first,
            last=last,
            head=end,
            broken=0,
            why=f"no record has the hash {head}: records were cut off, or it is another chain",
        )
    return Verification(records=count, first=first, last=last, head=end)


def _misfit(record: AuditRecord, before: AuditRecord | None) -> str:
    """Why a record does not follow the one before it; empty if it does."""
    if hash_of(record) != record.hash:
        return f"record {record.number} was changed: its content does not have its hash"
    if before is None:
        if record.number == 1 and record.previous != GENESIS:
            return "record 1 names a record before it"
        return ""
    if record.number != before.number + 1:
        return f"record {record.number} follows record {before.number}: one was removed, put in or moved"
    if record.previous != before.hash:
        return f"record {record.number} does not name the hash of record {before.number}"
    return ""
