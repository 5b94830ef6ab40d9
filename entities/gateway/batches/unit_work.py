"""The requests of one unit, answered beside and behind interactive ones."""

from __future__ import annotations

import asyncio
import hashlib
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

KEPT_BYTES = 64 << 20
"""Bytes of answers of units that are not committed, of all batches: beyond it those of a batch that gives its
place back are computed again."""


@dataclass(slots=True)
class _BatchAtWork:
    """What a batch's units do."""

    at: float  # when it began, or one of its requests ended last; monotonic seconds
    units: int = 0
    under_way: int = 0  # requests that are made now


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
        self._at_work: dict[str, _BatchAtWork] = {}
        self._kept: dict[str, dict[int, tuple[bytes, bool]]] = {}  # answers by batch and request's number
        self._kept_bytes = 0

    def may_begin(self, record: BatchRecord) -> bool:
        """Whether a request of a batch may be made now: one of its services answers, or fails for good.

        Versions that are idle start meanwhile: a batch waits for them without taking any room.
        """
        named, held = record.model.partition("@")[0], self._calls.operations.held
        models = [record.model if service == named else service for service in record.services]
        key = RequestKey.of(record.user, None, f"batch/{record.batch}").text
        awake = [held.wake(model, key, record.user) for model in models]  # each that is idle has to start
        return not models or any(awake)

    def stuck_s(self, batch: str, now: float) -> float:
        """For how long no request of a batch could begin, or ended; `now`: monotonic seconds."""
        work = self._at_work.get(batch)
        return 0.0 if work is None or work.under_way else now - work.at

    def committed(self, record: BatchRecord, unit: int) -> None:
        """The answers of a unit are decided."""
        kept = self._kept.get(record.batch, {})
        first, *behind = (*record.firsts[unit:], record.lines)
        for number in [number for number in kept if first <= number < behind[0]]:
            self._kept_bytes -= len(kept.pop(number)[0])

    def forget(self, batch: str) -> None:
        """A batch is over, or another gateway's."""
        for line, _ in self._kept.pop(batch, {}).values():
            self._kept_bytes -= len(line)

    async def answered(self, record: BatchRecord, unit: int) -> BatchUnit:
        """The unit with its answers, which are stored, and not decided yet.

        Raises:
            BadInput: the file is another one than the batch was created of.
            NotFound: the file is gone.
            OverQuota: the batch's user has no room for the answers.
            Unavailable: the bus is away.
        """
        work = self._at_work.setdefault(record.batch, _BatchAtWork(time.monotonic()))
        work.units += 1
        try:
            told = await self._answers(record, unit)
        finally:
            work.units -= 1
            if not work.units:
                del self._at_work[record.batch]
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

    async def _answers(self, record: BatchRecord, unit: int) -> list[tuple[bytes, bool]]:
        """The line of each request, and whether it is one of an error."""
        lines = await self._lines(record, unit)
        # One unit whose service is away or full takes no room from those of other services.
        room, first = asyncio.Semaphore(self._config.most_lines), record.firsts[unit]
        kept = self._kept.setdefault(record.batch, {})

        async def answer(number: int, line: bytes) -> tuple[bytes, bool]:
            if number in kept:  # of before the batch gave its place back
                return kept[number]
            async with room:
                made = await self._line(record, number, line)
            self._at_work[record.batch].at = time.monotonic()
            if self._kept.get(record.batch) is kept and self._kept_bytes + len(made[0]) <= KEPT_BYTES:
                kept[number] = made
                self._kept_bytes += len(made[0])
            return made

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(first + place, line)) for place, line in enumerate(lines)]
        return [task.result() for task in tasks]

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
        digest = await self._calls.decoded(len(data), _digest_of, data)
        name = f"{folder_of(record.user)}/{record.batch}/{unit:06d}-{part}-{digest}"
        await self._files.put(_decision(record), name, data, len(data))
        return name

    # --- one request ----------------------------------------------------------------------------------------
    async def _line(self, record: BatchRecord, number: int, line: bytes) -> tuple[bytes, bool]:
        """Its line, and whether it is one of an error."""
        decoded = self._calls.decoded
        try:
            request = await decoded(len(line), request_of, line, number, record.endpoint, record.model)
        except BadInput as error:
            return unread_line(number, error), True
        try:
            made = await self._patiently(record, request)
        except DmscError as error:
            status, body = openai_failure(error)
            return answered_line(request.key, request.custom_id, int(status), body), True
        except Exception as error:  # a defect at one request must not cost the others' answers
            log.error("a request of a batch failed", batch=record.batch, number=number, exc_info=error)
            status, body = openai_failure(DmscError("the gateway failed; its log says why"))
            return answered_line(request.key, request.custom_id, int(status), body), True
        # Where much was asked, the answer may be large too.
        return await decoded(len(line), _line_of, made, request, int(record.created_at)), False

    async def _patiently(self, record: BatchRecord, request: BatchRequest) -> Part:
        """Its answer. What another time may bring is tried again for `line_s`, waits for room not counted."""
        config, model = self._config, request.model
        # The same draws, and the same version, whichever gateway makes the request, however often.
        key = f"batch/{request.key}"
        left_s, pause_s = config.line_s, config.pause_s
        drawn_by = RequestKey.of(record.user, request.user, key).text
        held = self._calls.operations.held

        async def allow(service: str) -> AccessDecision:
            if service not in record.services:
                raise Refused(f"{service} is no service that this batch was created for", user=record.user)
            return _decision(record)

        while True:
            began = time.monotonic()
            # A version that is idle starts before the request takes one of the turns.
            await held.in_background(model, drawn_by, record.user, max(0.0, left_s))
            left_s -= time.monotonic() - began
            async with self._turn(record.batch, model, drawn_by):
                began = time.monotonic()
                try:
                    return await self._calls.answer(record.endpoint, request.text, allow, key)
                except DmscError as error:
                    left_s -= time.monotonic() - began
                    if not error.retryable or left_s <= 0:
                        raise
                    pause_s = min(2 * pause_s, config.longest_pause_s)
                    wait_s = max(pause_s, float(error.fields.get("retry_after_s", 0.0)))
            left_s -= wait_s
            await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def _turn(self, batch: str, model: str, drawn_by: str) -> AsyncIterator[None]:
        """Waits until those who ask themselves leave room for a request, which is made within the block."""
        config, passes = self._config, self._calls.operations.passes
        while True:
            async with self._room:
                if passes.has_room(model, drawn_by, config.share, self._begun[model], config.fresh_s):
                    work = self._at_work[batch]
                    work.under_way += 1
                    self._begun[model] += 1
                    try:
                        yield
                    finally:
                        work.under_way -= 1
                        self._begun.subtract((model,))
                        self._begun += Counter()  # which drops those at zero
                    return
            await asyncio.sleep(config.pause_s)  # no event says that an instance has less to do


def _digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _line_of(made: Part, request: BatchRequest, created: int) -> bytes:
    body = _steady(made, request, created).model_dump(mode="json")
    return answered_line(request.key, request.custom_id, 200, body)


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
