"""Instances of a job with `data.preprocess` (draft §7.2(1), ADR-0062): those that answer, and the entry.

`SamplesRuntime` is a data instance, or a function before the last one: it makes samples when it is asked for
them. `PreprocessRuntime` is the last function: gateways dispatch to it, and to the step transaction it is
what a data instance is without the chain.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from bus.subject_row import Subject
from bus.subjects import ADOPT
from bus.tasks import TaskSet
from schemas.data_plane import HopLoad, MicrobatchNotice, RouteTable
from schemas.errors import BadData, PeerUnreachable
from schemas.step import Adopt, Adopted, Member
from schemas.task_graph import UnitKind
from schemas.telemetry import DataFigures
from workers.data.batches import Batch, BatchSource, counted
from workers.data.kinds.feeds import OpenFeed, follow_arrival
from workers.data.preprocessing.chain import BatchMaking, ChainLink
from workers.data.preprocessing.records import Sample
from workers.data.source_files import fetch_uploads
from workers.data.storage import node_cache
from workers.local_store.recorder import Order
from workers.routing.next_hop import Binder
from workers.stage.data_runtime import EntryRuntime, arrival, drawn, open_analysed
from workers.stage.hop_runtime import HopRuntime, InstanceContext
from workers.stage.pulls import Answers, Pulls, Workbench
from workers.transaction.pull_machine import AnsweringMachine, Key, PullMachine

MOST_AHEAD, MOST_BYTES_AHEAD = 64, 1 << 30
"""Batches made ahead, and bytes of all of them, if each is as large as the largest so far."""


class PullingRuntime(HopRuntime):
    """What all units of the chain have in common: they ask the units before them, and work on one thread."""

    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        unit = self.start.unit
        binder = Binder(context.cluster, place=unit.replica, link_cost=lambda peer: self.exchange.cost(peer))
        self.bench = Workbench(f"preprocess-{self.member.sid}")
        self.lasting = TaskSet(self._task_failed)
        """Work that an aborted step does not end: samples stay what they are."""
        self.pulls = Pulls(PullMachine(unit.stage - 1, binder), self.deliver, self.lasting.create)

    async def open_link(self) -> ChainLink:
        """This unit's function, and what works with it."""
        spec, unit = self.start.spec, self.start.unit
        number = len(spec.data.preprocess) + unit.stage
        with ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(prefix="data-", ignore_cleanup_errors=True)
            own = f"data.preprocess[{number}]."
            urls = {key: url for key, url in spec.data.urls().items() if key.startswith(own)}
            fetched = await fetch_uploads(urls, self.bus, Path(stack.enter_context(folder)))
            link = await asyncio.to_thread(ChainLink, spec, number, fetched)
        self.lasting.create(self.bench.run())
        self.lasting.create(self.pulls.look())
        return link

    def offered(self, notice: MicrobatchNotice) -> str:
        return self.pulls.offered(notice) if notice.direction == "records" else super().offered(notice)

    def routed(self, table: RouteTable) -> None:
        if table.stage == self.pulls.machine.stage:
            self.pulls.route(table)
        else:
            super().routed(table)

    async def link_broke(self, peer: Member, error: PeerUnreachable, *, unreachable: bool = False) -> None:
        self.pulls.failed(peer)
        await super().link_broke(peer, error, unreachable=unreachable)

    @property
    def totals(self) -> tuple[float, int]:
        return self.bench.busy_s, 0

    async def close(self) -> None:
        self.lasting.cancel_all()
        await super().close()
        self.bench.close(self.release)

    def release(self) -> None:
        """Releases files, on the thread that reads them."""


class PreprocessRuntime(PullingRuntime, EntryRuntime):
    """The last function of the chain: its samples become batches, which it sends to the first stage."""

    async def build(self) -> None:
        """Opens the function.

        Raises:
            BadData, BadModel: See `open_function`.
        """
        self._feed = await follow_arrival(self.start.spec, self.bus)
        self._link = await self.open_link()
        self._making = BatchMaking(self.start.spec)
        self._ahead: dict[Key, asyncio.Task[tuple[Batch, int]]] = {}
        self._batch_bytes = 1

    async def make(self, step: int, microbatch: int, *, evaluate: bool) -> tuple[Batch, int]:
        ahead = None if evaluate else self._ahead.pop((evaluate, step, microbatch), None)
        if ahead is None or ahead.cancelled():
            return await self._make(step, microbatch, evaluate=evaluate)
        return await ahead

    async def _make(self, step: int, microbatch: int, *, evaluate: bool) -> tuple[Batch, int]:
        split, draw, number = drawn(self.start.spec, step, microbatch, evaluate=evaluate)
        key = (evaluate, draw, microbatch)
        if self._feed is not None and not evaluate:
            await self._arrived(self._feed, step, microbatch)
        samples, replaced = await self.pulls.get(key)
        batch = await self.bench.make(
            key, lambda: self._making.batch(self._link.apply(samples, split, draw, number))
        )
        self._batch_bytes = max(self._batch_bytes, sum(tensor.nbytes for tensor in batch.values()))
        return batch, replaced

    async def _arrived(self, feed: OpenFeed, step: int, microbatch: int) -> None:
        """Waits until records are there: whoever is asked for them would be taken for slow."""
        training = self.start.spec.training
        behind = (step * training.microbatches + microbatch + 1) * training.microbatch_samples
        if not await feed.until(behind):
            raise BadData(f"feed {feed.record.name} ends before step {step}")

    def make_ahead(self, step: int, microbatch: int) -> None:
        key = (False, step, microbatch)
        if key in self._ahead or step >= self.start.spec.training.steps:
            return
        most = min(MOST_AHEAD, max(1, MOST_BYTES_AHEAD // self._batch_bytes))
        if len(self._ahead) >= most:  # as in `Prefetcher`: others took them, or the job went back
            for old in [old for old in self._ahead if abs(old[1] - step) > 1]:
                self._ahead.pop(old).cancel()
        if len(self._ahead) < most:
            task = asyncio.create_task(self._make(step, microbatch, evaluate=False))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to who needs it
            self._ahead[key] = task

    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        if notice.direction == "records":
            self.pulls.received(notice, tensors)
        else:
            super().received(notice, tensors)

    def figures(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "in_flight": self.machine.in_flight,
            "queue": self.bench.waiting,
            "microbatches": self.sent,
            "service_ms": self.bench.service_ms,
            "data": DataFigures(stalled_s=self.stall.seconds),
        }

    async def close(self) -> None:
        for task in self._ahead.values():
            task.cancel()
        await super().close()


class SamplesRuntime(PullingRuntime):
    """Makes samples for the next unit of the chain: of the data, or by a function that is not the last."""

    machine: AnsweringMachine

    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        self.machine = AnsweringMachine(self.member, epoch=self.epoch)
        self.answers = Answers(self.start.unit.stage + 1, self._make, self.deliver, self.lasting.create)
        self._source: BatchSource | None = None
        self._link: ChainLink | None = None

    @property
    def step(self) -> int:
        return self.machine.step

    async def build(self) -> None:
        """Opens the data, or the function.

        Raises:
            BadData, BadModel: See `open_source` and `open_function`.
        """
        if self.start.unit.kind is UnitKind.DATA:
            self._source = await open_analysed(self.start, self.bus)
            self.lasting.create(self.bench.run())
        else:
            self._link = await self.open_link()

    async def _make(self, key: Key) -> tuple[Sequence[Sample], int]:
        evaluate, step, microbatch = key
        place = drawn(self.start.spec, step, microbatch, evaluate=evaluate)
        source, link = self._source, self._link
        if source is not None:
            await arrival(source, *place)
            source.expect(*place)
            return await self.bench.make(key, lambda: counted(source, lambda: source.samples(*place)))
        assert link is not None
        samples, replaced = await self.pulls.get(key)
        return await self.bench.make(key, lambda: link.apply(samples, *place)), replaced

    # --- orders and hops --------------------------------------------------------------------------------
    def orders(self) -> list[tuple[Subject, Order]]:
        return [(ADOPT, self.adopt)]

    async def adopt(self, order: Adopt) -> Adopted:
        """Obeys the epoch of a new leading orchestrator."""
        self._take_epoch(order.epoch)
        return Adopted(member=self.member, version=self.step, attempt=0, generation=-1)

    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        if notice.direction == "records":
            self.pulls.received(notice, tensors)
        else:
            self.answers.asked(notice)

    def run(self, effects: Iterable[Any]) -> None:
        """Nothing: there are no effects."""

    def own_load(self) -> HopLoad:
        return self.answers.load(self.bench.service_ms)

    def figures(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "in_flight": self.answers.in_hand,
            "queue": self.bench.waiting,
            "microbatches": self.answers.sent,
            "service_ms": self.bench.service_ms,
            "replaced": 0 if self._source is None else self._source.replaced,
            "data": None if self._source is None else DataFigures(read_bytes=node_cache.counts.bytes),
        }

    def release(self) -> None:
        if self._source is not None:
            self._source.close()
