"""A right that has ended is refused on the very next request, whatever came before (ADR-0045)."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from entities.authorizer import Authorizer
from tests.integration.entities.conftest import bearer, write_users
from tests.integration.entities.gateway_answers import JOB, check_problem, submit
from tests.integration.entities.test_dashboard_doors import events

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
