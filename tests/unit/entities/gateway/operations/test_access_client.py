"""Open streams and their permission, while the authorizer is away."""

from __future__ import annotations

import asyncio
from typing import Any

from bus.messaging.key_value import Change
from entities.gateway.operations.access_client import AccessClient, AccessClientConfig
from schemas.access import Revocation
from schemas.signals import AccessDecision
from tests.patience import PATIENCE_S


class AuthorizerThatLeaves:
    """Permits the first question and answers no other one."""

    def __init__(self) -> None:
        self.questions = 0
        self.gone = asyncio.Event()

    async def request(self, row: Any, message: Any, **options: Any) -> AccessDecision:
        self.questions += 1
        if self.questions == 1:
            return AccessDecision(allow=True, user="vera", reason="a viewer", token_id="t1")
        self.gone.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_revocation_ends_a_stream_at_once_although_the_authorizer_is_away() -> None:
    authorizer = AuthorizerThatLeaves()
    client = AccessClient(authorizer, "gateway-a", AccessClientConfig(recheck_s=0.01))
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    revocation = Revocation(kind="token", id="t1", user="vera", at=1.0, by="root", reason="lost")
    with client.lasting("token", "mesh.read", "mesh", ended.set_result):
        async with asyncio.timeout(PATIENCE_S):
            await authorizer.gone.wait()
            assert not ended.done()
            await client._changed(Change(key="token.t1", revision=1, message=revocation))
            assert "was revoked by root (lost)" in await ended
