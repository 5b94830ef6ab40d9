"""The section `peers`: served over HTTP beside LitServe, and two stages on two cores beside one process on one."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import socket
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx
import psutil

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.command import say
from benchmarks.harness.emptiness import NothingMeasured
from benchmarks.harness.processes import child, turns
from benchmarks.serving_sections.arithmetic import FACTORY, Prompts, config, prompts_of
from benchmarks.serving_sections.versions import ServingMesh, serving_mesh, version
from dmsc.client.async_client import AsyncClient
from schemas.job import JobSpec
from schemas.job_file.model import ModelSpec

SECTION = "peers"
CONTEXT = 256
STARTED_S = 90.0
LIT = {"LitServe": 1, "LitServe, padded batches": 12}
"""Name → requests of one pass."""
BARS = {"LitServe": 1.5, "LitServe, padded batches": 1.5}
STAGES_BAR = 1.4

Side = Callable[[Prompts, int], Awaitable[None]]


@dataclass
class Rates:
    """Tokens of answers per second, of each round."""

    found: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, one: str, other: str) -> float:
        """The median over rounds."""
        return statistics.median(
            mine / its for mine, its in zip(self.found[one], self.found[other], strict=True)
        )

    def note(self, one: str, other: str) -> str:
        mine, its = (statistics.median(self.found[name]) for name in (one, other))
        return f"{mine:.1f} and {its:.1f} tokens/s"


async def peers(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """Twelve mixed prompts over HTTP, exact: beside LitServe, and on two cores beside one; pinned, in turn."""
    if (cores := sorted(os.sched_getaffinity(0))) and len(cores) < 2:
        raise NothingMeasured("one core: two are needed", SECTION)
    prompts, rates = prompts_of()["mixed"], Rates()
    spent: dict[str, list[float]] = {"door": [], "client": []}
    async with AsyncExitStack() as stack:
        serving = await stack.enter_async_context(serving_mesh(separate=True))
        (client,) = await serving.clients(1)
        for service, stages in (("one", 1), ("two", 2)):
            served = await stack.enter_async_context(serving.deployed(llama(service, stages, options), stages))
            for record in await serving.active(served):
                pin(record.endpoint.pid, cores[(record.stage or 0) % 2])
        sides: dict[str, Side] = {service: asker(client, service) for service in ("one", "two")}
        for name, batch in LIT.items() if importlib.util.find_spec("litserve") else ():
            sides[name] = await stack.enter_async_context(lit(options, batch, cores[0]))
        if len(sides) == 2:
            say("LitServe is not installed: pip install 'dmsc[bench-serving]'; the section goes on without it")
        for run in sides.values():
            await run(prompts, 2)  # whatever the first request pays
        for _, name in turns(list(sides), options.rounds):
            door_s, client_s = door_cpu(serving), time.process_time()
            began = time.perf_counter()
            await sides[name](prompts, options.tokens)
            seconds = time.perf_counter() - began
            rates.found.setdefault(name, []).append(len(prompts) * options.tokens / seconds)
            if name == "two":
                spent["door"].append((door_cpu(serving) - door_s) / seconds)
                spent["client"].append((time.process_time() - client_s) / seconds)
    plan = Plan(section=SECTION)
    for name, bar in BARS.items():
        if name in rates.found:
            sheet.add(plan.at_least(f"exact ÷ {name}", rates.ratio("one", name), "×", bar, rates.note("one", name)))
        else:
            sheet.add(plan.figure(f"exact ÷ {name}", None, "×", "LitServe is not installed"))
    shares = ", ".join(f"{name} {statistics.median(values):.2f}" for name, values in spent.items())
    note = f"{rates.note('two', 'one')}; of a core: {shares}"
    sheet.add(plan.at_least("two stages on two cores ÷ one", rates.ratio("two", "one"), "×", STAGES_BAR, note))


def llama(service: str, stages: int, options: argparse.Namespace) -> JobSpec:
    """A version of the Llama of the section `arithmetic`."""
    spec = version(service, stages=stages, layers=1, width=64, context=CONTEXT)
    model = ModelSpec(factory=FACTORY, args={"config": config(options)})
    return JobSpec.model_validate({**spec.model_dump(mode="json"), "model": model.model_dump(mode="json")})


def pin(pid: int, core: int) -> None:
    """Keep all threads of a process on one core."""
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, {core})


def door_cpu(serving: ServingMesh) -> float:
    """Seconds of the processor that the gateways have had."""
    file = serving.mesh.running.folder.mesh()
    pids: Iterable[int] = () if file is None else file.children.values()
    names = {} if file is None else {pid: name for name, pid in file.children.items()}
    gateways = [psutil.Process(pid) for pid in pids if names[pid].startswith("gateway")]
    return sum(sum(process.cpu_times()[:2]) for process in gateways)


def asker(client: AsyncClient, service: str) -> Side:
    """All prompts at once, greedily."""

    async def ask(prompts: Prompts, tokens: int) -> None:
        answers = await asyncio.gather(
            *(client.complete(service, prompt, tokens=tokens, digests=True) for prompt in prompts)
        )
        if any(len(answer.dmsc.digests or ()) != tokens or not answer.dmsc.exact for answer in answers):
            raise NothingMeasured("an answer has fewer tokens, or is not exact", SECTION)

    return ask


@asynccontextmanager
async def lit(options: argparse.Namespace, batch: int, core: int) -> AsyncIterator[Side]:
    """A LitServe server, and asking it all prompts at once. `batch`: requests of one pass."""
    port = free_port()
    settings = json.dumps({"config": config(options), "batch": batch})
    async with (
        child("-m", "benchmarks.serving_sections.lit_server", str(port), settings),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=STARTED_S, trust_env=False) as http,
    ):

        async def one(prompt: list[int], tokens: int) -> int:
            response = await http.post("/predict", json={"prompt": prompt, "tokens": tokens})
            response.raise_for_status()
            found = response.json()
            if len(found["tokens"]) != tokens:
                raise NothingMeasured(f"LitServe gave {len(found['tokens'])} tokens", SECTION)
            return int(found["pid"])

        async def ask(prompts: Prompts, tokens: int) -> None:
            await asyncio.gather(*(one(prompt, tokens) for prompt in prompts))

        async with asyncio.timeout(STARTED_S):
            while True:
                try:
                    pin(await one([5, 6, 7], 1), core)
                    break
                except (httpx.TransportError, httpx.HTTPStatusError):
                    await asyncio.sleep(0.2)
        yield ask


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
