"""What the routes of files and batches call. Each user sees their own alone."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager

from bus.connection import Bus
from bus.logs import get_logger
from entities.gateway.batches.batch_lines import MOST_SERVICES, BatchScan
from entities.gateway.batches.batch_log import BatchLog
from entities.gateway.batches.batch_rules import batch_view, moved
from entities.gateway.batches.file_store import FileStore, folder_of
from entities.gateway.calls.calls import Allow, service_of
from entities.gateway.operations.idempotency import key_reused
from schemas.errors import BadInput, LastingConflict, NotFound, OverQuota, RateLimited
from schemas.services.batches import (
    BATCH_OVER,
    MOST_BATCHES,
    BatchBody,
    BatchRecord,
    BatchState,
    OpenaiBatch,
    StoredFile,
)
from schemas.signals import AccessDecision
from schemas.urls import bus_name

log = get_logger("batches")

MOST_SCANS = 2
"""Files of one user that are looked through at a time, each for a batch."""
MOST_OPEN = 64
"""Batches of one user that are not over."""
DATA_SETS = "datasets/"
MayRead = Callable[[str], Awaitable[object]]
"""Asks whether the bearer may read a data set. Raises `Refused`."""


class BatchOperations:
    """Files and batches. Who asks was told to the authorizer before.

    Args:
        most_bytes: Of a data set whose lines are a batch's requests, as of a file.
        life_s: Seconds of a batch's `completion_window`, of which there is one.
    """

    def __init__(
        self,
        bus: Bus,
        batches: BatchLog,
        files: FileStore,
        most_bytes: int = 200 << 20,
        life_s: float = 86_400.0,
    ) -> None:
        self.files = files
        self._bus = bus
        self._log = batches
        self._most_bytes = most_bytes
        self._life_s = life_s
        self._scans: Counter[str] = Counter()

    async def store(
        self,
        access: AccessDecision,
        filename: str,
        pieces: AsyncIterator[bytes],
        stated_bytes: int,
        key: str | None,
    ) -> StoredFile:
        """Stores a file of requests; a repetition with the same idempotency key stores nothing.

        Raises:
            KeyReused: the key came with another file before.
            OverQuota: the user has no room for it, or as many files as they may.
        """
        if key is None:
            return await self.files.store(access, filename, pieces, stated_bytes)
        file = f"file-{_token(access.user, key)}"
        try:
            former = await self.files.get(file, access.user)
        except NotFound:
            return await self.files.store(access, filename, pieces, stated_bytes, file)
        digest = hashlib.sha256()
        async for piece in pieces:
            digest.update(piece)
        if former.sha256 != digest.hexdigest():
            raise key_reused()
        return former

    async def delete_file(self, file: str, access: AccessDecision) -> None:
        """Raises `NotFound`, or `LastingConflict` while a batch needs it."""
        record = await self.files.get(file, access.user)
        for batch in await self._log.each(access.user):
            if batch.state not in BATCH_OVER and batch.input_file == file:
                raise LastingConflict(
                    f"file {file} has the requests of batch {batch.batch}: cancel that first, or wait",
                    reason="file_in_use",
                )
        await self.files.delete(record)

    async def create(
        self, body: BatchBody, access: AccessDecision, allow: Allow, may_read: MayRead, key: str | None
    ) -> OpenaiBatch:
        """Creates a batch of a file's requests.

        Raises:
            BadInput: the file has none, too many, or two under one `custom_id`.
            KeyReused: the key came with another request before.
            Refused: the user may not use one of the services.
            RateLimited: the user has as many open batches as they may, or creates too many at a time.
            OverQuota: the user has as many batches with files as they may.
        """
        folder_of(access.user)
        batch = f"batch_{_token(access.user, key) if key is not None else secrets.token_hex(12)}"
        own = await self._log.each(access.user)
        again = next((each for each in own if each.batch == batch), None)
        request = hashlib.sha256(body.model_dump_json().encode()).hexdigest()
        if again is not None:
            return await self.view(_same(again, request))
        await self._make_room(own, access.user)
        source, digest = await self._source(body.input_file_id, access, may_read)
        with self._scanning(access.user):
            scan = await self._scanned(source, body)
        services = await self._services(scan, body, allow)
        now, me = time.time(), self._bus.sender
        record = await self._log.create(
            BatchRecord(
                batch=batch,
                request_sha256=request,
                user=access.user,
                role=access.role,
                token_id=access.token_id,
                issued_at=access.issued_at,
                token_expires=access.expires_at is not None,
                quota=access.quota,
                services=services,
                endpoint=body.endpoint,
                model=body.model,
                input_file=body.input_file_id,
                source=source,
                source_sha256=digest,
                offsets=tuple(scan.offsets),
                firsts=tuple(scan.firsts),
                lines=scan.lines,
                completion_window=body.completion_window,
                metadata=body.metadata or {},
                gateway=me.name,
                incarnation=me.incarnation,
                created_at=now,
                expires_at=now + self._life_s,
            )
        )
        log.info("batch created", batch=batch, lines=scan.lines, user=access.user)
        return await self.view(_same(record, request))

    async def show(self, batch: str, access: AccessDecision) -> OpenaiBatch:
        return await self.view(await self._log.get(batch, access.user))

    async def each(self, access: AccessDecision) -> list[BatchRecord]:
        """A user's batches, newest first."""
        return await self._log.each(access.user)

    async def view(self, record: BatchRecord) -> OpenaiBatch:
        """The batch in OpenAI's shape; its units are read only while it is not over."""
        is_over = record.state in BATCH_OVER
        return batch_view(record) if is_over else batch_view(record, await self._log.units(record.batch))

    async def cancel(self, batch: str, access: AccessDecision) -> OpenaiBatch:
        """Ends a batch; what is answered so far stays, in its files.

        Raises:
            LastingConflict: it is over.
        """

        def cancelled(record: BatchRecord) -> BatchRecord | None:
            if record.state in BATCH_OVER:
                raise LastingConflict(f"batch {batch} is {record.state.value} already", reason="batch_over")
            if record.state is BatchState.CANCELLING:
                return None  # it is being done already
            return moved(record, BatchState.CANCELLING, time.time())

        await self._log.get(batch, access.user)
        record = await self._log.change(batch, cancelled)
        if record is None:
            raise NotFound(f"there is no batch {batch}", reason="batch_not_found")
        return await self.view(record)

    # --- parts ----------------------------------------------------------------------------------------------
    async def _make_room(self, own: list[BatchRecord], user: str) -> None:
        """Room for one more batch: the oldest one that is over, and has no files any more, is forgotten."""
        if sum(each.state not in BATCH_OVER for each in own) >= MOST_OPEN:
            raise RateLimited(
                f"you have {MOST_OPEN} open batches, which is the most; wait for one, or cancel it",
                retry_after_s=60.0,
            )
        if len(own) < MOST_BATCHES:
            return
        with_files = {file.batch for file in await self.files.each(user)}
        for record in reversed(own):
            if record.state in BATCH_OVER and record.batch not in with_files:
                await self._log.forget(record.batch)
                return
        raise OverQuota(
            f"you have {MOST_BATCHES:,} batches, which is the most; delete the files of old ones", user=user
        )

    async def _source(self, named: str, access: AccessDecision, may_read: MayRead) -> tuple[str, str]:
        """The object with the requests, and its SHA-256."""
        name = bus_name(named)
        if name.startswith(DATA_SETS) and name.count("/") == 1:
            await may_read(name.removeprefix(DATA_SETS))
            info = await self._bus.objects.info(name)
            if info.size > self._most_bytes:
                text = f"input_file_id: {named[:120]} has more than {self._most_bytes} bytes; split it"
                raise BadInput(text, param="input_file_id")
            return name, info.digest
        if name or "://" in named:
            raise BadInput(
                f"input_file_id: {named[:120]} is no file of yours, and no data set bus://datasets/NAME",
                param="input_file_id",
            )
        record = await self.files.get(named, access.user)
        if record.purpose != "batch":
            raise BadInput(
                f"input_file_id: {named} has answers, not requests; upload a file with purpose=batch",
                param="input_file_id",
            )
        return f"{folder_of(access.user)}/{record.file}", record.sha256

    @contextmanager
    def _scanning(self, user: str) -> Iterator[None]:
        if self._scans[user] >= MOST_SCANS:
            text = f"{MOST_SCANS} files of yours are being looked through for batches; ask again in a moment"
            raise RateLimited(text, retry_after_s=1.0)
        self._scans[user] += 1
        try:
            yield
        finally:
            self._scans.subtract((user,))
            self._scans += Counter()  # which drops those at zero

    async def _scanned(self, source: str, body: BatchBody) -> BatchScan:
        scan = BatchScan(body.endpoint)
        async for piece in self._bus.objects.get(source):
            await asyncio.to_thread(scan.add, piece)
        await asyncio.to_thread(scan.end)
        return scan

    async def _services(self, scan: BatchScan, body: BatchBody, allow: Allow) -> tuple[str, ...]:
        """The services that the requests ask, each of which the user may use."""
        models = {model or body.model for model in scan.models} - {""}
        if not models:
            raise BadInput("no request names a model; name the one that they all ask as model", param="model")
        services: dict[str, None] = {}
        for model in sorted(models):
            try:
                services[service_of(model)] = None
            except NotFound:
                continue  # an error line says so
        if len(scan.models) > MOST_SERVICES:
            raise BadInput(
                f"the requests ask more than {MOST_SERVICES} models; split the file", param="input_file_id"
            )
        for service in services:
            await allow(service)
        return tuple(services)


def _same(record: BatchRecord, request: str) -> BatchRecord:
    """A batch that is there under a key already, if it comes of the same request. Raises `KeyReused`."""
    if record.request_sha256 not in ("", request):
        raise key_reused()
    return record


def _token(user: str, key: str) -> str:
    return hashlib.sha256(f"{user}\0{key}".encode()).hexdigest()[:24]
