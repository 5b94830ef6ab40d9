"""The audit's chain: whatever is changed, removed, put in or moved shows, and where."""

from __future__ import annotations

import pytest

from schemas.audit import AuditEntry, AuditRecord, chained, hash_of, verify


def chain(count: int, first: int = 1) -> list[AuditEntry]:
    entries: list[AuditEntry] = []
    last: AuditRecord | None = None
    for number in range(first, first + count):
        record = AuditRecord(id=f"r{number}", at=number * 1.5, authorizer="a", kind="refused", user="ruth")
        last = chained(record, number, last)
        entries.append(AuditEntry(sequence=number, record=last))
    return entries


def changed(entry: AuditEntry, *, again: bool = False, **fields: object) -> AuditEntry:
    """`again`: with a hash that fits, as somebody careful would."""
    record = entry.record.model_copy(update=fields)
    if again:
        record = record.model_copy(update={"hash": hash_of(record)})
    return AuditEntry(sequence=entry.sequence, record=record)


def test_an_untouched_chain_holds() -> None:
    entries = chain(5)
    found = verify(entries)
    assert (found.records, found.first, found.last, found.broken) == (5, 1, 5, None)
    assert found.head == entries[-1].record.hash
    assert verify([]).broken is None
    assert verify(entries[2:]).first == 3, "a stream that has dropped its oldest"


@pytest.mark.parametrize(
    ("tampered", "sequence", "says"),
    [
        (lambda e: [*e[:2], changed(e[2], user="rob"), *e[3:]], 3, "record 3 was changed"),
        (lambda e: [*e[:2], changed(e[2], again=True, user="rob"), *e[3:]], 4, "hash of record 3"),
        (lambda e: [*e[:2], *e[3:]], 4, "record 4 follows record 2"),
        (lambda e: [*e[:2], e[1], *e[2:]], 2, "record 2 follows record 2"),
        (lambda e: [e[0], e[2], e[1], *e[3:]], 3, "record 3 follows record 1"),
        (lambda e: [changed(e[0], again=True, previous="x"), *e[1:]], 1, "names a record before it"),
    ],
)
def test_tampering_shows_at_its_record(tampered: object, sequence: int, says: str) -> None:
    assert callable(tampered)
    found = verify(tampered(chain(5)))
    assert found.broken == sequence
    assert says in found.why


def test_what_was_cut_off_at_the_end_shows_with_a_hash_noted_earlier() -> None:
    entries = chain(5)
    head = entries[-1].record.hash
    assert verify(entries[:4]).broken is None
    assert "cut off" in verify(entries[:4], head=head).why
    assert verify(entries, head=head).broken is None


def test_what_was_cut_off_the_stream_shows_with_the_next_record() -> None:
    entries = chain(5)
    # the stream's sequence goes on, whatever was removed from it
    after = chained(AuditRecord(id="r6", at=9.0, authorizer="a", kind="act"), 6, None)
    found = verify([*entries[:3], AuditEntry(sequence=6, record=after)])
    assert "record 6 follows record 3" in found.why
