"""DMSC's side: processes that make batches as data instances do, and send them over tensor links to a stage.

python -m benchmarks.data_sides.product TASK              the stage
python -m benchmarks.data_sides.product TASK URL NUMBER   one that makes batches
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.data_sides.task import Answer, Task, cpu_seconds, take, unique_bytes
from benchmarks.harness.meshes import new_folder
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from bus.wire import secret_urls
from schemas.data_plane import MicrobatchNotice
from schemas.envelope import EntityKind
from schemas.job import JobSpec
from schemas.step import Member
from workers.data.opening import open_source
from workers.data.prefetch import Prefetcher
from workers.data.storage import node_cache
from workers.links.hop_exchange import HopExchange
from workers.links.offers import TensorTransfer

JOB = "benchmark"
STAGE = Member(sid="stage", incarnation="1")
IN_FLIGHT, AHEAD = 4, 8


def steps_of(task: Task) -> int:
    """Steps of an epoch: one microbatch of each worker is a step."""
    return task.count // (task.workers * task.samples)


def spec_of(task: Task) -> JobSpec:
    source = task.folder
    if task.endpoint:
        options = f"key=bench&secret=benchbench&endpoint_url={task.endpoint}"
        secret_urls.learn(json.dumps({"bench/s3": f"s3://{task.bucket}#{options}"}))
        source = "secret://bench/s3"
    return JobSpec.model_validate(
        {
            "name": "bench",
            "model": {"factory": "workers.models.gpt:byte_gpt"},
            "data": {"kind": "shards", "source": source, "validation_fraction": 0, "last": "drop"},
            "training": {"steps": 1, "microbatches": task.workers, "microbatch_samples": task.samples},
        }
    )


def make_in_child(task: Task, number: int, orders: Connection) -> None:
    """A process that makes batches; it is told the bus's address, to begin, and to end."""
    asyncio.run(make(task, orders.recv(), number, orders))


async def make(task: Task, url: str, number: int, orders: Connection) -> None:
    """Makes the microbatches of one worker, and sends them."""
    torch.set_num_threads(1)
    if task.endpoint:
        node_cache.grant(Path(task.cache), f"bench-{number}")
        Path(task.cache, "limit").write_text(str(1 << 40))  # noqa: ASYNC240  # nothing runs yet
    member = Member(sid=f"data-{number}", incarnation="1")
    async with (
        Bus.connect(url, name=member.sid, kind=EntityKind.INSTANCE) as bus,
        HopExchange(
            bus,
            member=member,
            job=JOB,
            epoch=0,
            decide=lambda notice: "accepted",
            received=lambda notice, tensors: None,
        ) as exchange,
    ):
        source = await open_source(spec_of(task), bus)
        prefetcher = Prefetcher(source)
        orders.send("ready")
        await asyncio.to_thread(orders.recv)
        places = asyncio.Semaphore(IN_FLIGHT)

        async def send(step: int, tensors: Sequence[Tensor]) -> None:
            transfer = TensorTransfer(
                direction="forward", receiver=STAGE, stage=0, step=step, microbatch=number, tensors=tensors
            )
            await exchange.send(transfer)
            places.release()

        last = task.epochs * steps_of(task)
        for step in range(min(last, AHEAD)):
            prefetcher.expect("train", step, number)
        async with asyncio.TaskGroup() as tasks:
            for step in range(last):
                if step + AHEAD < last:
                    prefetcher.expect("train", step + AHEAD, number)
                batch, _ = await prefetcher.get("train", step, number)
                await places.acquire()
                tasks.create_task(send(step, tuple(batch.values())))
        prefetcher.close()
        await asyncio.to_thread(orders.recv)


async def stage(task: Task, makers: Sequence[tuple[int, Connection]]) -> Answer:
    """Receives all batches of all epochs from the makers, each its process id and what it is told by."""
    torch.set_num_threads(1)
    ends: list[float] = []
    seen = 0
    done = asyncio.Event()
    each = steps_of(task) * task.workers

    def received(notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        nonlocal seen
        assert len(tensors[0]) == task.samples
        take(tensors)
        seen += 1
        if seen == 1:
            ends.append(time.perf_counter())
        if seen % each == 0:
            ends.append(time.perf_counter())
        if seen == each * task.epochs:
            done.set()

    with new_folder() as folder:
        async with (
            EmbeddedServer(folder, sync_always=False) as server,
            Bus.connect(server.url, name=STAGE.sid, kind=EntityKind.INSTANCE) as bus,
        ):
            await bus.provision()
            async with HopExchange(
                bus, member=STAGE, job=JOB, epoch=0, decide=lambda notice: "accepted", received=received
            ):
                for _, orders in makers:
                    orders.send(server.url)
                for _, orders in makers:
                    await asyncio.to_thread(orders.recv)
                began, before_s = time.perf_counter(), time.process_time()
                for _, orders in makers:
                    orders.send("go")
                await done.wait()
                taking_s = time.process_time() - before_s
                processes = [process for process, _ in makers]
                memory, cpu_s = unique_bytes(processes), cpu_seconds(processes)
                for _, orders in makers:
                    orders.send("end")
    counts = [each - 1, *[each] * (task.epochs - 1)]
    rates = [
        count * task.samples / (end - start)
        for count, (start, end) in zip(counts, itertools.pairwise(ends), strict=True)
    ]
    first_s = ends[0] - began
    return Answer(rates=rates, first_s=first_s, memory_bytes=memory, cpu_s=cpu_s, taking_cpu_s=taking_s)


def main() -> None:
    task = Task.of(sys.argv[1])
    context = multiprocessing.get_context("fork")
    makers = []
    for number in range(task.workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=make_in_child, args=(task, number, theirs), daemon=True)
        process.start()
        assert process.pid is not None
        makers.append((process.pid, ours))
    answer = asyncio.run(stage(task, makers))
    print(answer.text())


if __name__ == "__main__":
    main()
