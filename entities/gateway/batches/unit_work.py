"""The requests of one unit, answered beside and behind interactive ones."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bus.connection import Bus
from bus.logs import get_logger
from entities.gateway.batches.batch_lines import (
    BatchRequest,
    answered_line,
    request_of,
    requests_in,
    unread_line,
)
from entities.gateway.batches.file_store import FileStore, folder_of
from entities.gateway.calls.calls import WholeCalls
from entities.gateway.calls.failures import openai_failure
from entities.gateway.generation.service_book import RequestKey
from schemas.base import Part
from schemas.errors import BadInput, DmscError, Refused
from schemas.services.batches import BatchRecord, BatchUnit
from schemas.services.completion import ChatCompletion, Completion
from schemas.signals import AccessDecision

log = get_logger("batches")

INLINE_BYTES = 16 << 10
"""Lines up to this size are parsed at once: a thread costs more than they do."""


@dataclass(frozen=True, kw_only=True)
class LineConfig:
    """When requests of batches are made, and how long each is tried."""

    most_lines: int = 16  # at a time, of all batches of this gateway; so many of one unit wait for room
    share: float = (
        0.5  # a request begins while an instance of each stage has less than this of its room taken
    )
    fresh_s: float = 3.0  # for which what an instance said of its room is believed
    pause_s: float = 0.1  # between two looks for room, and the shortest pause before a request is made again
    longest_pause_s: float = 5.0
    line_s: float = 900.0  # for which one request is tried while its service is away or full


class UnitWork:
    """Answers units. `config`: how much of the mesh batches may take."""

    def __init__(
        self, bus: Bus, calls: WholeCalls, files: FileStore, config: LineConfig = LineConfig()
    ) -> None:
        self._bus = bus
        self._calls = calls
        self._files = files
        self._config = config
        self._room = asyncio.Semaphore(config.most_lines)
        self._begun: Counter[str] = Counter()  # requests under way, by model

    async def answered(self, record: BatchRecord, unit: int) -> BatchUnit:
        """The unit with its answers, which are stored, and not decided yet.

        Raises:
            BadInput: the file is another one than the batch was created of.
            NotFound: the file is gone.
            OverQuota: the batch's user has no room for the answers.
            Unavailable: the bus is away.
        """
        lines = await self._lines(record, unit)
        # One unit whose service is away or full takes no room from those of other services.
        room, first = asyncio.Semaphore(self._config.most_lines), record.firsts[unit]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._line(record, first + place, line, room))
                for place, line in enumerate(lines)
            ]
        told = [task.result() for task in tasks]
        output = b"".join(line for line, failed in told if not failed)
        errors = b"".join(line for line, failed in told if failed)
        return BatchUnit(
            batch=record.batch,
            unit=unit,
            completed=sum(not failed for _, failed in told),
            failed=sum(failed for _, failed in told),
            output=await self._store(record, unit, "output", output),
            output_bytes=len(output),
            errors=await self._store(record, unit, "errors", errors),
            error_bytes=len(errors),
            by=self._bus.sender.name,
        )

    async def _lines(self, record: BatchRecord, unit: int) -> list[bytes]:
        """The unit's requests. Empty lines are left out as they come: a file may have any number of them."""
        begin, end = record.offsets[unit], record.offsets[unit + 1]
        lines: list[bytes] = []
        rest = b""
        async for piece in self._bus.objects.get(record.source, begin, end - begin):
            whole, _, rest = (rest + piece).rpartition(b"\n")
            lines += requests_in(whole)
        # Rights were checked for what the file was then; of another one nobody has asked.
        if (await self._bus.objects.info(record.source)).digest != record.source_sha256:
            text = f"{record.input_file} has changed since the batch was created; create another batch"
            raise BadInput(text, reason="file_changed")
        return lines + requests_in(rest)

    async def drop(self, unit: BatchUnit, instead: BatchUnit) -> None:
        """Removes what was stored for a unit that another gateway has decided, unless it stored the same."""
        kept = {instead.output, instead.errors}
        await self._files.drop(tuple(name for name in (unit.output, unit.errors) if name not in kept))

    async def _store(self, record: BatchRecord, unit: int, part: str, data: bytes) -> str:
        if not data:
            return ""
        digest = hashlib.sha256(data).hexdigest()[:16]
        name = f"{folder_of(record.user)}/{record.batch}/{unit:06d}-{part}-{digest}"
        await self._files.put(_decision(record), name, data, len(data))
        return name

    # --- one request ----------------------------------------------------------------------------------------
    async def _line(
        self, record: BatchRecord, number: int, line: bytes, room: asyncio.Semaphore
    ) -> tuple[bytes, bool]:
        """Its line, and whether it is one of an error."""
        try:
            if len(line) > INLINE_BYTES:
                request = await asyncio.to_thread(request_of, line, number, record.endpoint, record.model)
            else:
                request = request_of(line, number, record.endpoint, record.model)
        except BadInput as error:
            return unread_line(number, error), True
        async with room:
            try:
                made = await self._patiently(record, request)
            except DmscError as error:
                status, body = openai_failure(error)
                return answered_line(request.key, request.custom_id, int(status), body), True
            except Exception as error:  # a defect at one request must not cost the others' answers
                log.error("a request of a batch failed", batch=record.batch, number=number, exc_info=error)
                status, body = openai_failure(DmscError("the gateway failed; its log says why"))
                return answered_line(request.key, request.custom_id, int(status), body), True
        body = _steady(made, request, int(record.created_at)).model_dump(mode="json")
        return answered_line(request.key, request.custom_id, 200, body), False

    async def _patiently(self, record: BatchRecord, request: BatchRequest) -> Part:
        """Its answer. What another time may bring is tried again for `line_s`, waits for room not counted."""
        config, text = self._config, json.dumps(request.body).encode()
        # The same draws, and the same version, whichever gateway makes the request, however often.
        key = f"batch/{request.key}"
        left_s, pause_s = config.line_s, config.pause_s
        model, named = str(request.body.get("model", "")), request.body.get("user")
        drawn_by = RequestKey.of(record.user, named if isinstance(named, str) else None, key).text

        async def allow(service: str) -> AccessDecision:
            if service not in record.services:
                raise Refused(f"{service} is no service that this batch was created for", user=record.user)
            return _decision(record)

        while True:
            async with self._turn(model, drawn_by):
                began = time.monotonic()
                try:
                    return await self._calls.answer(record.endpoint, text, allow, key)
                except DmscError as error:
                    left_s -= time.monotonic() - began
                    if not error.retryable or left_s <= 0:
                        raise
                    pause_s = min(2 * pause_s, config.longest_pause_s)
                    wait_s = max(pause_s, float(error.fields.get("retry_after_s", 0.0)))
            left_s -= wait_s
            await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def _turn(self, model: str, drawn_by: str) -> AsyncIterator[None]:
        """Waits until those who ask themselves leave room for a request, which is made within the block."""
        config, passes = self._config, self._calls.operations.passes
        while True:
            async with self._room:
                if passes.has_room(model, drawn_by, config.share, self._begun[model], config.fresh_s):
                    self._begun[model] += 1
                    try:
                        yield
                    finally:
                        self._begun.subtract((model,))
                        self._begun += Counter()  # which drops those at zero
                    return
            await asyncio.sleep(config.pause_s)  # no event says that an instance has less to do


def _decision(record: BatchRecord) -> AccessDecision:
    """What the authorizer said when the batch was created."""
    return AccessDecision(allow=True, user=record.user, role=record.role, reason="batch", quota=record.quota)


def _steady(made: Part, request: BatchRequest, created: int) -> Part:
    """The answer without what is another one each time: the same request gives the same bytes."""
    if not isinstance(made, Completion | ChatCompletion):
        return made
    kind = "cmpl" if isinstance(made, Completion) else "chatcmpl"
    served = made.dmsc.model_copy(update={"generation": ""})
    return made.model_copy(update={"id": f"{kind}-{request.key}", "created": created, "dmsc": served})
