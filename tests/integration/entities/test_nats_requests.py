"""Requests at a gateway by the bus, and observations by both ways."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from bus import subjects
from bus.connection import Bus
from entities.authorizer import Authorizer
from entities.gateway import Gateway, GatewayConfig
from entities.service_registry.service import ServiceRegistry
from schemas.envelope import EntityKind, Envelope
from schemas.errors import BadInput, BadJob, NotFound, Refused
from schemas.gateway_api import DoorRequest, JobList, MeshStatus
from schemas.job import JobState
from schemas.module_status import ModuleAnswer, ModuleQuestion
from schemas.observation import Observation
from schemas.plans import MakePlan, PlanBody, PlanMade
from schemas.registry import InstanceState
from tests.builders.jobs import spec
from tests.integration.entities.conftest import Dial, Heard, Start, bearer
from tests.integration.entities.gateway_answers import check_problem, submit
from tests.integration.entities.stand_in_orchestrator import StandInOrchestrator
from tests.patience import PATIENCE_S


async def knock(bus: Bus, action: str, token: str = "ruth", **more: Any) -> Any:
    request = DoorRequest(token=token, action=action, **more)
    return await bus.command(subjects.DOOR, request, deadline_s=PATIENCE_S, action=action.replace(".", "-"))


async def test_the_nats_door_does_the_same(gateway: Gateway, dial: Dial, smo: StandInOrchestrator) -> None:
    bus = await dial("client")
    submitted = await knock(bus, "job.submit", spec=spec())
    assert isinstance(submitted, JobList)
    (record,) = submitted.jobs
    assert smo.causes[0] is not None, "the client's own command, by which a repetition is recognised"
    assert [r.job for r in (await knock(bus, "job.list", "vera")).jobs] == [record.job]
    assert (await knock(bus, "job.read", "vera", job=record.job)).jobs == submitted.jobs
    mesh = await knock(bus, "mesh.read", "vera")
    assert isinstance(mesh, MeshStatus)
    (cancelled,) = (await knock(bus, "job.cancel", job=record.job)).jobs
    assert cancelled.state is JobState.CANCELLED


async def test_the_nats_door_refuses_in_one_line(gateway: Gateway, dial: Dial) -> None:
    bus = await dial("client")
    with pytest.raises(Refused, match="unknown token"):
        await knock(bus, "job.list", "wrong")
    with pytest.raises(Refused, match=r"viewer vera may not job\.submit"):
        await knock(bus, "job.submit", "vera", spec=spec())
    with pytest.raises(BadInput, match=r"mesh\.destroy: unknown action; there are job\.submit"):
        await knock(bus, "mesh.destroy")
    with pytest.raises(BadInput, match="spec: missing"):
        await knock(bus, "job.submit")
    with pytest.raises(BadInput, match="job: missing"):
        await knock(bus, "job.read")
    with pytest.raises(NotFound, match="there is no job nothing"):
        await knock(bus, "job.read", job="nothing")


async def test_a_gateway_without_a_port_has_only_the_nats_door(
    dial: Dial, start: Start, authorizer: Authorizer, registry: ServiceRegistry, smo: StandInOrchestrator
) -> None:
    service = Gateway(await dial("gateway-west", EntityKind.GATEWAY), GatewayConfig(cluster="west"))
    await start(service)
    assert service.url is None
    record = registry.core.record("gateway-west")
    assert record is not None
    assert (record.endpoint.address, record.state) == ("", InstanceState.ACTIVE)
    assert isinstance(await knock(await dial("client"), "job.list"), JobList)


LINK = {"source": "fabric", "what": "link", "about": "n1-n2", "values": {"utilisation": 0.93}}


async def test_observations_are_let_in_from_who_may_and_reach_the_modules(
    http: httpx.AsyncClient, dial: Dial
) -> None:
    """Draft §4.2, Figure 2: REST ingestion; Type 3 as for everything else."""
    module = await dial("congestion", EntityKind.FUNCTIONAL_MODULE)
    heard = await Heard.on(module, subjects.OBSERVATION)
    job = await submit(http, "ruth")
    posted = await http.post("/v1/observations", json={"observations": [LINK, LINK]}, headers=bearer("olga"))
    assert (posted.status_code, posted.json()["note"]) == (202, "2 taken")
    ours = {"observations": [{**LINK, "job": job}]}
    assert (await http.post("/v1/observations", json=ours, headers=bearer("ruth"))).status_code == 202
    seen = await heard.until(lambda one: one.job == job)
    assert (seen.user, seen.values) == ("ruth", {"utilisation": 0.93})
    assert [one.user for one in heard.messages] == ["olga", "olga", "ruth"]
    check_problem(await http.post("/v1/observations", json=ours, headers=bearer("rob")), 403, "refused")
    about_all = {"observations": [LINK]}
    check_problem(await http.post("/v1/observations", json=about_all, headers=bearer("ruth")), 403, "refused")
    check_problem(await http.post("/v1/observations", json=about_all), 401, "refused")
    bad = {"observations": [{**LINK, "values": {"utilisation": "much"}}]}
    body = check_problem(
        await http.post("/v1/observations", json=bad, headers=bearer("olga")), 422, "bad_input"
    )
    assert "observations[0].values.utilisation: 'much' does not fit" in body["detail"]
    assert len(heard.messages) == 3


async def test_observations_come_by_the_nats_door_too(gateway: Gateway, dial: Dial) -> None:
    client = await dial("script", EntityKind.CLIENT)
    heard = await Heard.on(client, subjects.OBSERVATION)
    request = DoorRequest(token="olga", action="observation.write", observations=(Observation(**LINK),))
    assert (await client.command(subjects.DOOR, request, action="observation-write")).note == "1 taken"
    assert (await heard.until()).user == "olga"
    denied = request.model_copy(update={"token": "vera"})
    with pytest.raises(Refused):
        await client.command(subjects.DOOR, denied, action="observation-write")
    for action in ("policy.ask", "policy.order"):
        with pytest.raises(BadInput, match="module: missing"):
            await client.command(subjects.DOOR, DoorRequest(token="olga", action=action), action="policy")


async def test_a_plan_is_asked_for_by_the_nats_door_too(gateway: Gateway, dial: Dial) -> None:
    client, orchestrator = await dial("script"), await dial("orchestrator", EntityKind.ORCHESTRATOR)
    asked: list[MakePlan] = []

    async def make(message: MakePlan, envelope: Envelope) -> PlanMade:
        asked.append(message)
        raise BadJob("needs 2 slots, 1 of 1 free")

    await orchestrator.serve(subjects.MAKE_PLAN, make)
    with pytest.raises(BadJob, match="needs 2 slots, 1 of 1 free"):
        await knock(client, "plan.make", plan_body=PlanBody(job=spec(), like="j1"))
    assert (asked[0].user, asked[0].question.like) == ("ruth", "j1")
    with pytest.raises(BadInput, match="plan_body: missing"):
        await knock(client, "plan.make")


async def test_a_request_that_is_said_again_through_another_gateway_is_not_done_again(
    gateway: Gateway, dial: Dial, start: Start
) -> None:
    """By a client that heard no answer, or by who overheard it: the same envelope, the same tokens."""
    west = Gateway(await dial("gateway-west", EntityKind.GATEWAY), GatewayConfig(cluster="west"))
    await start(west)
    client = await dial("script", EntityKind.CLIENT)
    heard = await Heard.on(client, subjects.OBSERVATION)
    request = DoorRequest(token="olga", action="observation.write", observations=(Observation(**LINK),))
    envelope = Envelope(
        type=request.wire_type,
        version=request.wire_version,
        id="script-1",
        sent_at=1.0,
        sender=client.sender,
        body={},
    )
    answers = await asyncio.gather(
        *(one.nats_door.answer(request, envelope) for one in (gateway, west, gateway))
    )
    assert [answer.note for answer in answers] == ["1 taken"] * 3
    with pytest.raises(Refused):
        await west.nats_door.answer(request.model_copy(update={"token": "vera"}), envelope)
    other = request.model_copy(update={"observations": (Observation(**LINK | {"what": "rack"}),)})
    with pytest.raises(BadInput, match="it came with another request before"):
        await west.nats_door.answer(other, envelope)
    last = envelope.model_copy(update={"id": "script-2"})
    await west.nats_door.answer(other, last)
    await heard.until(lambda one: one.what == "rack")
    assert [one.what for one in heard.messages] == ["link", "rack"]


async def test_a_module_is_asked_over_http(http: httpx.AsyncClient, dial: Dial) -> None:
    module = await dial("congestion", EntityKind.FUNCTIONAL_MODULE)

    async def answer(message: ModuleQuestion, envelope: Envelope) -> ModuleAnswer:
        return ModuleAnswer(module="congestion", version="1", state="active", job=message.job, reason="calm")

    await module.serve(subjects.MODULE_QUESTION, answer, module="congestion", version="active")
    asked = await http.post("/v1/policies/congestion/questions", json={"job": "j1"}, headers=bearer("ruth"))
    assert (asked.status_code, asked.json()["reason"]) == (200, "calm")
    for who, path, status, code in (
        ("vera", "congestion", 403, "refused"),
        ("ruth", "another", 404, "not_found"),
        ("ruth", "a.b", 404, "not_found"),
    ):
        response = await http.post(f"/v1/policies/{path}/questions", json={"job": "j1"}, headers=bearer(who))
        check_problem(response, status, code)
    order = {"op": "drain"}
    check_problem(
        await http.post("/v1/policies/congestion/orders", json=order, headers=bearer("ruth")), 403, "refused"
    )
