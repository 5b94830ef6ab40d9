"""The audit off the bus: what falls out of the stream is kept, and one that was tampered with is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from nacl.signing import SigningKey

from bus import subjects
from bus.connection import Bus
from bus.nats import jetstream
from entities.authorizer.audit.audit_archive import AuditArchive, entries_of, heads_of, segments_of
from entities.authorizer.audit.audit_trail import AuditTrail
from schemas.audit import AuditEntry, AuditRecord, verify
from schemas.envelope import EntityKind
from schemas.errors import BadInput, Unavailable
from tests.integration.entities.conftest import Dial
from tests.waiting import beside, eventually

KEY = SigningKey(b"\x01" * 32)
SMALL_BYTES = 64 << 10


@pytest.fixture
async def bus(dial: Dial) -> Bus:
    return await dial("authorizer", EntityKind.AUTHORIZER)


async def entries(bus: Bus) -> list[AuditEntry]:
    return [
        AuditEntry(sequence=one.sequence, record=one.message)
        async for one in bus.history(subjects.AUDIT)
        if isinstance(one.message, AuditRecord)
    ]


async def act(trail: AuditTrail, *numbers: int) -> None:
    for number in numbers:
        await trail.act("act", user="olga", action="node.cordon", resource=f"node-{number}", reason="r" * 300)


async def kept(archive: AuditArchive, number: int) -> None:
    await eventually(lambda: archive.archived == number)


async def delete_stream(bus: Bus) -> None:
    await jetstream.call(bus.connection, f"STREAM.DELETE.{subjects.AUDIT.stream}")
    await bus.provision()


async def test_a_flood_pushes_no_record_out_unseen(bus: Bus, tmp_path: Path) -> None:
    """The stream is made so small that most of the records fall out of it: all of them are in the files."""
    name = subjects.AUDIT.stream
    config = (await jetstream.call(bus.connection, f"STREAM.INFO.{name}"))["config"]
    await jetstream.call(bus.connection, f"STREAM.UPDATE.{name}", config | {"max_bytes": SMALL_BYTES})
    archive = AuditArchive(tmp_path / "audit", KEY, "authorizer", most_behind=20)
    trail = AuditTrail(bus, "authorizer", archive=archive)
    async with beside(archive.run(bus)):
        await act(trail, *range(300))
        await kept(archive, 300)
    in_stream = await entries(bus)
    assert in_stream[0].record.number > 100, "the flood fired"
    in_files = list(entries_of(segments_of(tmp_path / "audit")))
    assert [entry.record.number for entry in in_files] == list(range(1, 301))
    heads = heads_of(tmp_path / "audit", KEY.verify_key)
    begins = in_stream[0].record.number
    found = verify([one for one in in_files if one.record.number < begins] + in_stream, heads=heads)
    assert (found.records, found.broken) == (300, None)


async def test_who_does_not_keep_records_permits_no_act(bus: Bus, tmp_path: Path) -> None:
    archive = AuditArchive(tmp_path / "audit", KEY, "authorizer", most_behind=3)
    trail = AuditTrail(bus, "authorizer", archive=archive)  # its archive does not run
    await act(trail, 1, 2, 3, 4)
    with pytest.raises(Unavailable, match="the archive of the audit is 4 records behind"):
        archive.admit(4)
    assert len(await entries(bus)) == 4


async def test_a_stream_that_was_cut_off_or_written_anew_is_named(bus: Bus, tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    archive = AuditArchive(folder, KEY, "authorizer")
    trail = AuditTrail(bus, "authorizer", archive=archive)
    async with beside(archive.run(bus)):
        await act(trail, 1, 2, 3)
        await kept(archive, 3)
    heads = heads_of(folder, KEY.verify_key)
    assert verify(await entries(bus), heads=heads).broken is None
    # somebody who may deletes the stream: what is written anew holds in itself
    await delete_stream(bus)
    cut_off = verify(await entries(bus), heads=heads)
    assert "record 3, which authorizer kept" in cut_off.why
    assert "3 were cut off behind record 0" in cut_off.why
    forger = AuditTrail(bus, "authorizer")
    await act(forger, 1, 2, 7, 8)
    forged = await entries(bus)
    assert verify(forged).broken is None, "without the head nothing shows"
    assert "record 3 is another than the one that authorizer kept" in verify(forged, heads=heads).why
    # the next authorizer sees it, begins another chain, and forgets nothing of the first
    again = AuditArchive(folder, KEY, "authorizer")
    assert again.archived == 3
    async with beside(again.run(bus)):
        await kept(again, 4)
    assert [head.number for head in heads_of(folder, KEY.verify_key)] == [3, 4]
    assert [(one.chain, one.first) for one in segments_of(folder)] == [(1, 1), (2, 1)]
    assert "is another" in verify(await entries(bus), heads=heads_of(folder)).why


async def test_a_stream_deleted_under_a_running_authorizer_begins_another_chain(
    bus: Bus, tmp_path: Path
) -> None:
    archive = AuditArchive(tmp_path / "audit", KEY, "authorizer")
    trail = AuditTrail(bus, "authorizer", archive=archive)
    async with beside(archive.run(bus)):
        await act(trail, 1, 2, 3)
        await kept(archive, 3)
        await delete_stream(bus)
        await act(trail, 4)
        await kept(archive, 1)
    assert "2 were cut off" in verify(await entries(bus), heads=heads_of(tmp_path / "audit")).why


async def test_files_are_private_torn_lines_are_dropped_and_heads_are_signed(
    bus: Bus, tmp_path: Path
) -> None:
    folder = tmp_path / "audit"
    archive = AuditArchive(folder, KEY, "authorizer")
    trail = AuditTrail(bus, "authorizer", archive=archive)
    async with beside(archive.run(bus)):
        await act(trail, 1, 2)
        await kept(archive, 2)
    (segment,) = segments_of(folder)
    assert segment.path.stat().st_mode & 0o077 == folder.stat().st_mode & 0o077 == 0
    with segment.path.open("ab") as file:
        file.write(b'{"sequence": 3, "rec')  # the machine lost power here
    assert AuditArchive(folder, KEY, "authorizer").archived == 2
    (folder / "1.head").write_text((folder / "1.head").read_text().replace('"number":2', '"number":1'))
    with pytest.raises(BadInput, match=r"1\.head: is no head that this mesh's authorizer has signed"):
        heads_of(folder, KEY.verify_key)
