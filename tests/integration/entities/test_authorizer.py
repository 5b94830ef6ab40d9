"""AAM against a real server: Type 3 (draft §4.3), own jobs, a file that changes, tokens that stay secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog

from bus import subjects
from bus.connection import Bus
from entities.authorizer import Authorizer, AuthorizerConfig
from entities.authorizer.service import NO_RESEARCHERS
from entities.gateway.operations.access_client import AccessClient, AccessClientConfig
from entities.service_registry.service import ServiceRegistry
from schemas.envelope import EntityKind
from schemas.errors import BadInput, NoResponders, Refused
from schemas.signals import AccessDecision, AccessRequest, Role
from tests.builders.jobs import job
from tests.integration.entities.conftest import Dial, Start, write_users
from tests.waiting import eventually


def break_file(path: Path) -> None:
    path.write_text("users: [{name: x, role: viewer, token: secret}]")


def remove(path: Path) -> None:
    path.unlink()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_users(
        tmp_path / "tokens.yaml",
        ("vera", "viewer", "v-token"),
        ("ruth", "researcher", "r-token"),
        ("olga", "operator", "o-token"),
    )


@pytest.fixture
async def authorizer(dial: Dial, start: Start, registry: ServiceRegistry, tokens: Path) -> Authorizer:
    service = Authorizer(
        await dial("authorizer", EntityKind.AUTHORIZER), AuthorizerConfig(tokens_file=tokens, check_s=0.05)
    )
    await start(service)
    return service


async def ask(bus: Bus, token: str, action: str, resource: str = "x") -> AccessDecision:
    decision = await bus.request(
        subjects.ACCESS,
        AccessRequest(token=token, action=action, resource=resource, gateway="gateway-east"),
        gateway="gateway-east",
    )
    assert isinstance(decision, AccessDecision)
    return decision


async def test_type_3_allows_and_denies_with_the_reason(authorizer: Authorizer, dial: Dial) -> None:
    bus = await dial("gateway-east", EntityKind.GATEWAY)
    yes = await ask(bus, "r-token", "job.submit")
    assert (yes.allow, yes.user, yes.role, yes.valid_s) == (True, "ruth", Role.RESEARCHER, 0.0)
    no = await ask(bus, "v-token", "job.submit")
    assert (no.allow, no.reason) == (False, "viewer vera may not job.submit")
    for wrong in ("", "r-toke", "r-token ", "x" * 10_000, "täken"):
        nobody = await ask(bus, wrong, "mesh.read")
        assert (nobody.allow, nobody.user, nobody.role) == (False, "", None)


async def test_where_nothing_holds_their_code_there_are_no_researchers(
    registry: ServiceRegistry, dial: Dial, start: Start, tokens: Path
) -> None:
    config = AuthorizerConfig(tokens_file=tokens, check_s=0.05, researchers=False)
    await start(Authorizer(await dial("authorizer", EntityKind.AUTHORIZER), config))
    bus = await dial("gateway-east", EntityKind.GATEWAY)
    for action in ("job.submit", "mesh.read"):
        no = await ask(bus, "r-token", action)
        assert (no.allow, no.reason) == (False, NO_RESEARCHERS)
    assert (await ask(bus, "v-token", "mesh.read")).allow
    assert (await ask(bus, "o-token", "job.submit")).allow


async def test_whose_job_it_is_comes_from_the_orchestrators_record(
    authorizer: Authorizer, dial: Dial
) -> None:
    bus = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    bucket = bus.bucket(subjects.JOB_RECORD)
    for job_id, user in (("hers", "ruth"), ("his", "rob")):
        await bucket.put(job(job_id, user=user), job=job_id)
    assert (await ask(bus, "r-token", "job.cancel", "hers")).allow
    denied = await ask(bus, "r-token", "job.cancel", "his")
    assert (denied.allow, denied.reason) == (
        False,
        "researcher ruth may job.cancel only what is theirs; his: it is rob's",
    )
    assert not (await ask(bus, "r-token", "job.cancel", "nothing")).allow
    assert not (await ask(bus, "r-token", "job.cancel", "a.b > *")).allow
    assert (await ask(bus, "o-token", "job.cancel", "his")).allow


async def nina_comes_in(bus: Bus, tokens: Path) -> None:
    """She is the only user of the file from here on."""
    write_users(tokens, ("nina", "admin", "n-token"))

    async def is_in() -> bool:
        return (await ask(bus, "n-token", "mesh.read")).allow

    await eventually(is_in)


async def test_a_changed_file_counts_without_a_restart(
    authorizer: Authorizer, dial: Dial, tokens: Path
) -> None:
    bus = await dial("gateway-east", EntityKind.GATEWAY)
    assert not (await ask(bus, "n-token", "mesh.read")).allow
    await nina_comes_in(bus, tokens)
    assert not (await ask(bus, "r-token", "mesh.read")).allow, "who was taken out is out"


async def test_a_broken_edit_keeps_the_users_from_before(
    authorizer: Authorizer, dial: Dial, tokens: Path
) -> None:
    bus = await dial("gateway-east", EntityKind.GATEWAY)
    before = authorizer.directory.file._seen
    break_file(tokens)
    await eventually(lambda: authorizer.directory.file._seen != before)
    assert (await ask(bus, "r-token", "job.submit")).allow
    remove(tokens)
    assert (await ask(bus, "r-token", "job.submit")).allow
    await nina_comes_in(bus, tokens)


async def test_a_missing_or_wrong_file_at_the_start_is_one_line(dial: Dial, tmp_path: Path) -> None:
    bus = await dial("authorizer", EntityKind.AUTHORIZER)
    with pytest.raises(BadInput, match=r"tokens\.yaml: No such file.*write a users list there"):
        Authorizer(bus, AuthorizerConfig(tokens_file=tmp_path / "none" / "tokens.yaml"))
    wrong = tmp_path / "tokens.yaml"
    wrong.write_text("users: [{name: x, role: viewer, token: secret}]")
    with pytest.raises(BadInput, match="plain tokens are refused"):
        Authorizer(bus, AuthorizerConfig(tokens_file=wrong))
    wrong.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not UTF-8"):
        Authorizer(bus, AuthorizerConfig(tokens_file=wrong))


async def test_two_authorizers_share_the_requests(
    authorizer: Authorizer, dial: Dial, start: Start, tokens: Path
) -> None:
    second = Authorizer(
        await dial("authorizer-2", EntityKind.AUTHORIZER),
        AuthorizerConfig(tokens_file=tokens, sid="authorizer-2"),
    )
    await start(second)
    bus = await dial("gateway-east", EntityKind.GATEWAY)
    with structlog.testing.capture_logs() as lines:
        for _ in range(20):
            assert (await ask(bus, "r-token", "job.submit")).allow
    assert sum(line["event"] == "access" for line in lines) == 20, "each asked one of them, none asked both"


async def test_tokens_never_get_into_a_log(authorizer: Authorizer, dial: Dial) -> None:
    bus = await dial("gateway-east", EntityKind.GATEWAY)
    with structlog.testing.capture_logs() as lines:
        await ask(bus, "r-token", "job.submit")
        await ask(bus, "wrong-token", "job.submit")
    assert lines
    assert "token" not in json.dumps(lines, default=str).replace("unknown token; ask the operator", "")


async def test_each_check_asks_the_authorizer(authorizer: Authorizer, dial: Dial, tokens: Path) -> None:
    client = AccessClient(await dial("gateway-east", EntityKind.GATEWAY), "gateway-east")
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            assert (await client.check("r-token", "job.submit", "jobs")).user == "ruth"
        for _ in range(2):
            with pytest.raises(Refused, match="may not"):
                await client.check("v-token", "job.submit", "jobs")
        with pytest.raises(Refused) as caught:
            await client.check("nobody", "job.submit", "jobs")
    assert caught.value.fields["user"] == ""
    assert sum(line["event"] == "access" for line in lines) == 6


async def test_without_an_authorizer_nobody_gets_in(dial: Dial) -> None:
    bus, soon = await dial("gateway-east", EntityKind.GATEWAY), AccessClientConfig(absent_s=0.5)
    with pytest.raises(NoResponders):
        await AccessClient(bus, "gateway-east", soon).check("r-token", "job.submit", "jobs")
