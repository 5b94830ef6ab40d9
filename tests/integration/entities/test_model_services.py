"""Services at a real gateway, authorizer, router and orchestrator; nodes and instances are stand-ins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bus import subjects
from bus.connection import Bus
from dmsc.client.async_client import AsyncClient
from dmsc.commands.services.ramping import ramp
from entities.authorizer import Authorizer
from entities.gateway import Gateway, GatewayConfig
from entities.orchestrator import Orchestrator, OrchestratorConfig
from entities.router.service import Router, RouterConfig
from policies.built_in.canary_judge import CanaryJudge
from policies.module.service import FunctionalModule
from schemas.envelope import EntityKind, Envelope
from schemas.errors import BadInput, BadJob, Conflict, LastingConflict, NotFound, Refused
from schemas.job import JobSpec, JobState, WeightsManifest
from schemas.policy import PolicyDecision
from schemas.services.model_service import ModelService, OrderService, ServiceState, VersionState
from schemas.services.outcomes import AnsweredRequest
from tests.builders.jobs import gpt, job
from tests.builders.services import ended, told_of
from tests.integration.dmsc.command_line import dmsc
from tests.integration.entities.conftest import Dial, Start, end
from tests.integration.entities.serving_agent import ServingAgent
from tests.waiting import eventually


def version(name: str = "v1", *, service: str = "chat", stages: int = 1, **more: object) -> JobSpec:
    document = {"name": "tiny", "model": gpt(), "parallel": {"stages": stages}}
    serve = {"service": service, "version": name, "cache_mib": 1}
    return JobSpec.model_validate({**document, "serve": serve, **more})


@dataclass
class Services:
    """The mesh of a test. `leader`: the task of the orchestrator."""

    url: str
    agent: ServingAgent
    leader: asyncio.Task[None]
    ruth: AsyncClient

    async def until(self, fits: Callable[[ModelService], bool], name: str = "chat") -> ModelService:
        seen: list[ModelService] = []

        async def found() -> ModelService | None:
            seen[:] = [await self.ruth.service(name)]
            return seen[0] if fits(seen[0]) else None

        return await eventually(found, lambda: seen)

    async def ready(self, name: str = "v1") -> ModelService:
        return await self.until(lambda service: state_of(service, name) is VersionState.READY)


def state_of(service: ModelService, name: str) -> VersionState | None:
    found = service.version(name)
    return None if found is None else found.state


async def orchestrator(dial: Dial) -> Orchestrator:
    return Orchestrator(await dial("orchestrator", EntityKind.ORCHESTRATOR), OrchestratorConfig())


@pytest.fixture
async def mesh(dial: Dial, start: Start, authorizer: Authorizer) -> AsyncIterator[Services]:
    await start(Router(await dial("router-a", EntityKind.ROUTER), RouterConfig(cluster="a")))
    leader = await start(await orchestrator(dial))
    gateway = Gateway(await dial("gateway-a", EntityKind.GATEWAY), GatewayConfig(cluster="a", http_port=0))
    await start(gateway)
    agent = ServingAgent(await dial("a-n", EntityKind.CLUSTER), dial)
    await agent.serve()
    assert gateway.url is not None
    async with AsyncClient(gateway.url, token="ruth") as ruth:
        yield Services(gateway.url, agent, leader, ruth)


async def test_versions_come_share_traffic_scale_and_go(mesh: Services) -> None:
    ruth, agent = mesh.ruth, mesh.agent
    with pytest.raises(NotFound, match="no service chat"):
        await ruth.service("chat")
    with pytest.raises(BadJob, match="POST /v1/services"):
        await ruth.submit(version())
    begun = await ruth.deploy(version(stages=2), idempotency_key="once")
    again = await ruth.deploy(version(stages=2), idempotency_key="once")
    assert again.versions[0].job == begun.versions[0].job
    served = await mesh.ready()
    (first,) = served.versions
    assert (served.state, served.weights, served.stable) == (ServiceState.SERVING, {"v1": 10_000}, "v1")
    assert (first.stages, first.replicas, first.kind, first.exact) == (2, (1, 1), "generate", True)
    assert (first.context, first.vocabulary, first.fingerprint) == (64, 256, "f0")
    assert {order.unit.stage for order in agent.started} == {0, 1}, "units of stages alone"
    with pytest.raises(Conflict, match="has a version v1, which is ready"):
        await ruth.deploy(version())
    async with AsyncClient(mesh.url, token="rob") as rob:
        with pytest.raises(Refused, match="ruth's"):
            await rob.deploy(version("v2"))
        with pytest.raises(Refused):
            await rob.set_traffic("chat", {"v1": 10_000})
        assert [each.service for each in await rob.services()] == ["chat"]
    async with AsyncClient(mesh.url, token="vera") as vera:
        with pytest.raises(Refused):
            await vera.deploy(version(service="hers"))

    agent.tells["exact"], agent.tells["inexact_because"] = "false", "width 510"
    await ruth.deploy(version("v2"))
    with pytest.raises(NotFound, match="no version v9"):
        await ruth.promote_version("chat", "v9")
    second = (await mesh.ready("v2")).version("v2")
    assert second is not None
    assert second.exact is False
    assert "width 510" in second.inexact_because
    with pytest.raises(BadInput, match="add up to 9,999"):
        await ruth.set_traffic("chat", {"v1": 9_500, "v2": 499})
    canary = await ruth.set_traffic("chat", {"v1": 9_500, "v2": 500}, why="5 %")
    with pytest.raises(Conflict, match="look again"):
        await ruth.set_traffic("chat", {"v2": 10_000}, expected=canary.revision - 1)
    assert (await ruth.promote_version("chat", "v2")).weights == {"v2": 10_000}
    back = await ruth.roll_back_service("chat", why="capitals" * 100)
    assert (back.weights, back.history[-1].by) == ({"v1": 10_000}, "ruth")
    assert back.history[-1].why == ("capitals" * 100)[:500]

    await ruth.scale_version("chat", "v2", 2)
    states: list[VersionState] = []
    wide = await ruth.wait_for_version(
        "chat", "v2", replicas=2, poll_s=0.01, progress=lambda seen: states.append(seen.state)
    )
    assert (wide.replicas, set(states)) == ((2,), {VersionState.READY})
    assert (await ruth.wait_for_version("chat")).version == "v1", "the stable one, unless another is named"
    await ruth.scale_version("chat", "v2", 1)
    await mesh.until(lambda service: service.versions[1].replicas == (1,))
    await ruth.scale_version("chat", "v2", 0)
    await mesh.until(lambda service: state_of(service, "v2") is VersionState.IMPAIRED)
    await eventually(lambda: not any(sid.startswith(second.job) for sid in agent.instances))
    await ruth.scale_version("chat", "v2", 1)
    await mesh.ready("v2")

    with pytest.raises(Conflict, match="v1 gets 100 % of the traffic"):
        await ruth.stop_service("chat", "v1")
    assert state_of(await ruth.stop_service("chat", "v2"), "v2") is VersionState.RETIRED
    stopped = await ruth.stop_service("chat")
    assert (stopped.state, stopped.weights) == (ServiceState.STOPPED, {})
    await eventually(lambda: not agent.instances)
    assert (await ruth.job(first.job)).ends_as is JobState.CANCELLED
    waits = asyncio.create_task(ruth.wait_for_version("chat", "v1", replicas=3))
    with pytest.raises(LastingConflict, match="chat@v1 is retired"):
        await waits


async def test_what_dies_comes_again_and_a_new_orchestrator_adopts(
    mesh: Services, dial: Dial, start: Start
) -> None:
    ruth, agent = mesh.ruth, mesh.agent
    name = (await ruth.deploy(version(stages=2))).versions[0].job
    await mesh.ready()
    lost = agent.instances[f"{name}-s1-r0"].record.incarnation
    await agent.kill(f"{name}-s1-r0")
    await mesh.until(lambda service: agent.instances.get(f"{name}-s1-r0") is not None)
    assert agent.instances[f"{name}-s1-r0"].record.incarnation != lost
    await mesh.ready()
    assert (await mesh.ruth.service("chat")).weights == {"v1": 10_000}

    living = {sid: presence.record.incarnation for sid, presence in agent.instances.items()}
    await end(mesh.leader)
    await start(await orchestrator(dial))
    await agent.tell()

    async def adopted() -> bool:
        record = await ruth.job(name)
        return record.epoch == 2 and record.state is JobState.RUNNING

    await eventually(adopted)
    assert {sid: each.record.incarnation for sid, each in agent.instances.items()} == living
    assert state_of(await mesh.ready(), "v1") is VersionState.READY
    with pytest.raises(Conflict, match="serves as version v1 of service chat"):
        await ruth.recut(name)
    await agent.kill(f"{name}-s0-r0")
    await eventually(lambda: f"{name}-s0-r0" in agent.instances)
    await mesh.ready()


async def test_a_drained_node_loses_its_instance_once_the_successor_answers(
    mesh: Services, dial: Dial
) -> None:
    name = (await mesh.ruth.deploy(version())).versions[0].job
    await mesh.ready()
    before = (await mesh.ruth.job(name)).history
    async with AsyncClient(mesh.url, token="olga") as olga:
        await olga.drain("a-n")
        with pytest.raises(Conflict, match="serves as version v1"):
            await olga.move(name, f"{name}-s0-r0", 0)
        assert list(mesh.agent.instances) == [f"{name}-s0-r0"], "there is no room elsewhere: it stays"
        other = ServingAgent(await dial("b-n", EntityKind.CLUSTER), dial, "b-n")
        await other.serve()
        await eventually(lambda: not mesh.agent.instances)
    assert list(other.instances) == [f"{name}-s0-r1"]
    served = await mesh.until(lambda service: service.versions[0].replicas == (1,))
    assert served.versions[0].state is VersionState.READY
    assert (await mesh.ruth.job(name)).history == before, "it was never without an instance"


async def test_weights_of_a_job_are_served_for_whoever_may_read_them(mesh: Services, dial: Dial) -> None:
    writer = await dial("an-earlier-one", EntityKind.ORCHESTRATOR)
    url = "bus://artifacts/j00000a/weights"
    made = WeightsManifest(url=url, shards=(), tensors={}, bytes=0, sha256="5ca1e", step=2)
    for record in (
        job("j00000a", JobState.DONE, user="ruth", weights=made),
        job("j00000b", JobState.RUNNING, user="ruth"),
    ):
        await writer.bucket(subjects.JOB_RECORD).put(record, job=record.job)
    of_a = version(initial_weights="job:j00000a")

    async def known() -> bool:
        try:
            return bool(await mesh.ruth.job("j00000b"))
        except NotFound:
            return False

    await eventually(known)
    async with AsyncClient(mesh.url, token="rob") as rob:
        with pytest.raises(Refused, match="only what is theirs"):
            await rob.deploy(of_a)
    with pytest.raises(BadJob, match="job j00000b is running and has no weights"):
        await mesh.ruth.deploy(version(initial_weights="job:j00000b"))
    with pytest.raises(NotFound, match="no job j00000c"):
        await mesh.ruth.deploy(version(initial_weights="job:j00000c"))
    others = {"service": "chat", "tokenizer": "bus://code/0123"}
    with pytest.raises(BadJob, match="tokenizer: bus://code/0123 is code"):
        await mesh.ruth.deploy(version(serve=others))
    await mesh.ruth.deploy(of_a)
    served = (await mesh.ready()).versions[0]
    assert served.weights == url
    assert mesh.agent.started[0].spec.weights_url == url


async def test_a_version_that_does_not_start_is_refused_and_gets_nothing(mesh: Services) -> None:
    ruth, agent = mesh.ruth, mesh.agent
    await ruth.deploy(version())
    await mesh.ready()
    agent.fails = "weights do not fit: head.weight is missing"
    await ruth.deploy(version("v2"))
    with pytest.raises(LastingConflict, match=r"chat@v2 is refused: .*head\.weight is missing"):
        await ruth.wait_for_version("chat", "v2")
    refused = await ruth.service("chat")
    assert "head.weight is missing" in refused.versions[1].reason
    with pytest.raises(NotFound, match="service chat has no version v9; it has v1, v2"):
        await ruth.wait_for_version("chat", "v9")
    assert refused.weights == {"v1": 10_000}
    with pytest.raises(Conflict, match="v2 of chat is refused"):
        await ruth.promote_version("chat", "v2")
    agent.fails = ""
    await ruth.deploy(version("v2"))
    await mesh.ready("v2")
    await ruth.promote_version("chat", "v2")
    await ruth.cancel((await ruth.service("chat")).versions[1].job)
    back = await mesh.until(lambda service: state_of(service, "v2") is VersionState.RETIRED)
    assert back.weights == {"v1": 10_000}, "as it came, it goes back"


async def test_a_version_that_did_not_start_from_zero_is_tried_again_by_the_next_request(
    mesh: Services, dial: Dial
) -> None:
    ruth, agent = mesh.ruth, mesh.agent
    asked = await dial("gateway-b", EntityKind.GATEWAY)
    wake = OrderService(user="ruth", service="chat", action="wake", version="v1")
    shape = {"stages": 1, "replicas": {"min": 0, "want": 1, "max": 2}}
    serve = {"service": "chat", "cache_mib": 1, "scale": {"idle_s": 1}}
    await ruth.deploy(version(parallel=shape, serve=serve))
    idle = await mesh.until(lambda service: state_of(service, "v1") is VersionState.IDLE)
    await eventually(lambda: not agent.instances)
    assert (await ruth.wait_for_version("chat")).state is VersionState.IDLE, "it is deployed"
    job_name = idle.versions[0].job

    async def is_parked() -> bool:
        record = await ruth.job(job_name)
        return record.state is JobState.PARKED and not record.held

    agent.fails = "the driver is gone"
    await asked.command(subjects.ORDER_SERVICE, wake)
    await eventually(is_parked)
    agent.fails = ""
    await asked.command(subjects.ORDER_SERVICE, wake)
    assert (await mesh.ready()).versions[0].replicas == (1,)


async def test_a_round_of_learning_says_in_one_line_why_it_does_not_begin(
    mesh: Services, tmp_path: Path
) -> None:
    await mesh.ruth.deploy(version())
    await mesh.ready()
    training: dict[str, Any] = {"name": "round", "model": gpt(), "training": {"steps": 1}}
    serving = {"name": "round", "model": gpt(), "serve": {"service": "chat"}}
    for document, words in ((serving, "give a file that trains one job"), (training, "keeps nothing")):
        (tmp_path / "learn.yaml").write_text(json.dumps(document))
        command = ("service", "learn", "chat", "learn.yaml", "--gateway", mesh.url, "--token", "ruth")
        done = await asyncio.to_thread(dmsc, *command, cwd=tmp_path)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
        assert len(done.stderr.splitlines()) == 1


async def test_a_replica_of_other_arithmetic_leaves_where_exactness_is_required(mesh: Services) -> None:
    ruth, agent = mesh.ruth, mesh.agent
    serve = {"service": "chat", "cache_mib": 1, "exact": "required"}
    name = (await ruth.deploy(version(serve=serve))).versions[0].job
    await mesh.ready()
    agent.tells["fingerprint"] = "f1"
    await ruth.scale_version("chat", "v1", 2)
    async for event in ruth.events(name):
        if "computes other bits" in event.text:
            break
    await eventually(lambda: list(agent.instances) == [f"{name}-s0-r0"])
    left = await mesh.until(lambda service: service.versions[0].fingerprint == "f0")
    assert (left.versions[0].exact, left.versions[0].state) == (True, VersionState.READY)


@dataclass
class Judged:
    """A service of two versions that share its traffic, and a gateway that tells how requests end.

    `decisions`: the orchestrator's, about suggestions to have a version go back.
    """

    mesh: Services
    bus: Bus
    service: ModelService
    decisions: list[PolicyDecision]

    @property
    def candidate(self) -> str:
        """The job of v2."""
        return self.service.versions[1].job

    async def tell(self, *requests: AnsweredRequest) -> None:
        told = told_of(self.service, *requests, gateway="gateway-b", worse_nll={"v2": 0.05})
        await self.bus.publish(subjects.SERVICE_OUTCOMES, told, gateway="gateway-b")

    async def decision(self) -> PolicyDecision:
        """The next one."""
        await eventually(lambda: self.decisions)
        return self.decisions.pop(0)


@pytest.fixture
async def judged(mesh: Services, dial: Dial) -> Judged:
    for name in ("v1", "v2"):
        await mesh.ruth.deploy(version(name))
        await mesh.ready(name)
    service = await mesh.ruth.set_traffic("chat", {"v1": 5_000, "v2": 5_000}, why="try v2")
    bus = await dial("gateway-b", EntityKind.GATEWAY)
    decisions: list[PolicyDecision] = []

    async def hear(message: PolicyDecision, envelope: Envelope) -> None:
        decisions.append(message)

    await (await dial("listener")).subscribe(subjects.POLICY_DECISION, hear)
    return Judged(mesh, bus, service, decisions)


async def test_a_version_that_fails_its_first_requests_goes_back_without_any_module(judged: Judged) -> None:
    ruth = judged.mesh.ruth
    failing = [*(ended("v1") for _ in range(30)), *(ended("v2", ok=False) for _ in range(8))]
    await ruth.automation(judged.candidate, "advise")
    await judged.tell(*failing)
    advice = await judged.decision()
    assert (advice.module, advice.adopted, advice.job) == ("orchestrator", False, judged.candidate)
    assert advice.reason.startswith("advice, would have been passed on: v2: 5 of its first 5 requests failed")
    assert (await ruth.service("chat")).weights == {"v1": 5_000, "v2": 5_000}

    await ruth.automation(judged.candidate, "act")
    judged.service = await ruth.set_traffic("chat", {"v1": 6_000, "v2": 4_000})
    await judged.tell(ended("v1"))
    done = await judged.decision()
    assert done.adopted, done.reason
    back = await judged.mesh.until(lambda service: service.weights == {"v1": 10_000})
    change = back.history[-1]
    assert (change.by, change.action) == ("orchestrator", "rollback")
    assert "0 of 30 of the stable version in the same time" in change.why
    assert [(run.version, run.first, run.end) for run in back.runs] == [("v1", 0, 10_000)]
    assert state_of(back, "v2") is VersionState.READY, "it may be tried again"
    async for event in ruth.events(judged.candidate):
        if event.kind == "policy" and "of its first" in event.text:
            break
    else:
        pytest.fail("the events of the version's job do not say it")


async def test_a_slow_version_goes_back_by_the_canary_judge(judged: Judged, dial: Dial, start: Start) -> None:
    module = FunctionalModule(await dial("canary-judge", EntityKind.FUNCTIONAL_MODULE), CanaryJudge())
    await start(module)
    draw = np.random.default_rng(8)
    times = np.exp(draw.normal(-1.0, 1.0, 400))
    slower = np.where(np.arange(400) % 2, 3.0, 1.0)
    for first in range(0, 400, 50):
        await judged.tell(
            *(
                ended(f"v{1 + at % 2}", first_token_s=float(times[at] * slower[at]))
                for at in range(first, first + 50)
            )
        )
    done = await judged.decision()
    assert (done.module, done.adopted, done.job) == ("canary-judge", True, judged.candidate), done.reason
    back = await judged.mesh.until(lambda service: service.weights == {"v1": 10_000})
    change = back.history[-1]
    assert (change.by, change.action) == ("canary-judge", "rollback")
    assert "first token after" in change.why
    assert "if it were no worse" in change.why


async def test_a_new_leader_goes_on_counting(judged: Judged, dial: Dial, start: Start) -> None:
    """Of what gateways have told since the last change of traffic."""
    await judged.tell(*(ended("v1") for _ in range(30)), *(ended("v2", ok=False) for _ in range(4)))
    await end(judged.mesh.leader)
    await start(await orchestrator(dial))
    await judged.mesh.agent.tell()
    await judged.mesh.ready("v2")
    await judged.tell(ended("v2", ok=False), ended("v2"))
    back = await judged.mesh.until(lambda service: service.weights == {"v1": 10_000})
    assert "5 of its first 5 requests failed, 0 of 30" in back.history[-1].why


async def test_a_share_grows_in_steps_until_somebody_takes_it_back(mesh: Services) -> None:
    ruth = mesh.ruth
    for name in ("v1", "v2"):
        await ruth.deploy(version(name))
        await mesh.ready(name)
    seen: list[dict[str, int]] = []

    async def pause() -> None:
        if len(seen) == 5:
            await ruth.roll_back_service("chat", why="answers in capitals")

    def done(service: ModelService) -> None:
        seen.append(service.weights)

    grown = await ramp(ruth, "chat", "v2", (100, 2_500, 10_000), pause, done=done)
    assert seen == [{"v1": 9_900, "v2": 100}, {"v1": 7_500, "v2": 2_500}, {"v2": 10_000}]
    assert (grown.stable, grown.history[-1].why) == ("v1", "step 3 of 3")
    with pytest.raises(Conflict, match=r"v2 of chat stays at 0 %, after 5 %: ruth: answers in capitals"):
        await ramp(ruth, "chat", "v2", (100, 500, 2_500), pause, done=done)
    with pytest.raises(BadInput, match="v1 has no stable version beside it"):
        await ramp(ruth, "chat", "v1", (100,), pause)
