"""The audit stream: who was refused, and who did what only few may do, in a chain of hashes.

`hash` is the SHA-256 of the record's canonical JSON (sorted keys, no spaces, UTF-8) without `hash` itself,
and without fields that have their default value, so that a later version may have more of them. The hash of
the record before is in it as `previous`: none can be changed, left out or put in without the next telling.
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

    Kinds: `refused` (asked, and not let), `act` (let do what the rules mark `audit`), `users` (users and
    tokens changed), `access-file` (the rules were read again), `eviction` and `connection` (thrown off the
    bus, or not let on it: there `resource` is the name that the caller said, and the host), `folded` (`count`
    refusals that came faster than they are recorded one by one; `resource` and `reason` are the last one's).
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
    """How far a chain had come, as an authorizer keeps it off the bus. `signature`: hexadecimal, of `signed`;
    empty where the authorizer has no key."""

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
    """Entries in order. `next_start` is where to go on; None at the present end."""

    entries: tuple[AuditEntry, ...]
    next_start: int | None = None


def hash_of(record: AuditRecord) -> str:
    """Of the canonical form; hexadecimal."""
    plain = record.model_dump(mode="json", exclude={"hash"}, exclude_defaults=True)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def chained(record: AuditRecord, number: int, last: AuditRecord | None) -> AuditRecord:
    """The record as it stands behind `last`: numbered, linked, hashed.

    `number` is the sequence that the stream will give it. The stream never gives one twice, so that records
    which somebody took off its end are missed by the next one.
    """
    linked = record.model_copy(update={"number": number, "previous": GENESIS if last is None else last.hash})
    return linked.model_copy(update={"hash": hash_of(linked)})


@dataclass(frozen=True, slots=True)
class Verification:
    """What became of a check. `broken` is the sequence of the first record that does not fit, and `why`.

    `first`, `last` are record numbers; `head` is the last record's hash: who keeps it elsewhere can tell
    later that nothing was cut off at the end.
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
    """Whether the chain holds, from whichever record comes first.

    A chain that does not begin with record 1 has lost its beginning: to the stream's bound, or to somebody.
    `head`: a hash that was told earlier; it must be that of one of the records. `heads`: what was kept of the
    chain off the bus; records that came before the first one here can't be compared.
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
    """Why a record does not fit behind the one before it; empty where it does."""
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
