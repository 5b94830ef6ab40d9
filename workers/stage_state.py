"""The stage's state in and out: to a newcomer, from a checkpoint or the seed, to the artifact store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from torch import Tensor

from bus.artifacts import open_artifacts
from bus.connection import Bus
from schemas.cluster import InstanceStart
from schemas.step import CheckpointOrder, Exported, ExportOrder, Member, StateReady, StateRestore
from workers.compute import ComputeThread, Priority
from workers.optimizer import load_state_tensors, state_tensors
from workers.stage_compute import StageCompute
from workers.weights import export, load_initial, restore_checkpoint, save_checkpoint

T = TypeVar("T")


class StageState:
    """Which version the stage is at, and how it gets to another one or hands its own on.

    `changed` is called on the event loop after every change of version.
    """

    def __init__(
        self,
        bus: Bus,
        start: InstanceStart,
        member: Member,
        thread: ComputeThread,
        stage: StageCompute,
        changed: Callable[[], None],
    ) -> None:
        self.version = 0
        self._bus = bus
        self._start = start
        self._member = member
        self._thread = thread
        self._stage = stage
        self._changed = changed
        self._moved = asyncio.Condition()

    async def build(self) -> None:
        """Version 0: from the seed, or from the weights that the job names."""
        await self._thread.submit(Priority.ORDER, self._stage.build)
        url = self._start.spec.initial_weights
        if url:
            await load_initial(self._stage.module, open_artifacts(url, self._bus), url, run=self._ordered)

    async def move_to(self, version: int) -> None:
        """The stage is at `version` now; whoever waits for it goes on."""
        async with self._moved:
            self.version = version
            self._moved.notify_all()
        self._changed()

    async def wait_for(self, version: int) -> StateReady:
        """Returns once the stage is at `version`."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.version == version)
        return StateReady(member=self._member, version=self.version)

    async def tensors(self) -> tuple[Tensor, ...]:
        """Parameters and optimizer state in a fixed order, for a newcomer (views: between steps only)."""
        stage = self._stage
        found = await self._thread.submit(
            Priority.ORDER, lambda: state_tensors(stage.module, stage.optimizer)
        )
        return tuple(found)

    async def take(self, version: int, tensors: list[Tensor]) -> None:
        """Takes over what `tensors` gave at another replica."""
        stage = self._stage
        await self._thread.submit(
            Priority.ORDER, lambda: load_state_tensors(stage.module, stage.optimizer, tensors)
        )
        await self.move_to(version)

    async def restore(self, order: StateRestore) -> StateReady:
        """Takes the state of a checkpoint, or builds it again from the seed."""
        stage = self._stage
        if order.checkpoint is None:
            await self.build()
        else:
            artifacts = open_artifacts(order.checkpoint, self._bus)
            await restore_checkpoint(
                stage.module, stage.optimizer, artifacts, order.checkpoint, run=self._ordered
            )
        await self._thread.submit(Priority.ORDER, stage.sum.clear)
        await self.move_to(order.version)
        return StateReady(member=self._member, version=self.version)

    async def checkpoint(self, order: CheckpointOrder) -> Exported:
        """Writes parameters and optimizer state to the artifact store."""
        stage = self._stage
        size = await save_checkpoint(
            stage.module,
            stage.optimizer,
            open_artifacts(order.url, self._bus),
            stage=self._start.unit.stage,
            version=order.version,
            run=self._ordered,
        )
        return Exported(member=self._member, version=self.version, url=order.url, bytes=size)

    async def export(self, order: ExportOrder) -> Exported:
        """Writes the weights as one safetensors shard to the artifact store."""
        artifacts = open_artifacts(order.url, self._bus)
        size, lines = await export(self._stage.module, artifacts, order.shard)
        return Exported(member=self._member, version=self.version, url=order.url, bytes=size, tensors=lines)

    def _ordered(self, work: Callable[[], T]) -> Awaitable[T]:
        return self._thread.submit(Priority.ORDER, work)
