"""The section `gap`: a replica is killed while sessions decode."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.command import say
from benchmarks.harness.emptiness import NothingMeasured, some
from benchmarks.harness.figures import percentile
from benchmarks.serving_sections.answers import gap_s, open_at
from benchmarks.serving_sections.rebuilds import (
    RebuildWatch,
    share_of_prefill,
    stage_work,
    watched_rebuilds,
)
from benchmarks.serving_sections.versions import ServingMesh, serving_mesh, version
from dmsc.chaos.holding import Holding
from dmsc.chaos.plan import Every, FaultKind, plan
from dmsc.chaos.report import InjectedFault
from dmsc.chaos.services.load import LoadAnswer, LoadRequest
from dmsc.chaos.services.service_chaos import ask
from schemas.services.model_service import ServedVersion

SECTION = SERVICE = "gap"
SESSIONS, CONTEXT, STAGES, REPLICAS = 10, 1000, 2, 2
PROMPT = 100
CALM_S = 1.5
"""From the return of all replicas until the next kill, plus up to as much again."""
REPORTED_S = 2.5
"""Until all instances have told what they computed."""
WITHIN = 0.05
"""Of a full prefill: what a rebuild may compute beside the lost stage's own part."""


async def gap(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """A replica is killed while ten sessions of a thousand tokens decode: waits, and the rebuild."""
    spec = version(
        SERVICE,
        stages=STAGES,
        replicas=REPLICAS,
        layers=8,
        width=128,
        context=CONTEXT,
        serve={"sessions": 32},
    )
    answers: list[LoadAnswer] = []
    over = asyncio.Event()
    async with serving_mesh() as serving:
        clients = await serving.clients(SESSIONS)

        async def again(number: int) -> None:
            chance = random.Random(options.seed + number)
            while not over.is_set():
                prompt = "".join(chance.choices("abcdefgh (),.:\n", k=PROMPT))
                request = LoadRequest(
                    number=number,
                    prompt=prompt,
                    tokens=CONTEXT - PROMPT - 1,
                    temperature=0.0,
                    seed=0,
                    digests=False,
                )
                answers.append(await ask(clients[number], SERVICE, request))

        async with (
            serving.deployed(spec, STAGES * REPLICAS) as served,
            watched_rebuilds(serving.bus, served.job) as watch,
        ):
            async with asyncio.TaskGroup() as asking:
                for number in range(SESSIONS):
                    asking.create_task(again(number))
                try:
                    faults = await kill(serving, served, options)
                finally:
                    over.set()
            work = stage_work(await serving.chaos.client.job(served.job))
    if wrong := [answer.error for answer in answers if answer.error]:
        raise NothingMeasured(f"{len(wrong)} requests failed: {wrong[0]}", SECTION)
    tell(sheet, Plan(section=SECTION, seed=options.seed, fired=len(faults)), faults, answers, watch, work)


async def kill(
    serving: ServingMesh, served: ServedVersion, options: argparse.Namespace
) -> list[InjectedFault]:
    """Kills one replica after another, each when all are back. Raises `NothingMeasured`: one was missed."""
    chance, faults = random.Random(options.seed), list[InjectedFault]()
    planned = plan(options.seed, Every(seconds=1.0), (FaultKind.INSTANCE,))
    async with Holding(serving.chaos.client, [], say) as holding:
        while len(faults) < options.replica_kills:
            await serving.until_active(served, STAGES * REPLICAS)
            await asyncio.sleep(CALM_S * (1 + chance.random()))
            fault = await serving.chaos.injector.inject(next(planned), served.job, lambda: True, [], holding)
            if not fault.fired:
                raise NothingMeasured(f"kill {len(faults) + 1} did not come about: {fault.missed}", SECTION)
            faults.append(fault)
            say(f"{fault.victim} killed, {len(faults)} of {options.replica_kills}")
            await until_gone(serving, served, fault)
    await serving.until_active(served, STAGES * REPLICAS)
    await asyncio.sleep(REPORTED_S)
    return faults


async def until_gone(serving: ServingMesh, served: ServedVersion, fault: InjectedFault) -> None:
    """Waits until the registry does not take the victim for active any more."""
    while any(  # noqa: ASYNC110  # it is the registry's answer that one waits for
        record.incarnation in fault.incarnations for record in await serving.active(served)
    ):
        await asyncio.sleep(0.05)


def tell(
    sheet: FaultSheet,
    plan: Plan,
    faults: Sequence[InjectedFault],
    answers: Sequence[LoadAnswer],
    watch: RebuildWatch,
    work: Sequence[float],
) -> None:
    """The figures."""
    ends = [fault.at for fault in faults] + [time.time()]
    longest, sessions = [], []
    for at, until in pairwise(ends):
        waits = [gap_s(answer, at, until) for answer in open_at(answers, at)]
        some(waits, "answers that were decoded at a kill", SECTION)
        longest.append(max(waits))
        sessions.append(len(waits))
    usual = [end - begin for answer in answers for begin, end in answer.waits]
    usual_note = f"usual wait {percentile(usual, 0.5):.3f} s"
    note = f"the longest wait of {min(sessions)} to {max(sessions)} sessions at each kill"
    sheet.add(
        plan.at_most("a killed replica, gap p50", percentile(longest, 0.5), "s", 1.0, note),
        plan.at_most("… p95", percentile(longest, 0.95), "s", 2.5, usual_note),
    )
    lost = some(watch.lost, "sessions that got another owner", SECTION)
    recomputed = watch.recomputed(STAGES)
    done, own = share_of_prefill(recomputed, lost, work)
    rows = sum(each.rows for each in lost)
    several = sum(len(each.stages) > 1 for each in lost)
    sheet.add(
        plan.at_most(
            "a rebuild, of a full prefill's work",
            done,
            "×",
            round(own + WITHIN, 3),
            f"{recomputed} rows by stage for {rows} lost ones of {len(lost)} sessions, {several} of which"
            f" lost both stages; the lost stages' own part {own:.3f}",
        )
    )
