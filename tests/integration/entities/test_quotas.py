"""How much of a mesh one user may take: said when refused, over HTTP and at the NATS door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from bus import subjects
from bus.connection import Bus
from dmsc.async_client import AsyncClient
from entities.authorizer import Authorizer, AuthorizerConfig
from entities.authorizer.access_policy import default_text
from entities.gateway import Gateway, GatewayConfig
from entities.orchestrator import Orchestrator, OrchestratorConfig
from entities.service_registry import ServiceRegistry
from schemas.door import DoorRequest
from schemas.envelope import EntityKind
from schemas.errors import OverQuota, Refused
from schemas.job import JobSpec, JobState
from tests.entity_records import job
from tests.integration.entities.conftest import Dial, Start, write_users
from tests.patience import PATIENCE_S

QUOTAS = """
quotas:
  - {name: small, roles: [researcher], jobs: 2, slots: 5, stored_gib: 1, datasets: 2}
"""


@pytest.fixture
async def url(dial: Dial, start: Start, registry: ServiceRegistry, tmp_path: Path) -> str:
    """A mesh without nodes: whatever is submitted waits, and counts."""
    rules = default_text().partition("\nquotas:")[0] + QUOTAS
    (tmp_path / "access.yaml").write_text(rules)
    users = {"ruth": "researcher", "rob": "researcher", "olga": "operator"}
    file = write_users(tmp_path / "tokens.yaml", *((name, role, name) for name, role in users.items()))
    config = AuthorizerConfig(tokens_file=file, access_file=tmp_path / "access.yaml")
    await start(Authorizer(await dial("authorizer", EntityKind.AUTHORIZER), config))
    await start(Orchestrator(await dial("orchestrator", EntityKind.ORCHESTRATOR), OrchestratorConfig()))
    gateway = Gateway(await dial("gateway-a", EntityKind.GATEWAY), GatewayConfig(cluster="a", http_port=0))
    await start(gateway)
    assert gateway.url is not None
    return gateway.url


@pytest.fixture
async def ruth(url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url, token="ruth") as client:
        yield client


def wide(replicas: int, name: str = "wide") -> JobSpec:
    record = job().spec
    return record.model_copy(
        update={
            "name": name,
            "parallel": record.parallel.model_copy(update={"stages": 1, "replicas": replicas, "standbys": 0}),
        }
    )


async def test_no_more_jobs_or_slots_than_a_user_may_have(url: str, ruth: AsyncClient, dial: Dial) -> None:
    with pytest.raises(OverQuota, match=r"at most 5 \(quota small\).* would add 6; ask for fewer"):
        await ruth.submit(wide(6))
    first = await ruth.submit(wide(4))
    with pytest.raises(OverQuota, match=r"you have 4, this would add 2"):
        await ruth.submit(wide(2))
    await ruth.submit(wide(1))
    with pytest.raises(OverQuota, match=r"not ended: at most 2 .* wait for one of them, or cancel"):
        await ruth.submit(wide(1))
    client: Bus = await dial("a-client")
    request = DoorRequest(token="ruth", action="job.submit", spec=wide(1))
    with pytest.raises(OverQuota, match="at most 2"):
        await client.command(subjects.DOOR, request, deadline_s=PATIENCE_S, action="submit")

    me = await ruth.whoami()
    assert me.quota is not None
    assert (me.quota.jobs, me.quota.slots) == (2, 5)
    assert (me.use.jobs, me.use.slots) == (2, 5)
    async with AsyncClient(url, token="rob") as rob:  # a quota is each user's own
        await rob.submit(wide(5))
    async with AsyncClient(url, token="olga") as olga:  # operators have none
        for _ in range(3):
            await olga.submit(wide(9))
        assert (await olga.whoami()).quota is None
    assert (await ruth.cancel(first.job)).state is not JobState.DONE
    await ruth.wait(first.job)
    await ruth.submit(wide(4))


async def test_submissions_at_once_count_one_after_the_other(ruth: AsyncClient) -> None:
    answers = await asyncio.gather(*(ruth.submit(wide(1)) for _ in range(8)), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, OverQuota)]
    assert (len(answers) - len(refused), len(refused)) == (2, 6)


async def test_data_sets_and_bytes_have_an_owner_and_an_end(url: str, ruth: AsyncClient) -> None:
    await ruth.upload_dataset("one", b"x" * 1000)
    await ruth.upload_dataset("two.v2", b"y" * 500)
    with pytest.raises(OverQuota, match=r"data sets: at most 2 .* you have 2"):
        await ruth.upload_dataset("three", b"z")
    await ruth.upload_dataset("one", b"x" * 10)  # one in the place of another is none more
    use = (await ruth.whoami()).use
    assert (use.datasets, use.stored_bytes) == (2, 510)
    async with AsyncClient(url, token="rob") as rob:
        with pytest.raises(Refused, match="data set one is ruth's; store yours under another name"):
            await rob.upload_dataset("one", b"mine now")
        await rob.upload_dataset("three", b"z")
        assert (await rob.whoami()).use.datasets == 1
    async with AsyncClient(url, token="olga") as olga:
        await olga.delete_dataset("two.v2")
    await ruth.upload_dataset("four", b"w")


async def test_a_body_that_says_no_length_ends_where_the_quota_does(url: str, tmp_path: Path) -> None:
    rules = default_text().partition("\nquotas:")[0]
    rules += "\nquotas:\n  - {name: none, roles: [researcher], stored_gib: 0}\n"
    (tmp_path / "access.yaml").write_text(rules)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 100

    async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer ruth"}) as http:
        async with asyncio.timeout(PATIENCE_S):
            while True:  # until the authorizer has read its file again
                answer = await http.put("/v1/datasets/endless", content=pieces())
                if answer.status_code == 403:
                    break
    assert answer.json()["code"] == "over_quota"
    assert "at most 0 GiB (quota none)" in answer.json()["detail"]
