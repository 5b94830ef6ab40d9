"""Arrays at a real gateway, authorizer and orchestrator, without nodes: all members wait, and count."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bus import subjects
from dmsc.client.async_client import AsyncClient
from entities.authorizer.access.access_policy import default_text
from entities.service_registry.service import ServiceRegistry
from schemas.arrays import JobArray
from schemas.envelope import EntityKind
from schemas.errors import BadInput, BadJob, Conflict, NotFound, OverQuota, Refused
from schemas.gateway_api import DoorRequest
from schemas.job import ArrayPlace, JobSpec, JobState
from schemas.names import is_array
from tests.builders.jobs import job, spec
from tests.integration.entities.conftest import Dial, Start, mesh_without_nodes
from tests.patience import PATIENCE_S
from tests.waiting import eventually

SEED = "training.seed"
QUOTAS = """
quotas:
  - {name: small, users: [rob], jobs: 2, slots: 5}
"""


@pytest.fixture
async def url(dial: Dial, start: Start, registry: ServiceRegistry, tmp_path: Path) -> str:
    access = default_text().partition("\nquotas:")[0] + QUOTAS
    users = {"ruth": "researcher", "rob": "researcher", "olga": "operator"}
    await leave_half_an_array(dial)
    return await mesh_without_nodes(dial, start, tmp_path, access, users)


@pytest.fixture
async def ruth(url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url, token="ruth") as client:
        yield client


async def leave_half_an_array(dial: Dial) -> None:
    """As an orchestrator leaves it that died before the first member's record was written."""
    bus = await dial("an-earlier-one", EntityKind.ORCHESTRATOR)
    for index in (1, 2):
        place = ArrayPlace(array="r000001", index=index, size=3)
        fields: dict[str, Any] = {"epoch": 1, "history": ("queued: submitted",), "user": "ruth"}
        record = job(f"r000001_{index}", JobState.QUEUED, array=place, **fields)
        await bus.bucket(subjects.JOB_RECORD).put(record, job=record.job)


def seeds(count: int, **more: Any) -> JobSpec:
    return spec(name="lr", array={"count": count} | more)


async def test_an_array_is_submitted_once_shown_and_cancelled_as_one(url: str, ruth: AsyncClient) -> None:
    made = await ruth.submit_array(seeds(40, limit=3), idempotency_key="once")
    assert is_array(made.array)
    assert (made.size, made.limit, len(made.members)) == (40, 3, 40)
    again = await ruth.submit_array(seeds(40, limit=3), idempotency_key="once")
    assert again.array == made.array
    assert len(await ruth.jobs()) == 40, "and none of what was submitted by half"
    record = await ruth.job(f"{made.array}_7")
    assert record.array == ArrayPlace(array=made.array, index=7, size=40, limit=3, values={SEED: 7})
    assert (record.spec.name, record.spec.training.seed, record.spec.array) == ("lr-07", 7, None)

    async with AsyncClient(url, token="rob") as rob:
        with pytest.raises(Refused, match="only what is theirs"):
            await rob.cancel_array(made.array)
        assert (await rob.array(made.array)).size == 40
    parked = await ruth.park_array(made.array, reason="later")
    assert parked.note == "parked or held: 40 of 40 jobs"
    assert (await ruth.job(f"{made.array}_0")).held == "parked by ruth: later"
    assert (await ruth.resume_array(made.array)).note == "may go on: 40 of 40 jobs"
    with pytest.raises(Conflict, match="only a parked one can be resumed"):
        await ruth.resume_array(made.array)
    await ruth.cancel(f"{made.array}_0")
    with pytest.raises(Conflict, match=f"{made.array}_0 (has already ended|is ending)"):
        await ruth.prioritise(f"{made.array}_0", 1)
    assert (await ruth.prioritise_array(made.array, 4)).note == "priority 4: 39 of 40 jobs"
    async with AsyncClient(url, token="olga") as olga:
        assert (await olga.cancel_array(made.array)).note == "cancelled: 40 of 40 jobs"

    async def ended() -> bool:
        return (await ruth.array(made.array)).states == {"cancelled": 40}

    await eventually(ended)
    with pytest.raises(Conflict, match=f"array {made.array} has already ended"):
        await ruth.cancel_array(made.array)


async def test_a_person_gives_a_job_another_class(url: str, ruth: AsyncClient) -> None:
    """It is kept in the record beside the job file, and told with who said it."""
    made = await ruth.submit(spec(queue={"priority": 2}))
    async with AsyncClient(url, token="rob") as rob:
        with pytest.raises(Refused, match="only what is theirs"):
            await rob.prioritise(made.job, 9)
    with pytest.raises(BadInput, match="priority"):
        await ruth.prioritise(made.job, 1001)
    async with AsyncClient(url, token="olga") as olga:
        with pytest.raises(NotFound, match="no job j000000"):
            await olga.prioritise("j000000", 1)
        record = await olga.prioritise(made.job, 7)
    assert (record.spec.queue.priority, record.priority, record.priority_in_force) == (2, 7, 7)
    async for event in ruth.events(made.job):
        if event.kind == "policy":
            assert event.text == "priority: 2 → 7 by olga"
            break
    assert (await ruth.job(made.job)).priority_in_force == 7


async def test_all_or_nothing(url: str, ruth: AsyncClient) -> None:
    with pytest.raises(BadJob, match=r"array: member 1 \(training.optimizer.lr=-1\)"):
        await ruth.submit_array(spec(array={"values": {"training.optimizer.lr": [0.1, -1]}}))
    with pytest.raises(BadJob, match="submit_array takes it"):
        await ruth.submit(seeds(2))
    with pytest.raises(BadJob, match="a file of one job is submitted with POST /v1/jobs"):
        await ruth.submit_array(spec())
    other = {"values": {"data.source": ["stdlib:", "bus://datasets/nobodys"], SEED: [1, 2]}}
    with pytest.raises(BadJob, match="code/x is code"):
        await ruth.submit_array(spec(array={"values": {"data.source": ["stdlib:", "bus://code/x"]}}))
    for unknown in ("r000000", "r000001", "j000000_1"):
        with pytest.raises(NotFound):
            await ruth.array(unknown)
        with pytest.raises(NotFound):
            await ruth.submit_array(spec(array={"count": 2}, queue={"after": [unknown]}))
    assert not await ruth.jobs()
    made = await ruth.submit_array(spec(array=other))
    assert [member.values["data.source"] for member in made.members] == [
        *["stdlib:"] * 2,
        *["bus://datasets/nobodys"] * 2,
    ]


async def test_of_an_array_a_quota_counts_what_runs_at_a_time(url: str) -> None:
    async with AsyncClient(url, token="rob") as rob:
        with pytest.raises(OverQuota, match=r"at most 2 \(quota small\).*array.limit says how many run"):
            await rob.submit_array(seeds(3))
        await rob.submit_array(seeds(30, limit=2))
        assert (await rob.whoami()).use.jobs == 2
        with pytest.raises(OverQuota):
            await rob.submit(spec())


async def test_a_job_after_an_array_waits_for_all_of_it(ruth: AsyncClient) -> None:
    made = await ruth.submit_array(seeds(2))
    later = await ruth.submit(spec(name="later", queue={"after": [made.array]}))
    beside = spec(queue={"beside": [made.array]})
    with pytest.raises(NotFound, match=f"{made.array} is an array; name its jobs, as {made.array}_0"):
        await ruth.submit(beside)
    await ruth.cancel(f"{made.array}_1")

    async def told() -> bool:
        return (await ruth.job(later.job)).state is JobState.CANCELLED

    assert (await ruth.job(later.job)).state in (JobState.QUEUED, JobState.ANALYSING)
    await ruth.cancel(later.job)
    await eventually(told)


async def test_the_nats_door_takes_arrays(url: str, dial: Dial) -> None:
    client = await dial("a-client")

    async def ask(action: str, **fields: Any) -> JobArray:
        request = DoorRequest(token="ruth", action=action, **fields)
        answer = await client.command(
            subjects.DOOR, request, deadline_s=PATIENCE_S, action=action.split(".")[1]
        )
        assert isinstance(answer, JobArray)
        return answer

    made = await ask("job.submit", spec=seeds(3))
    assert (await ask("job.read", job=made.array)).size == 3
    assert (await ask("job.park", job=made.array)).note == "parked or held: 3 of 3 jobs"
    assert (await ask("job.resume", job=made.array)).note == "may go on: 3 of 3 jobs"
    assert (await ask("job.prioritise", job=made.array, priority=5)).note == "priority 5: 3 of 3 jobs"
    with pytest.raises(BadInput, match=r"priority: missing; job\.prioritise needs the new class"):
        await ask("job.prioritise", job=made.array)
    assert (await ask("job.cancel", job=made.array)).note == "cancelled: 3 of 3 jobs"
