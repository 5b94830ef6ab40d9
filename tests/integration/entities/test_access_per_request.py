"""A right that has ended is refused on the very next request, whatever came before (ADR-0045)."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from bus import subjects
from entities.authorizer import Authorizer, AuthorizerConfig
from entities.authorizer.access.access_policy import default_text
from entities.gateway.operations.access_client import AccessClient
from entities.service_registry.service import ServiceRegistry
from schemas.access import Revocation
from schemas.envelope import EntityKind
from schemas.errors import Refused
from tests.integration.entities.conftest import Dial, Start, bearer, write_users
from tests.integration.entities.gateway_answers import JOB, check_problem, submit
from tests.integration.entities.test_dashboard_doors import events
from tests.waiting import eventually

USERS = {"vera": "viewer", "ruth": "researcher", "olga": "operator"}


def write(authorizer: Authorizer, path: Path, **roles: str) -> None:
    """Changes users' roles, or removes the users whose new role is empty; the authorizer knows at once."""
    users = {name: role for name, role in (USERS | roles).items() if role}
    write_users(path / "tokens.yaml", *((name, role, name) for name, role in users.items()))
    authorizer.directory.refresh()


async def test_a_removed_user_and_a_lost_right_are_refused_at_once(
    http: httpx.AsyncClient, authorizer: Authorizer, tmp_path: Path
) -> None:
    job = await submit(http)
    paths = (f"/v1/jobs/{job}", "/v1/jobs", "/v1/mesh", "/v1/overview", f"/v1/jobs/{job}/load")
    for path in paths:
        assert (await http.get(path, headers=bearer("ruth"))).status_code == 200
    assert (await http.get("/v1/datasets", headers=bearer("ruth"))).status_code == 200
    write(authorizer, tmp_path, ruth="viewer")
    check_problem(await http.get("/v1/datasets", headers=bearer("ruth")), 403, "refused")
    assert (await http.get(paths[0], headers=bearer("ruth"))).status_code == 200
    write(authorizer, tmp_path, ruth="")
    for path in paths:
        check_problem(await http.get(path, headers=bearer("ruth")), 401, "refused")
    write(authorizer, tmp_path)
    for path in paths:
        assert (await http.get(path, headers=bearer("ruth"))).status_code == 200, "and a new right counts"


async def test_a_stored_answer_is_refused_too(
    http: httpx.AsyncClient, authorizer: Authorizer, tmp_path: Path
) -> None:
    keyed = bearer("ruth", Idempotency_Key="k1")
    first = await http.post("/v1/jobs", json=JOB, headers=keyed)
    assert first.status_code == 201
    assert (await http.post("/v1/jobs", json=JOB, headers=keyed)).json() == first.json()
    write(authorizer, tmp_path, ruth="viewer")
    check_problem(await http.post("/v1/jobs", json=JOB, headers=keyed), 403, "refused")
    write(authorizer, tmp_path, ruth="")
    check_problem(await http.post("/v1/jobs", json=JOB, headers=keyed), 401, "refused")
    write(authorizer, tmp_path)
    assert (await http.post("/v1/jobs", json=JOB, headers=keyed)).json() == first.json()


@pytest.mark.parametrize(("path", "first"), [("/v1/live", "overview"), ("/v1/tap", "ready")])
async def test_an_open_stream_ends_with_the_next_check(
    http: httpx.AsyncClient, authorizer: Authorizer, tmp_path: Path, path: str, first: str
) -> None:
    async with events(http, path, "vera") as viewer:
        await viewer.until(first)
        write(authorizer, tmp_path, vera="")
        assert "unknown token" in (await viewer.until("refused"))["detail"]


async def is_refused(client: AccessClient, action: str, resource: str) -> bool:
    try:
        await client.check("ruth", action, resource)
    except Refused:
        return True
    return False


async def test_asking_a_service_is_asked_about_once_a_second(
    dial: Dial, authorizer: Authorizer, tmp_path: Path
) -> None:
    client = AccessClient(await dial("gateway-x", EntityKind.GATEWAY), "gateway-x")
    first = await client.check("ruth", "service.use", "digits")
    write(authorizer, tmp_path, ruth="viewer")
    assert await client.check("ruth", "service.use", "digits") is first
    assert (await client.check("ruth", "self.read", "self")).role == "viewer", "all else is asked anew"
    assert await is_refused(client, "service.use", "another")
    await eventually(lambda: is_refused(client, "service.use", "digits"))
    write(authorizer, tmp_path)
    assert not await is_refused(client, "service.use", "digits"), "refusals are not kept"


async def test_a_revocation_ends_what_is_kept_at_once(
    dial: Dial, authorizer: Authorizer, tmp_path: Path
) -> None:
    bus = await dial("gateway-x", EntityKind.GATEWAY)
    client = AccessClient(bus, "gateway-x")
    async with client.following(bus):
        decision = await client.check("ruth", "service.use", "digits")
        assert await client.check("ruth", "service.use", "digits") is decision
        others = await dial("authorizer-2", EntityKind.AUTHORIZER)
        revocation = Revocation(kind="token", id=decision.token_id, user="ruth", at=time.time(), by="olga")
        await others.bucket(subjects.REVOCATION).put(revocation, kind="token", id=decision.token_id)
        await eventually(lambda: client.void(decision))
        assert await is_refused(client, "service.use", "digits")


async def test_an_audited_permission_is_asked_each_time(
    dial: Dial, start: Start, registry: ServiceRegistry, tmp_path: Path
) -> None:
    (tmp_path / "rules.yaml").write_text(
        default_text().replace("[service.deploy, service.use]", "[service.use]\n    audit: true")
    )
    users = write_users(tmp_path / "users.yaml", ("ruth", "researcher", "ruth"))
    config = AuthorizerConfig(tokens_file=users, access_file=tmp_path / "rules.yaml")
    await start(Authorizer(await dial("authorizer", EntityKind.AUTHORIZER), config))
    client = AccessClient(await dial("gateway-x", EntityKind.GATEWAY), "gateway-x")
    first = await client.check("ruth", "service.use", "digits")
    assert first.valid_s == 0
    assert await client.check("ruth", "service.use", "digits") is not first
