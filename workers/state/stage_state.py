"""The stage's state in and out: to a newcomer, from a checkpoint or the seed, to the artifact store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from torch import Tensor

from bus.connection import Bus
from bus.files.artifacts import Artifacts
from bus.logs import get_logger
from bus.subject_row import Subject
from bus.subjects import CHECKPOINT, CHECKPOINT_WAIT, EXPORT, PUBLISH_FILE, STATE_WAIT
from bus.wire import request_progress
from bus.wire.request_progress import in_thread
from schemas.checkpoint import CheckpointOrder, CheckpointTaken, CheckpointWait, CheckpointWritten
from schemas.cluster import InstanceStart
from schemas.errors import Ack, BadModel, Conflict, NotFound
from schemas.files import PublishFile
from schemas.step import Exported, ExportOrder, Member, StateReady, StateRestore, StateWait
from workers.compute.compute_thread import ComputeThread
from workers.compute.optimizer import state_tensors
from workers.compute.stage_compute import StageCompute
from workers.local_store.recorder import Order
from workers.models.hugging_face_folder import (
    folder_files,
    is_adapter,
    library_names,
    public_names,
    stand_ins,
    written_names,
)
from workers.process.url_rules import open_url
from workers.state.checkpoint import restore_checkpoint
from workers.state.checkpoint_writer import CheckpointWriter
from workers.state.initial_weights import load_initial
from workers.state.publishing import Publisher
from workers.state.weights import export, page_of

log = get_logger("instance")


class StageState:
    """The stage's version, and the ways to change it or to pass its state on.

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
        self._sending = 0
        self._files: tuple[str, ...] = ()
        self._exports: dict[tuple[str, str, int], tuple[int, dict[str, str]]] = {}
        self._loading = asyncio.Lock()  # first come, first served, so that redos follow their state
        self.checkpoints = CheckpointWriter(
            bus, member, start.unit.stage, thread, stage, lambda: self.version
        )
        self.publisher = Publisher(bus, f"{start.spec.artifacts.rstrip('/')}/{start.job}")

    async def build(self) -> None:
        """Builds version 0 from the seed, or from the weights that the job names."""
        source = self._start.spec.initial_weights
        model = self._start.spec.model
        is_new = is_adapter(model)  # adapters begin as new ones
        strict = source is not None and source.strict  # then the files have all others, or it is an error
        given = (lambda name: not is_new(name)) if strict else None
        await self._thread.order(partial(self._stage.build, given=given))
        if source is not None:
            artifacts = await open_url(source.url, self._bus)
            await load_initial(
                self._stage.module,
                artifacts,
                source,
                run=self._thread.order,
                public_name=public_names(model),
                is_new=is_new,
                own_names_of=library_names(model),
                stand_ins=stand_ins(model),
            )

    async def move_to(self, version: int) -> None:
        """Sets the version and wakes all waiters."""
        async with self._moved:
            self.version = version
            self._moved.notify_all()
        self._changed()

    async def notify(self) -> None:
        """Wakes all waiters after a change that left the version as it is."""
        async with self._moved:
            self._moved.notify_all()

    async def until(self, reached: Callable[[], bool], patience_s: float) -> None:
        """Returns once `reached()` is true, tested after every change, or after `patience_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s), self._moved:
                await self._moved.wait_for(reached)

    @contextlib.asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Open while the state is being sent to a newcomer; `sent` waits for its end."""
        self._sending += 1
        try:
            yield
        finally:
            self._sending -= 1
            await self.notify()

    async def sent(self) -> None:
        """Returns once no transfer of the present weights is under way: only then may they change."""
        async with self._moved:
            await self._moved.wait_for(lambda: not self._sending)

    async def wait_for(self, version: int, within_s: float | None = None) -> StateReady:
        """Returns once the stage is at `version`.

        Raises:
            Conflict: The stage is not at it after `within_s` seconds.
        """
        try:
            async with asyncio.timeout(within_s), self._moved:
                await self._moved.wait_for(lambda: self.version == version)
        except TimeoutError:
            raise Conflict(
                f"version {version} is not here after {within_s:g} s, but version {self.version}"
            ) from None
        return StateReady(member=self._member, version=self.version)

    async def wait(self, order: StateWait) -> StateReady:
        """Answers once this instance holds the state of `order.version`."""
        request_progress.follow(self._thread.computed)  # which only takes over the state
        return await self.wait_for(order.version, order.within_s)

    async def tensors(self) -> tuple[Tensor, ...]:
        """Parameters and optimizer state in a fixed order, for a newcomer (views: between steps only)."""
        stage = self._stage
        return tuple(await self._thread.order(lambda: state_tensors(stage.module, stage.optimizer)))

    async def take(
        self, version: int, tensors: list[Tensor], still_needed: Callable[[], bool] = lambda: True
    ) -> None:
        """Loads another replica's `tensors()`, if `still_needed()` is still true when its turn comes."""
        async with self._loading:
            if not still_needed():
                return
            await self._thread.order(lambda: self._stage.load(version, tensors))
            await self.move_to(version)

    async def redo(
        self,
        step: int,
        gradients: Sequence[Tensor],
        still_needed: Callable[[], bool] = lambda: True,
        learning_rate: float | None = None,
    ) -> None:
        """Applies a step that another replica has applied; ignores one that is not the next step."""
        async with self._loading:
            if step != self.version or not still_needed():
                return
            await self._thread.order(lambda: self._stage.redo(step, gradients, learning_rate))
            await self.move_to(step + 1)

    async def snapshot(self) -> tuple[int, list[Tensor]]:
        """The version, and a copy of its state in host memory."""
        return await self._thread.order(self._stage.snapshot)

    async def restore(self, order: StateRestore) -> StateReady:
        """Loads the state of a checkpoint, or builds it again from the seed.

        Raises:
            DamagedCheckpoint, Conflict: The checkpoint can't be used; nothing was changed.
        """
        stage = self._stage
        request_progress.follow(self._thread.computed)
        await self.checkpoints.close()
        async with self._loading:
            if order.checkpoint is None:
                await self.build()
            else:
                artifacts = await open_url(order.checkpoint, self._bus)
                await restore_checkpoint(
                    stage.module, stage.optimizer, artifacts, version=order.version, run=self._thread.order
                )
            await self._thread.order(lambda: stage.restored(order.version))
            await self.move_to(order.version)
        return StateReady(member=self._member, version=self.version)

    # --- to the artifact store --------------------------------------------------------------------------
    def orders(self) -> list[tuple[Subject, Order]]:
        """The orders about files, and the wait for a version, which it obeys, and their handlers."""
        return [
            (STATE_WAIT, self.wait),
            (CHECKPOINT, self.checkpoint),
            (CHECKPOINT_WAIT, self.checkpoint_written),
            (PUBLISH_FILE, self.publish),
            (EXPORT, self.export),
        ]

    async def checkpoint(self, order: CheckpointOrder) -> CheckpointTaken:
        """Copies parameters and optimizer state at `order.version`; training goes on during the write."""
        self.check_version(order.version)
        return await self.checkpoints.take(order)

    async def checkpoint_written(self, query: CheckpointWait) -> CheckpointWritten:
        """Answers once this stage's part of a checkpoint is in the artifact store."""
        return await self.checkpoints.wait(query)

    async def publish(self, order: PublishFile) -> Ack:
        """Writes a checkpoint's manifest, or the list of the weights, once all its parts have arrived."""
        return await self.publisher.take(order)

    def check_version(self, version: int) -> None:
        """Raises `Conflict` if the stage is at another version."""
        if version != self.version:
            raise Conflict(f"asked for version {version}, but I am at {self.version}")

    async def export(self, order: ExportOrder) -> Exported:
        """Writes the weights as one safetensors shard to the artifact store; or returns the next page of
        the written tensors.

        Raises:
            NotFound: The shard was not written.
            Conflict: The stage is at another version.
        """
        self.check_version(order.version)
        key = (order.url, order.shard, self.version)
        model = self._start.spec.model
        if not order.after:
            artifacts = await open_url(order.url, self._bus)
            averaged = self._stage.optimizer.exported
            written = await export(self._stage.module, artifacts, order.shard, written_names(model), averaged)
            self._exports = {key: written}
            self._files = await self._files_beside(artifacts)
        if key not in self._exports:
            raise NotFound(f"{order.shard} of version {self.version} was not written below {order.url}")
        size, lines = self._exports[key]
        page = lines if order.after is None else page_of(lines, order.after)
        more = bool(page) and max(page) < max(lines)
        called = written_names(model)
        return Exported(
            member=self._member,
            version=self.version,
            url=order.url,
            bytes=size,
            tensors=page,
            more=more,
            names={name: called(name) for name in page if called(name) != name},
            files=self._files,
        )

    async def _files_beside(self, artifacts: Artifacts) -> tuple[str, ...]:
        """Writes what makes the weights a folder of their library's own; the first stage does it."""
        if self._start.unit.stage != 0:
            return ()
        try:
            files = await in_thread(lambda: folder_files(self._start.spec.model))
            for name, content in files.items():
                await artifacts.put_bytes(name, content)
        except BadModel as error:  # the weights are there: they count without a config, too
            log.warning("weights without their config", job=self._start.job, reason=error.text)
            return ()
        return tuple(files)
