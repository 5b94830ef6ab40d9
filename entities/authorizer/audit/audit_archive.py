"""The audit chain off the bus: every record in files of the authorizer's own, and a signed head.

Who may delete the stream, or write the server's files, can make a new chain that holds; it is not the one
whose records lie here. And the stream is bounded: what falls out of it is still here.

    <folder>/1-00000001.ndjson   records from number 1 on, as `dmsc audit export` writes them
    <folder>/1.head              the last one's number and hash, signed with the key of users' tokens

The number in front is the chain's: a stream that was rolled back or written anew begins the next one, and
what is known of those before stays. Nothing here is ever deleted; who needs the room moves whole files away.
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

LOOK_S = 1.0
"""How often the stream is looked at, besides after each record of our own."""
SEGMENT_BYTES = 32 << 20
BATCH = 500
MOST_BEHIND = 20_000
"""Records that the stream may be ahead of the files: far fewer than it holds, so none falls out unseen."""
_NAME = re.compile(r"^(\d+)-(\d+)\.ndjson$")


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of records: of which chain, from which number on."""

    chain: int
    first: int
    path: Path


class AuditArchive:
    """One authorizer's files. `behind` refuses acts while they lag too far.

    Raises `BadInput` with one line where the folder can't be used.
    """

    def __init__(
        self, folder: Path, key: SigningKey | None, authorizer: str, most_behind: int = MOST_BEHIND
    ) -> None:
        self._folder = folder
        self._key = key
        self._authorizer = authorizer
        self._most_behind = most_behind
        self._news = asyncio.Event()
        self._problem = ""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            segments = segments_of(folder)
            self._chain = max((one.chain for one in segments), default=1)
            self._last = _last_of([one for one in segments if one.chain == self._chain])
        except OSError as error:
            raise BadInput(f"{folder}: {error.strerror}; the audit's records are kept there") from None

    @property
    def kept(self) -> int:
        """The number of the last record in the files; 0: none."""
        return 0 if self._last is None else self._last.record.number

    def admit(self, last: int) -> None:
        """May another record follow record `last` of the stream?

        Raises:
            Unavailable: the files lag so far behind that records might fall out of the stream unseen.
        """
        self._news.set()
        if last - self.kept > self._most_behind:
            why = self._problem or "it is being written"
            raise Unavailable(f"the archive of the audit is {last - self.kept:,} records behind ({why})")

    def wrote(self) -> None:
        """There is a new record in the stream."""
        self._news.set()

    async def run(self, bus: Bus) -> None:
        """Keeps up with the stream until cancelled. What can't be written is tried again, and said once."""
        while True:
            self._news.clear()
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
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()

    async def _catch_up(self, bus: Bus) -> None:
        last = await bus.last_sequence(subjects.AUDIT)
        if last < self.kept:
            self._begin_anew(f"the stream ends at record {last}, and record {self.kept} was there")
        if last == self.kept:
            return
        batch: list[AuditEntry] = []
        async with contextlib.aclosing(bus.history(subjects.AUDIT, start=max(1, self.kept))) as items:
            async for item in items:
                if not isinstance(item.message, AuditRecord):
                    continue
                entry = AuditEntry(sequence=item.sequence, record=item.message)
                if self._last is not None and entry.record.number == self.kept:
                    if entry.record.hash != self._last.record.hash:
                        self._begin_anew(f"record {self.kept} of the stream is another than it was")
                        return  # from its beginning, at the next look, which is at once
                    continue
                if self.kept and not batch and entry.record.number > self.kept + 1:
                    gap = f"{self.kept + 1} to {entry.record.number - 1}"
                    self._begin_anew(f"records {gap} fell out while nobody kept them")
                batch.append(entry)
                if len(batch) >= BATCH:
                    await self._keep(batch)
                    batch = []
        await self._keep(batch)

    def _begin_anew(self, why: str) -> None:
        log.error(
            "the audit stream is not the one that it was: `dmsc audit verify` says more",
            reason=why,
            chain=self._chain,
            folder=str(self._folder),
        )
        self._chain, self._last = self._chain + 1, None
        self._news.set()

    async def _keep(self, batch: list[AuditEntry]) -> None:
        if batch:
            await asyncio.to_thread(self._write, batch)
            self._last = batch[-1]

    def _write(self, batch: list[AuditEntry]) -> None:
        with _opened(self._segment(batch[0].record.number)) as file:
            file.writelines(entry.model_dump_json().encode() + b"\n" for entry in batch)
            file.flush()
            os.fsync(file.fileno())
        head = head_of(batch[-1].record, self._authorizer, self._key)
        partial = self._folder / f".{self._chain}.head"
        with _opened(partial, os.O_TRUNC) as file:
            file.write(head.model_dump_json().encode() + b"\n")
        partial.replace(self._folder / f"{self._chain}.head")

    def _segment(self, number: int) -> Path:
        """The present file, or a new one where it is full or there is none."""
        present = [one for one in segments_of(self._folder) if one.chain == self._chain]
        if present and present[-1].path.stat().st_size < SEGMENT_BYTES:
            return present[-1].path
        return self._folder / f"{self._chain}-{number:08d}.ndjson"


@contextlib.contextmanager
def _opened(path: Path, more: int = os.O_APPEND) -> Iterator[BinaryIO]:
    """For writing, for us alone, and never through a link that somebody has put there."""
    with os.fdopen(plain(path, os.O_WRONLY | os.O_CREAT | more), "wb") as file:
        yield file


# --- reading ------------------------------------------------------------------------------------------------
def segments_of(folder: Path) -> list[Segment]:
    """The files of a folder in the order of chains and numbers; none where there is no such folder."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    return sorted(
        (Segment(int(match[1]), int(match[2]), path) for match, path in found),
        key=lambda one: (one.chain, one.first),
    )


def entries_of(segments: Iterable[Segment]) -> Iterator[AuditEntry]:
    """The records of these files. A last line that was not written to its end is none.

    Raises:
        BadInput: a line that is no record.
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
        BadInput: one is no head, or was not signed with `key`.
    """
    found = []
    for path in sorted(folder.glob("[0-9]*.head"), key=lambda one: int(one.stem)):
        try:
            head = AuditHead.model_validate_json(path.read_bytes())
            if key is not None:
                key.verify(head.signed, bytes.fromhex(head.signature))
        except (ValueError, BadSignatureError):
            raise BadInput(f"{path}: is no head that this mesh's authorizer has signed") from None
        found.append(head)
    return found


def head_of(record: AuditRecord, authorizer: str, key: SigningKey | None) -> AuditHead:
    """A record's head, signed where there is a key."""
    head = AuditHead(number=record.number, hash=record.hash, at=record.at, authorizer=authorizer)
    if key is None:
        return head
    return head.model_copy(update={"signature": key.sign(head.signed).signature.hex()})


def _last_of(segments: list[Segment]) -> AuditEntry | None:
    """The last record; a torn last line, of a machine that lost power, is cut off first."""
    if not segments:
        return None
    path = segments[-1].path
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    last = None
    for last in entries_of(segments[-1:]):  # noqa: B007  # the last one is wanted
        pass
    return last if last is not None else _last_of(segments[:-1])
