"""The archive of the audit chain: every record in the authorizer's own files, and a signed head.

Whoever may delete the stream or write the server's files can make a new valid chain, but it will differ from
the records in these files. And the stream is bounded: records that it drops are still here.

    <folder>/1-00000001.ndjson   records from number 1 on, as `dmsc audit export` writes them
    <folder>/1.head              the last record's number and hash, signed with the key of users' tokens

The first number is the chain's. A stream that was rolled back or written anew begins a new chain, and the
files of the earlier ones stay. Nothing here is ever deleted; to free space, move whole files away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey
from pydantic import ValidationError

from bus import subjects
from bus.connection import Bus
from bus.files.plain_files import plain
from bus.logs import get_logger
from schemas.audit import AuditEntry, AuditHead, AuditRecord
from schemas.errors import BadInput, DmscError, Unavailable

log = get_logger("audit")

SEGMENT_BYTES = 32 << 20
BATCH = 500
MOST_BEHIND = 20_000
"""Most records that the stream may be ahead of the files: far fewer than it holds, so none is lost."""
_NAME = re.compile(r"^(\d+)-(\d+)\.ndjson$")


@dataclass(frozen=True, slots=True)
class Segment:
    """A file with the records of a chain from number `first` on."""

    chain: int
    first: int
    path: Path


class AuditArchive:
    """One authorizer's archive. `admit` refuses acts while it lags too far behind the stream.

    Raises `BadInput` with one line if the folder can't be used.
    """

    def __init__(
        self,
        folder: Path,
        key: SigningKey | None,
        authorizer: str,
        most_behind: int = MOST_BEHIND,
        check_s: float = 1.0,
    ) -> None:
        """`check_s` is how often the stream is checked, besides after each record of our own."""
        self._check_s = check_s
        self._folder = folder
        self._key = key
        self._authorizer = authorizer
        self._most_behind = most_behind
        self._changed = asyncio.Event()
        self._problem = ""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            segments = segments_of(folder)
            self._chain = max((segment.chain for segment in segments), default=1)
            self._last = _last_entry([segment for segment in segments if segment.chain == self._chain])
        except OSError as error:
            raise BadInput(f"{folder}: {error.strerror}; the audit's records are kept there") from None

    @property
    def archived(self) -> int:
        """The number of the last archived record; 0 if there is none."""
        return 0 if self._last is None else self._last.record.number

    def admit(self, last: int) -> None:
        """Check that another record may follow record `last` of the stream.

        Raises:
            Unavailable: the files lag so far behind that the stream might drop records before they are
                archived.
        """
        self._changed.set()
        if last - self.archived > self._most_behind:
            why = self._problem or "it is being written"
            raise Unavailable(f"the archive of the audit is {last - self.archived:,} records behind ({why})")

    def wrote(self) -> None:
        """Note that the stream has a new record."""
        self._changed.set()

    async def run(self, bus: Bus) -> None:
        """Archive new records until cancelled. A failed write is retried, and logged once."""
        while True:
            self._changed.clear()
            try:
                await self._catch_up(bus)
                if self._problem:
                    log.info("audit archive written again", folder=str(self._folder))
                self._problem = ""
            except (DmscError, OSError) as error:
                text = error.text if isinstance(error, DmscError) else str(error.strerror or error)
                if text != self._problem:
                    log.error("audit archive not written", folder=str(self._folder), reason=text)
                self._problem = text
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._check_s):
                    await self._changed.wait()

    async def _catch_up(self, bus: Bus) -> None:
        last = await bus.last_sequence(subjects.AUDIT)
        if last < self.archived:
            self._begin_chain(f"the stream ends at record {last}, and record {self.archived} was there")
        if last == self.archived:
            return
        batch: list[AuditEntry] = []
        async with contextlib.aclosing(bus.history(subjects.AUDIT, start=max(1, self.archived))) as items:
            async for item in items:
                if not isinstance(item.message, AuditRecord):
                    continue
                entry = AuditEntry(sequence=item.sequence, record=item.message)
                if self._last is not None and entry.record.number == self.archived:
                    if entry.record.hash != self._last.record.hash:
                        self._begin_chain(f"record {self.archived} of the stream is another than it was")
                        return  # the next check, at once, reads the stream from its beginning
                    continue
                if self.archived and not batch and entry.record.number > self.archived + 1:
                    gap = f"{self.archived + 1} to {entry.record.number - 1}"
                    self._begin_chain(f"records {gap} fell out while nobody kept them")
                batch.append(entry)
                if len(batch) >= BATCH:
                    await self._archive(batch)
                    batch = []
        await self._archive(batch)

    def _begin_chain(self, why: str) -> None:
        log.error(
            "the audit stream is not the one that it was: `dmsc audit verify` says more",
            reason=why,
            chain=self._chain,
            folder=str(self._folder),
        )
        self._chain, self._last = self._chain + 1, None
        self._changed.set()

    async def _archive(self, batch: list[AuditEntry]) -> None:
        if batch:
            await asyncio.to_thread(self._write, batch)
            self._last = batch[-1]

    def _write(self, batch: list[AuditEntry]) -> None:
        with _open_file(self._segment(batch[0].record.number)) as file:
            file.writelines(entry.model_dump_json().encode() + b"\n" for entry in batch)
            file.flush()
            os.fsync(file.fileno())
        head = head_of(batch[-1].record, self._authorizer, self._key)
        partial = self._folder / f".{self._chain}.head"
        with _open_file(partial, os.O_TRUNC) as file:
            file.write(head.model_dump_json().encode() + b"\n")
        partial.replace(self._folder / f"{self._chain}.head")

    def _segment(self, number: int) -> Path:
        """The present file, or a new one if it is full or there is none."""
        present = [segment for segment in segments_of(self._folder) if segment.chain == self._chain]
        if present and present[-1].path.stat().st_size < SEGMENT_BYTES:
            return present[-1].path
        return self._folder / f"{self._chain}-{number:08d}.ndjson"


@contextlib.contextmanager
def _open_file(path: Path, more: int = os.O_APPEND) -> Iterator[BinaryIO]:
    """Open a file for writing, readable only by this user, without following links."""
    with os.fdopen(plain(path, os.O_WRONLY | os.O_CREAT | more), "wb") as file:
        yield file


# --- reading ------------------------------------------------------------------------------------------------
def segments_of(folder: Path) -> list[Segment]:
    """The files of a folder in the order of chains and numbers; none if there is no such folder."""
    if not folder.is_dir():
        return []
    matches = [(match, path) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    return sorted(
        (Segment(int(match[1]), int(match[2]), path) for match, path in matches),
        key=lambda segment: (segment.chain, segment.first),
    )


def entries_of(segments: Iterable[Segment]) -> Iterator[AuditEntry]:
    """The records of these files, without an incomplete last line.

    Raises:
        BadInput: a line is no record.
    """
    for segment in segments:
        lines = segment.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                yield AuditEntry.model_validate_json(line)
            except ValidationError:
                raise BadInput(f"{segment.path} line {number}: is no audit record") from None


def heads_of(folder: Path, key: VerifyKey | None = None) -> list[AuditHead]:
    """The heads of all chains, oldest first.

    Raises:
        BadInput: a file is no head, or was not signed with `key`.
    """
    heads = []
    for path in sorted(folder.glob("[0-9]*.head"), key=lambda path: int(path.stem)):
        try:
            head = AuditHead.model_validate_json(path.read_bytes())
            if key is not None:
                key.verify(head.signed, bytes.fromhex(head.signature))
        except (ValueError, BadSignatureError):
            raise BadInput(f"{path}: is no head that this mesh's authorizer has signed") from None
        heads.append(head)
    return heads


def head_of(record: AuditRecord, authorizer: str, key: SigningKey | None) -> AuditHead:
    """The head for a last record, signed if there is a key."""
    head = AuditHead(number=record.number, hash=record.hash, at=record.at, authorizer=authorizer)
    if key is None:
        return head
    return head.model_copy(update={"signature": key.sign(head.signed).signature.hex()})


def _last_entry(segments: list[Segment]) -> AuditEntry | None:
    """The last record. An incomplete last line, after a power loss, is cut off first."""
    if not segments:
        return None
    path = segments[-1].path
    data = path.read_bytes()
    complete_bytes = data.rfind(b"\n") + 1
    if complete_bytes < len(data):
        os.truncate(path, complete_bytes)
    last = None
    for last in entries_of(segments[-1:]):  # noqa: B007  # the last one is wanted
        pass
    return last if last is not None else _last_entry(segments[:-1])
