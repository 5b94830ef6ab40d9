"""Checkpoints of a stage in training: the copy between two steps, the writing beside the next ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bus.connection import Bus
from bus.wire import request_progress as progress
from bus.wire.request_progress import RequestProgress
from schemas.checkpoint import CheckpointOrder, CheckpointTaken, CheckpointWait, CheckpointWritten
from schemas.errors import Conflict, NotFound
from schemas.step import Member
from workers.compute.compute_thread import ComputeThread, Priority
from workers.compute.stage_compute import StageCompute
from workers.process.url_rules import open_url
from workers.state.checkpoint import copy_tensors, write_stage


@dataclass(frozen=True, slots=True)
class _Current:
    """The last order: its answer, and the writing."""

    taken: CheckpointTaken
    writing: asyncio.Task[CheckpointWritten]
    written: RequestProgress


class CheckpointWriter:
    """One at a time: an order for another checkpoint ends the writing of the one before.

    Args:
        bus: where artifacts may lie.
        member: this instance.
        stage_number: its stage.
        thread: the one that trains; it copies the state between two of its tasks.
        stage: what is trained.
        version: steps applied, now.
    """

    def __init__(
        self,
        bus: Bus,
        member: Member,
        stage_number: int,
        thread: ComputeThread,
        stage: StageCompute,
        version: Callable[[], int],
    ) -> None:
        self._bus = bus
        self._member = member
        self._number = stage_number
        self._thread = thread
        self._stage = stage
        self._version = version
        self._current: dict[str, _Current] = {}

    async def take(self, order: CheckpointOrder) -> CheckpointTaken:
        """Copies the state at `order.version`; the writing begins. Idempotent.

        Raises:
            Conflict: the stage has gone on meanwhile.
        """
        if order.url in self._current:
            return self._current[order.url].taken
        await self.close()
        tensors, stall_s = await self._thread.submit(Priority.ORDER, self._copy)
        if self._version() != order.version:
            raise Conflict(f"asked for version {order.version}, but I am at {self._version()}")
        taken = CheckpointTaken(
            member=self._member,
            version=order.version,
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
            stall_ms=stall_s * 1e3,
        )
        written = RequestProgress()  # of whoever waits: this order is answered before
        writing = asyncio.create_task(self._write(order, tensors, written))
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to whoever waits
        self._current[order.url] = _Current(taken, writing, written)
        return taken

    def _copy(self) -> tuple[dict[str, Tensor], float]:
        began = time.perf_counter()
        return copy_tensors(self._stage.module, self._stage.optimizer), time.perf_counter() - began

    async def _write(
        self, order: CheckpointOrder, tensors: dict[str, Tensor], written: RequestProgress
    ) -> CheckpointWritten:
        progress.present.set(written)
        began = time.perf_counter()
        module = self._stage.module
        part = await write_stage(
            await open_url(order.url, self._bus),
            tensors,
            stage=self._number,
            first_layer=module.first_layer,
            last_layer=module.last_layer,
        )
        write_ms = (time.perf_counter() - began) * 1e3
        return CheckpointWritten(member=self._member, version=order.version, part=part, write_ms=write_ms)

    async def wait(self, query: CheckpointWait) -> CheckpointWritten:
        """Returns once it is stored; raises what the writing raised.

        Raises:
            NotFound: nothing was taken for this URL.
            Conflict: it was given up for a newer one.
        """
        current = self._current.get(query.url)
        if current is None:
            raise NotFound(f"no checkpoint was taken for {query.url}")
        progress.follow(current.written)
        try:
            return await asyncio.shield(current.writing)
        except asyncio.CancelledError:
            if current.writing.cancelled():
                raise Conflict(f"the writing of {query.url} was given up") from None
            raise

    async def close(self) -> None:
        """Ends what is being written; its scratch files are gone when this returns."""
        ended, self._current = self._current, {}
        for one in ended.values():
            one.writing.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await one.writing
