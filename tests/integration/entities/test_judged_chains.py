"""What a node agent says of its instances (ADR-0082): real bus, real processes, and samples of the test."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

from bus import subjects
from entities.cluster.config import ChainConfig, ClusterTimes
from schemas.cluster import InstanceStart
from schemas.fault import ClusterReport
from schemas.leadership import Leadership
from schemas.telemetry import InstanceSample
from tests.integration.entities.cluster_mesh import Mesh, job_name, stand_in_mesh, start
from tests.patience import NEVER_S
from tests.waiting import beside, eventually

Say = Callable[..., Awaitable[None]]


async def test_chains_that_stand_still_or_lag_are_judged(tmp_path: Path) -> None:
    async with stand_in_mesh(tmp_path) as mesh:
        await judged(mesh)


async def only_the_newest_word_is_told(mesh: Mesh, slow: InstanceStart, say: Say) -> None:
    """While nobody takes reports, a slow instance becomes well, and slow again."""
    before = len(mesh.smo.heard.all(ClusterReport))
    mesh.smo.refused = refused = []

    def told(condition: str) -> bool:
        return any((each.sid, each.condition) == (slow.unit.sid, condition) for each in refused)

    counts = itertools.count(1_000_000)
    for service_ms, condition in ((5.0, "well"), (900.0, "underperforming")):

        async def live(service_ms: float = service_ms) -> None:
            for count in counts:
                await say(slow, service_ms=service_ms, microbatches=count, computed=count)
                await asyncio.sleep(0.05)

        async with beside(live()):
            await eventually(lambda condition=condition: told(condition), f"said to be {condition}")
    mesh.smo.refused = None

    def taken() -> list[str]:
        heard = mesh.smo.heard.all(ClusterReport)[before:]
        return [each.condition for each in heard if each.sid == slow.unit.sid]

    await eventually(lambda: bool(taken()), "told again")
    assert set(taken()) == {"underperforming"}


async def judged(mesh: Mesh) -> None:
    """§5.5: an instance's samples, as it sends them, are what its node's agent judges it by."""
    chains = ChainConfig(stalled_least_s=0.3, silent_s=NEVER_S, confirm=2)
    times = ClusterTimes(chain_check_s=0.05)
    job = job_name()
    async with mesh.agent("judging", chains=chains, times=times) as agent:
        stuck, slow = start(job, slot=0, cost_ms=20.0), start(job, slot=1, stage=1, cost_ms=20.0)
        for order in (stuck, slow):
            await mesh.smo.start("judging-n", order)

        async def say(order: InstanceStart, **figures: object) -> None:
            place = {"cluster": "judging", "node": "n", "stage": order.unit.stage, "step": 1}
            sid = order.unit.sid
            sample = InstanceSample.model_validate(
                {"job": job, "sid": sid, "incarnation": order.incarnation, **place, **figures}
            )
            await mesh.smo.bus.publish(subjects.INSTANCE_SAMPLE, sample, job=job, sid=sid)

        async def live() -> None:
            for count in itertools.count():
                await say(stuck, computed=1, microbatches=1, queue=3, computing_ms=9.0)
                late = {"service_ms": 900.0, "microbatches": count, "computed": count}
                links = [{"peer": "far", "errors": 1}, {"peer": "near", "sent_bytes": 8}]
                await say(slow, **late, in_flight=1, waits_for=[stuck.unit.sid], links=links)
                await asyncio.sleep(0.05)

        async with beside(live()):
            said = [
                await mesh.smo.heard.first(
                    ClusterReport, lambda m, o=order, k=kind: m.sid == o.unit.sid and m.kind == k
                )
                for order, kind in ((stuck, "structural"), (slow, "transient"))
            ]
            assert [(each.condition, each.scope) for each in said] == [
                ("stalled", "instance"),
                ("underperforming", "instance"),
            ]
            assert said[0].chain.broken, "dependencies that stand still with it"
            assert said[0].chain.stage == 0
            assert said[1].slowness > 3
            conditions = ["stalled", "underperforming"]
            status = await mesh.smo.status(
                "judging-n", lambda s: [slot.condition for slot in s.slots[:2]] == conditions
            )
            assert status.slots[1].performance < 0.4
            judgement = await mesh.smo.judge("judging-n", stuck)
            found = (judgement.process, judgement.condition, judgement.scope)
            assert found == ("running", "stalled", "instance")
            assert judgement.kind == "structural"
            assert judgement.waiting == (slow.unit.sid,)
            judgement = await mesh.smo.judge("judging-n", slow)
            assert judgement.condition == "underperforming"
            assert judgement.broken == (f"{slow.unit.sid} -> far: its links there fail",)
            before = len(mesh.smo.heard.all(ClusterReport))
            another = Leadership(incarnation="i2", term=2, lease_s=1.0)
            await mesh.smo.bus.publish(subjects.LEADER, another)
            await eventually(lambda: len(mesh.smo.heard.all(ClusterReport)) >= before + 2, "told again")
        await only_the_newest_word_is_told(mesh, slow, say)
        await mesh.smo.stop("judging-n", stuck, now=True)
        over = await mesh.smo.heard.first(
            ClusterReport, lambda m: m.sid == stuck.unit.sid and m.condition == "well"
        )
        assert over.evidence == f"{stuck.unit.sid} has ended"
        await mesh.smo.stop("judging-n", slow, now=True)
        left = await mesh.smo.status(
            "judging-n",
            lambda s: (
                [(slot.condition, slot.busy_with) for slot in s.slots[:2]]
                == [("", None), ("underperforming", None)]
            ),
        )
        assert left.slots[1].performance < 0.4, "the slot stays slow for a while"
        assert agent.fork_server_pid is not None
