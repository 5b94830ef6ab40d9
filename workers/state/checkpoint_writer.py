"""Checkpoints of a stage in training: copied between two steps, written during the next ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bus.connection import Bus
from bus.tasks import cancel
from bus.wire import request_progress as progress
from bus.wire.request_progress import RequestProgress
from schemas.checkpoint import CheckpointOrder, CheckpointTaken, CheckpointWait, CheckpointWritten
from schemas.errors import Conflict, NotFound
from schemas.step import Member
from workers.compute.compute_thread import ComputeThread
from workers.compute.stage_compute import StageCompute
from workers.process.url_rules import open_url
from workers.state.checkpoint import copy_tensors, write_stage


@dataclass(frozen=True, slots=True)
class _Current:
    """The last order: its answer, and the task that writes it."""

    taken: CheckpointTaken
    writing: asyncio.Task[CheckpointWritten]
    progress: RequestProgress


class CheckpointWriter:
    """Writes one checkpoint at a time: an order for another one ends the write of the previous one.

    Args:
        bus: The bus, on which artifacts may be stored.
        member: This instance.
        stage_number: Its stage.
        thread: The thread that trains; it copies the state between two of its tasks.
        stage: The trained stage.
        version: Returns the number of applied steps.
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
        """Copies the state at `order.version` and begins to write it. Idempotent.

        Raises:
            Conflict: The stage has changed its version meanwhile.
        """
        if order.url in self._current:
            return self._current[order.url].taken
        await self.close()
        tensors, stall_s = await self._thread.order(self._copy)
        if self._version() != order.version:
            raise Conflict(f"asked for version {order.version}, but I am at {self._version()}")
        taken = CheckpointTaken(
            member=self._member,
            version=order.version,
            bytes=sum(tensor.nbytes for tensor in tensors.values()),
            stall_ms=stall_s * 1e3,
        )
        write_progress = RequestProgress()  # for `wait`, since this order is answered before the write ends
        writing = asyncio.create_task(self._write(order, tensors, write_progress))
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())  # `wait` raises it
        self._current[order.url] = _Current(taken, writing, write_progress)
        return taken

    def _copy(self) -> tuple[dict[str, Tensor], float]:
        began = time.perf_counter()
        return copy_tensors(self._stage.module, self._stage.optimizer), time.perf_counter() - began

    async def _write(
        self, order: CheckpointOrder, tensors: dict[str, Tensor], write_progress: RequestProgress
    ) -> CheckpointWritten:
        progress.present.set(write_progress)
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
        """Returns once the checkpoint is stored; raises the error of the write.

        Raises:
            NotFound: No checkpoint was taken for this URL.
            Conflict: The write was given up for a newer checkpoint.
        """
        current = self._current.get(query.url)
        if current is None:
            raise NotFound(f"no checkpoint was taken for {query.url}")
        progress.follow(current.progress)
        try:
            return await asyncio.shield(current.writing)
        except asyncio.CancelledError:
            if current.writing.cancelled():
                raise Conflict(f"the writing of {query.url} was given up") from None
            raise

    async def close(self) -> None:
        """Ends the write under way; its temporary files are removed when this returns."""
        open_orders, self._current = self._current, {}
        await cancel(*(order.writing for order in open_orders.values()))
