"""Who is not let onto the bus stands on the audit stream: who, from where, why; a flood does not fill it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml

from bus import subjects
from bus.connection import Bus
from bus.guard.guard_keys import GuardKeys
from bus.security.credentials import issue, new_root
from bus.security.identity import Identity
from bus.server.embedded import EmbeddedServer
from entities.authorizer import AuthorizerConfig, guarding
from entities.authorizer.audit.rate_limited_records import RateLimitedRecordsConfig
from entities.authorizer.audit.refusals import EVERYBODY_ELSE
from schemas.audit import AuditEntry, AuditRecord, verify
from schemas.envelope import EntityKind as K
from tests.integration.guard.raw_connection import Shut, raw_connection
from tests.patience import PATIENCE_S

FOLDING = RateLimitedRecordsConfig(window_s=0.5, each=1, groups=4)
SMO = Identity(name="orchestrator", kind=K.ORCHESTRATOR)


class Door:
    """A server with two guards, each of which writes to the audit."""

    def __init__(self, server: EmbeddedServer, root: str, bus: Bus) -> None:
        self.url, self.root, self.bus = server.url, root, bus

    async def refused(self, token: str, name: str = "wire", **options: object) -> None:
        with pytest.raises(Shut):
            async with raw_connection(self.url, token, name, **options):
                pass

    async def records(self, count: int) -> list[AuditRecord]:
        """All up to the one with which they tell of so many refusals."""
        found: list[AuditEntry] = []
        async with (
            asyncio.timeout(PATIENCE_S),
            contextlib.aclosing(self.bus.history(subjects.AUDIT, follow=True)) as coming,
        ):
            async for one in coming:
                assert isinstance(one.message, AuditRecord)
                found.append(AuditEntry(sequence=one.sequence, record=one.message))
                if sum(each.record.count for each in found) >= count:
                    break
        assert verify(found).broken is None
        return [one.record for one in found]


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    root = new_root()
    keys = GuardKeys.generate(root)
    keys_file, tokens_file = tmp_path / "guard.json", tmp_path / "tokens.yaml"
    keys_file.touch(mode=0o600)
    keys_file.write_text(keys.text())
    ruth = {"name": "ruth", "role": "viewer", "token_sha256": hashlib.sha256(b"ruth's").hexdigest()}
    tokens_file.write_text(yaml.safe_dump({"users": [ruth]}))
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            EmbeddedServer(tmp_path / "nats", guard=keys, sync_always=False)
        )
        for sid in ("authorizer", "supervisor"):
            config = AuthorizerConfig(
                tokens_file=tokens_file,
                keys_file=keys_file,
                servers=(server.url,),
                bus_token=root,
                sid=sid,
                check_s=0.05,
                refused_connections=FOLDING,
            )
            await stack.enter_async_context(guarding(config))
        reader = Bus.connect(server.url, name="reader", kind=K.AUTHORIZER, token=root)
        yield Door(server, root, await stack.enter_async_context(reader))


async def test_who_from_where_and_why(door: Door) -> None:
    await door.refused(issue(door.root, SMO, lifetime_s=-1), "gateway-a")  # before there is a stream
    await door.bus.provision()
    await door.refused("a token of nobody's", "eve\x1b[2J")
    found = await door.records(2)
    expired, eve = sorted(found, key=lambda one: one.resource, reverse=True)
    assert (expired.kind, expired.action, expired.allow) == ("connection", "connect", False)
    assert expired.resource == "gateway-a from 127.0.0.1"
    assert expired.reason == "the credential of orchestrator has expired"
    assert eve.resource == "eve\\x1b[2J from 127.0.0.1"
    assert not any("a token of nobody's" in one.model_dump_json() for one in found)


async def test_a_flood_is_counted_and_what_else_happens_meanwhile_is_seen(door: Door) -> None:
    await door.bus.provision()
    stranger = issue(new_root(), SMO)
    for number in range(40):
        await door.refused(stranger if number % 2 else "guess", "same")
    for number in range(30):
        await door.refused("guess", f"name-{number}")
    found = await door.records(70)
    assert sum(one.count for one in found) == 70, "none is lost"
    singles = [one for one in found if one.kind == "connection"]
    same = {(one.authorizer, one.reason) for one in found if one.resource.startswith("same ")}
    assert {reason for _, reason in same} == {
        "neither a credential of this mesh nor a user's token",
        "its credential is not from this mesh, or was put together from several",
    }
    for guard in ("authorizer", "supervisor"):
        at = [one.at for one in singles if one.authorizer == guard] or [0.0]
        windows = (max(at) - min(at)) // FOLDING.window_s + 1
        assert len(at) <= windows * (FOLDING.groups + 1), "so many groups, and all the others together"
    assert any(one.user == EVERYBODY_ELSE for one in found if one.kind == "folded")
