"""The section `exactness`: mixed requests together, cut and killed, beside each one alone."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.command import say
from benchmarks.harness.emptiness import NothingMeasured
from benchmarks.serving_sections.answers import AnswerShares, beside_alone, mixed_requests, open_at
from benchmarks.serving_sections.versions import ServingMesh, serving_mesh, version
from dmsc.chaos.holding import Holding
from dmsc.chaos.injection import fault_line
from dmsc.chaos.plan import Every, FaultKind, plan
from dmsc.chaos.processes import ProcessHandle
from dmsc.chaos.report import InjectedFault
from dmsc.chaos.services.load import LoadAnswer, LoadRequest
from dmsc.chaos.services.service_chaos import ask
from dmsc.client.async_client import AsyncClient
from schemas.job import JobSpec

SECTION = "exactness"
CONTEXT = 128
KINDS = (FaultKind.INSTANCE, FaultKind.GATEWAY, FaultKind.ORCHESTRATOR, FaultKind.SERVER)
CLIENTS = 8
TRIES = 3
"""Faults that are attempted, at most, for each one that is asked for."""


def cut(name: str, stages: int, replicas: int, chunk: int, wave: int) -> tuple[str, JobSpec, int]:
    serve = {"chunk_tokens": chunk, "wave_tokens": wave}
    sizes: dict[str, Any] = {"layers": 4, "width": 64, "context": CONTEXT}
    service = name.replace(" ", "").replace(",", "-").replace("×", "x")
    return name, version(service, stages=stages, replicas=replicas, serve=serve, **sizes), stages * replicas


CUTS = (
    cut("1 × 1", 1, 1, 64, 256),
    cut("2 × 1", 2, 1, 64, 256),
    cut("2 × 2", 2, 2, 64, 256),
    cut("2 × 2, parts", 2, 2, 7, 24),
)


async def exactness(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """Mixed requests, greedy and drawn: cut, together, in parts, and under kills, beside each alone."""
    requests = mixed_requests(options.requests, CONTEXT, options.seed)
    alone: list[LoadAnswer] = []
    async with serving_mesh("--separate", "--orchestrators", "2") as serving:
        clients = await serving.clients(CLIENTS)
        for name, spec, instances in CUTS:
            assert spec.serve is not None
            service = spec.serve.service
            async with serving.deployed(spec, instances):
                if not alone:
                    alone = [await ask(clients[0], service, request) for request in requests]
                    if wrong := [each.error for each in alone if each.error]:
                        raise NothingMeasured(f"{len(wrong)} requests failed without faults: {wrong[0]}")
                together = await asyncio.gather(
                    *(
                        ask(clients[each.number % CLIENTS], service, each)
                        for each in requests  # all of them at once
                    )
                )
                tell(sheet, Plan(section=SECTION), name, beside_alone(together, alone))
        await killed(serving, clients, requests, alone, options, sheet)


def tell(sheet: FaultSheet, plan: Plan, name: str, shares: AnswerShares) -> None:
    """The figures of some answers."""
    tokens = f"{shares.tokens} tokens of {shares.answers} answers"
    digests = f"{shares.digests} known, {shares.unknown} not known any more"
    failed = Counter(shares.failed).most_common(1)
    sheet.add(
        plan.at_least(f"{name}: equal tokens", shares.equal_tokens_percent, "%", 100, tokens),
        plan.at_least(f"{name}: equal digests", shares.equal_digests_percent, "%", 100, digests),
        plan.at_most(f"{name}: tokens lost", shares.lost, "", 0),
        plan.at_most(f"{name}: tokens doubled", shares.doubled, "", 0),
        plan.at_most(
            f"{name}: clients told an error", len(shares.failed), "", 0, failed[0][0] if failed else ""
        ),
    )


async def killed(
    serving: ServingMesh,
    clients: Sequence[AsyncClient],
    requests: Sequence[LoadRequest],
    alone: Sequence[LoadAnswer],
    options: argparse.Namespace,
    sheet: FaultSheet,
) -> None:
    """All requests again and again on 2 × 2, while instances, gateways, orchestrators and the server die."""
    _, spec, instances = CUTS[2]
    assert spec.serve is not None
    spec = spec.model_copy(update={"serve": spec.serve.model_copy(update={"service": "killed"})})
    answers: list[LoadAnswer] = []
    over = asyncio.Event()

    async def again(request: LoadRequest) -> None:
        while not over.is_set():
            answers.append(await ask(clients[request.number % len(clients)], "killed", request))

    async with serving.deployed(spec, instances) as served, asyncio.TaskGroup() as asking:
        for request in requests:
            asking.create_task(again(request))
        try:
            faults = await kill(serving, served.job, options)
        finally:
            over.set()
    kinds = Counter(fault.kind.value for fault in faults)
    struck = [fault for fault in faults if open_at(answers, fault.at)]
    plan_ = Plan(section=SECTION, seed=options.seed, fired=len(faults))
    what = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    sheet.add(
        plan_.at_least("kills that came about", len(faults), "", options.kills, what),
        plan_.at_least("… while answers came", len(struck), "", options.kills),
    )
    tell(sheet, plan_, "killed", beside_alone(answers, alone))


async def kill(serving: ServingMesh, job: str, options: argparse.Namespace) -> list[InjectedFault]:
    """Kills until enough kills came about; returns those, two intervals after the last one.

    Raises:
        NothingMeasured: Too many of them did not.
    """
    chaos, frozen = serving.chaos, list[ProcessHandle]()
    faults: list[InjectedFault] = []
    async with AsyncExitStack() as stack:
        holding = await stack.enter_async_context(Holding(chaos.client, frozen, say))
        await chaos.injector.all_here(job)
        for planned in plan(options.seed, Every(seconds=options.every), KINDS):
            if len(faults) == options.kills:
                break
            if planned.number >= TRIES * options.kills:
                raise NothingMeasured(f"{len(faults)} of {options.kills} kills came about", SECTION)
            await asyncio.sleep(options.every * (0.5 + planned.offset))
            fault = await chaos.injector.inject(planned, job, lambda: True, frozen, holding)
            say(fault_line(fault, f"kill {len(faults) + 1} of {options.kills}", chaos.times.hold_s))
            if fault.fired:
                faults.append(fault)
    await asyncio.sleep(2 * options.every)
    return faults
