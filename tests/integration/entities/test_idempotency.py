"""Repeated requests at several gateways, where one that holds a claim is slow."""

from __future__ import annotations

import pytest

from entities.gateway.operations.idempotency import Answer, IdempotencyStore, key_token
from schemas.envelope import EntityKind
from schemas.errors import Unavailable
from tests.integration.entities.conftest import Dial


async def test_a_failure_that_comes_late_takes_nothing_from_whoever_took_the_request_over(
    dial: Dial,
) -> None:
    """The second gateway finds the first one gone; that one only was slow, and then fails."""
    first, second = [
        IdempotencyStore(await dial(f"gateway-{name}", EntityKind.GATEWAY), dict) for name in ("a", "b")
    ]
    acted: list[str] = []

    async def act() -> Answer:
        acted.append("second")
        return Answer('{"job": "j1"}')

    async def slow() -> Answer:
        acted.append("first")
        assert (await second.once("ruth", "k", "digest", act)).body == '{"job": "j1"}'
        raise Unavailable("no orchestrator answered")

    with pytest.raises(Unavailable):
        await first.once("ruth", "k", "digest", slow)
    kept = await first.once("ruth", "k", "digest", act)
    assert (kept.body, acted) == ('{"job": "j1"}', ["first", "second"])


async def test_a_failure_frees_the_key_at_once(dial: Dial) -> None:
    answers = IdempotencyStore(await dial("gateway-a", EntityKind.GATEWAY), dict)

    async def fail() -> Answer:
        raise Unavailable("no orchestrator answered")

    for _ in range(2):
        with pytest.raises(Unavailable):
            await answers.once("ruth", "k", "digest", fail)
    bucket = answers._bucket
    assert await bucket.get(leader=True, key=key_token("ruth", "k")) is None
