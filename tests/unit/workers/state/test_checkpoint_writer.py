"""The copy between two steps, the writing beside the next ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
import torch

from bus.files.artifacts import open_artifacts
from bus.wire import request_progress
from bus.wire.request_progress import RequestProgress
from schemas.checkpoint import CheckpointOrder, CheckpointWait
from schemas.errors import Conflict, NotFound
from schemas.job_file.recipe import OptimizerSpec
from schemas.step import Member
from tests.builders.jobs import gpt_model
from workers.compute.compute_thread import ComputeThread, Priority
from workers.compute.model import build
from workers.compute.optimizer import StageOptimizer
from workers.graph.stage_module import slice_stage
from workers.state import checkpoint_files
from workers.state.checkpoint_files import read_folder, write_folder
from workers.state.checkpoint_writer import CheckpointWriter

SPEC = gpt_model()


class Bench:
    """A stage on its compute thread, and a writer whose disk is as slow as the test wants."""

    def __init__(self, compute: ComputeThread, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        module = slice_stage(build(SPEC, 0), 0, 4)
        self.stage = SimpleNamespace(module=module, optimizer=StageOptimizer(module, OptimizerSpec()))
        self.compute = compute
        self.folder = folder
        self.version = 3
        self.disk = threading.Event()
        self.writing = threading.Event()
        self.writers: list[threading.Thread] = []

        def slow_write(*given: Any) -> Any:
            self.writers.append(threading.current_thread())
            self.writing.set()
            self.disk.wait(10)
            return write_folder(*given)

        monkeypatch.setattr(checkpoint_files, "write_folder", slow_write)
        self.writer = CheckpointWriter(
            cast(Any, None),
            Member(sid="s", incarnation="i"),
            0,
            compute,
            cast(Any, self.stage),
            lambda: self.version,
        )

    def order(self, name: str) -> CheckpointOrder:
        return CheckpointOrder(job="j", epoch=1, version=3, url=str(self.folder / name))

    def query(self, name: str) -> CheckpointWait:
        return CheckpointWait(job="j", epoch=1, url=str(self.folder / name))

    def train(self) -> None:
        with torch.no_grad():
            for _, weight in self.stage.module.trainable():
                weight.add_(1)


@pytest_asyncio.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    async with ComputeThread() as compute:
        yield Bench(compute, tmp_path, monkeypatch)


async def test_training_goes_on_while_the_state_as_it_was_is_written(bench: Bench) -> None:
    before = {name: weight.detach().clone() for name, weight in bench.stage.module.trainable()}
    taken = await bench.writer.take(bench.order("a"))
    assert taken.version == 3
    assert taken.bytes > 3 * sum(weight.numel() * 4 for weight in before.values())
    assert taken.stall_ms > 0
    await asyncio.to_thread(bench.writing.wait, 10)
    await bench.compute.submit(Priority.ORDER, bench.train)  # runs, though the disk does not answer
    assert await bench.writer.take(bench.order("a")) == taken, "a repeated order takes nothing anew"
    waiting = asyncio.create_task(bench.writer.wait(bench.query("a")))
    bench.disk.set()
    written = await waiting
    assert await bench.writer.wait(bench.query("a")) == written
    assert threading.main_thread() not in bench.writers
    assert bench.compute._thread not in bench.writers
    assert (written.part.first_layer, written.part.last_layer) == (0, 4)
    assert await open_artifacts(str(bench.folder / "a"), None).list() == [
        "stage-00000/.metadata",
        "stage-00000/__0_0.distcp",
    ]
    found = read_folder(bench.folder / "a" / "stage-00000", before.__contains__, "it")
    assert all(torch.equal(found[name], before[name]) for name in before)


async def test_a_copy_that_comes_too_late_is_refused(bench: Bench) -> None:
    async def commit() -> None:
        await bench.compute.submit(Priority.ORDER, bench.train)
        bench.version = 4

    committing = asyncio.create_task(commit())
    await asyncio.sleep(0)  # it is queued before the copy
    with pytest.raises(Conflict, match="asked for version 3, but I am at 4"):
        await bench.writer.take(bench.order("a"))
    await committing
    with pytest.raises(NotFound):
        await bench.writer.wait(bench.query("a"))


async def test_a_newer_order_ends_the_one_before(bench: Bench) -> None:
    await bench.writer.take(bench.order("a"))
    await asyncio.to_thread(bench.writing.wait, 10)
    waiting = asyncio.create_task(bench.writer.wait(bench.query("a")))
    await asyncio.sleep(0)
    bench.disk.set()
    await bench.writer.take(bench.order("b"))
    with pytest.raises(Conflict, match="was given up"):
        await waiting
    assert (await bench.writer.wait(bench.query("b"))).part.files
    assert not (bench.folder / "a").exists()


async def test_who_waits_for_a_checkpoint_hears_of_the_progress_of_its_writing(bench: Bench) -> None:
    """The order that began it was answered long before."""
    ordered, waited = RequestProgress(), RequestProgress()

    async def order() -> None:
        request_progress.present.set(ordered)
        await bench.writer.take(bench.order("a"))

    async def wait() -> None:
        request_progress.present.set(waited)
        await bench.writer.wait(bench.query("a"))

    await asyncio.create_task(order())
    waiting = asyncio.create_task(wait())
    await asyncio.to_thread(bench.writing.wait, 10)
    begun = waited.so_far
    bench.disk.set()
    await waiting
    assert waited.so_far > begun
    assert ordered.so_far == 0
