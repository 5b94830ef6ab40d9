"""The section `peers`: a served model beside LitServe, and two cores beside one."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import psutil

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.command import say
from benchmarks.harness.emptiness import NothingMeasured, some
from benchmarks.harness.figures import Rates
from benchmarks.harness.processes import turns
from benchmarks.serving_sections.arithmetic import FACTORY, Prompts, config, prompts_of
from benchmarks.serving_sections.pinned import MISSING, STARTED_S, lit_is_installed, lit_server, pin
from benchmarks.serving_sections.versions import ServingMesh, serving_mesh, version
from dmsc.client.async_client import AsyncClient
from schemas.job import JobSpec
from schemas.job_file.model import ModelSpec

SECTION = "peers"
CONTEXT = 256
LIT = {"LitServe": 1, "LitServe, padded batches": 12}
"""Name → requests of one pass."""
BARS = {"LitServe": 1.5, "LitServe, padded batches": 1.5}
STAGES_BAR = 1.4
MANY = 4
"""Times the twelve prompts, all at once: two stages need two waves under way, and half of twelve rows takes
nearly as long as all twelve, since it is the weights that are read."""
MANY_OF_ONE, MANY_OF_TWO = "one, many", "two, many"
UNIT = "tokens/s"

Side = Callable[[Prompts, int], Awaitable[None]]


async def peers(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """Twelve mixed prompts over HTTP, exact: beside LitServe, and two cores beside one; pinned, in turn."""
    cores = some(sorted(os.sched_getaffinity(0)), "cores", SECTION, least=2)
    prompts, rates = prompts_of()["mixed"], Rates()
    spent: dict[str, list[float]] = {"door": [], "client": []}
    async with AsyncExitStack() as stack:
        serving = await stack.enter_async_context(serving_mesh("--separate"))
        (client,) = await serving.clients(1)
        for service, stages in (("one", 1), ("two", 2)):
            spec = llama(service, stages, options)
            served = await stack.enter_async_context(serving.deployed(spec, stages))
            for record in await serving.active(served):
                pin(record.endpoint.pid, cores[(record.stage or 0) % 2])
        sides: dict[str, Side] = {}
        for service, times in (("one", 1), ("two", 1), (MANY_OF_ONE, MANY), (MANY_OF_TWO, MANY)):
            sides[service] = asker(client, service.partition(",")[0], times)
        for name, batch in LIT.items() if lit_is_installed() else ():
            sides[name] = await stack.enter_async_context(lit(options, batch, cores[0]))
        if not lit_is_installed():
            say(f"{MISSING}; the section goes on without it")
        for run in sides.values():
            await run(prompts, 2)  # whatever the first request pays
        for _, name in turns(list(sides), options.rounds):
            door_s, client_s = door_cpu(serving), time.process_time()
            began = time.perf_counter()
            await sides[name](prompts, options.tokens)
            seconds = time.perf_counter() - began
            times = MANY if name in (MANY_OF_ONE, MANY_OF_TWO) else 1
            rates.add(name, times * len(prompts) * options.tokens / seconds)
            if name == MANY_OF_TWO:
                spent["door"].append((door_cpu(serving) - door_s) / seconds)
                spent["client"].append((time.process_time() - client_s) / seconds)
    plan = Plan(section=SECTION)
    for name, bar in BARS.items():
        if name in rates:
            note = rates.note("one", name, UNIT)
            sheet.add(plan.at_least(f"exact ÷ {name}", rates.ratio("one", name), "×", bar, note))
        else:
            sheet.add(plan.figure(f"exact ÷ {name}", None, "×", "LitServe is not installed"))
    few = rates.ratio("two", "one")
    sheet.add(plan.figure("two stages on two cores ÷ one, 12", few, "×", rates.note("two", "one", UNIT)))
    shares = ", ".join(f"{name} {statistics.median(values):.2f}" for name, values in spent.items())
    note = f"{rates.note(MANY_OF_TWO, MANY_OF_ONE, UNIT)}; of a core: {shares}"
    ratio = rates.ratio(MANY_OF_TWO, MANY_OF_ONE)
    sheet.add(plan.at_least(f"… ÷ one, {12 * MANY} prompts at once", ratio, "×", STAGES_BAR, note))


def llama(service: str, stages: int, options: argparse.Namespace) -> JobSpec:
    """A version of the Llama of the section `arithmetic`."""
    spec = version(service, stages=stages, layers=1, width=64, context=CONTEXT)
    model = ModelSpec(factory=FACTORY, args={"config": config(options)})
    return JobSpec.model_validate({**spec.model_dump(mode="json"), "model": model.model_dump(mode="json")})


def door_cpu(serving: ServingMesh) -> float:
    """Seconds of the processor that the gateways have had."""
    file = serving.folder.mesh()
    pids: Iterable[int] = () if file is None else file.children.values()
    names = {} if file is None else {pid: name for name, pid in file.children.items()}
    gateways = [psutil.Process(pid) for pid in pids if names[pid].startswith("gateway")]
    return sum(sum(process.cpu_times()[:2]) for process in gateways)


def asker(client: AsyncClient, service: str, times: int) -> Side:
    """All prompts at once, so many times, greedily."""

    async def ask(prompts: Prompts, tokens: int) -> None:
        answers = await asyncio.gather(
            *(client.complete(service, prompt, tokens=tokens, digests=True) for prompt in [*prompts] * times)
        )
        if any(len(answer.dmsc.digests or ()) != tokens or not answer.dmsc.exact for answer in answers):
            raise NothingMeasured("an answer has fewer tokens, or is not exact", SECTION)

    return ask


@asynccontextmanager
async def lit(options: argparse.Namespace, batch: int, core: int) -> AsyncIterator[Side]:
    """A LitServe server, and asking it all prompts at once. `batch`: requests of one pass."""
    settings = {"kind": "generate", "config": config(options), "batch": batch}
    async with (
        lit_server(settings, {"prompt": [5, 6, 7], "tokens": 1}, core) as url,
        httpx.AsyncClient(timeout=STARTED_S, trust_env=False) as http,
    ):

        async def one(prompt: list[int], tokens: int) -> None:
            response = await http.post(f"{url}/predict", json={"prompt": prompt, "tokens": tokens})
            response.raise_for_status()
            if (count := len(response.json()["tokens"])) != tokens:
                raise NothingMeasured(f"LitServe gave {count} of {tokens} tokens", SECTION)

        async def ask(prompts: Prompts, tokens: int) -> None:
            await asyncio.gather(*(one(prompt, tokens) for prompt in prompts))

        yield ask
