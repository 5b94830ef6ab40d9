"""What gateways tell of how requests ended, and of copies for versions in shadow (ADR-0150)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from bus import subjects
from entities.gateway import Gateway
from entities.gateway.generation.session import GenerationSession
from entities.gateway.outcomes.request_outcome import MEASURED
from schemas.envelope import Envelope
from schemas.services.outcomes import AnsweredRequest, ServiceOutcomes
from tests.integration.entities.conftest import bearer
from tests.integration.entities.serving_stand_in import (
    RUTH,
    Gate,
    Served,
    StandInInstance,
    answer_to,
    complete,
)
from tests.patience import PATIENCE_S
from tests.waiting import eventually


async def with_second(served: Served, gateway: Gateway, **changes: Any) -> list[ServiceOutcomes]:
    """Gives the service a version v2, and these changes; returns what gateways tell from then on."""
    book = gateway.generations.book
    service = book.get("letters")
    assert service is not None
    (stable,) = service.versions
    versions = (stable, stable.model_copy(update={"version": "v2"}))
    changed = service.model_copy(update={"versions": versions, "revision": 3, **changes})
    told: list[ServiceOutcomes] = []

    async def hear(message: ServiceOutcomes, envelope: Envelope) -> None:
        told.append(message)

    await served.bus.subscribe(subjects.SERVICE_OUTCOMES, hear)
    await served.bus.bucket(subjects.MODEL_SERVICE).put(changed, service="letters")
    await eventually(lambda: book.get("letters") == changed)
    return told


async def test_a_version_in_shadow_answers_copies_which_are_compared(
    served: Served, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    told = await with_second(served, gateway, shadow=("v2",))
    response = await complete(http, temperature=1, seed=4)
    assert response.headers["dmsc-answered-by"] == "letters@v1"
    assert response.json()["choices"][0]["logprobs"] is None
    [pair] = await eventually(lambda: [pair for each in told for pair in each.mirrored])
    assert (pair.answered.version, pair.shadow.version, pair.same_tokens) == ("v1", "v2", 8)
    assert (pair.answered.score, pair.shadow.score) == (-1.5, -1.5)
    assert told[-1].candidates == ("v2",)
    # A text that ends the answer ends no copy: so many tokens are compared.
    stopped = await complete(http, stop=answer_to("abc", 8)[3:5])
    assert stopped.json()["choices"][0]["finish_reason"] == "stop"
    pairs = await eventually(lambda: [pair for each in told for pair in each.mirrored][1:])
    assert pairs[0].same_tokens == pairs[0].answered.tokens
    await eventually(lambda: not served.working)


async def test_a_request_that_is_hedged_is_copied_once(
    served: Served, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    await with_second(served, gateway, shadow=("v2",))
    sessions: list[GenerationSession] = []
    gateway.generations.keeper.observers.append(sessions.append)
    go = asyncio.Event()
    held: list[StandInInstance] = []

    def hold_first(instance: StandInInstance) -> Gate:
        async def gate(number: int) -> None:
            if not held:
                held.append(instance)
            if held[0] is instance:
                await go.wait()

        return gate

    for each in served.last:
        each.gate = hold_first(each)
    hedged = await complete(http, aggregation="first")
    assert hedged.status_code == 200
    assert held, "an instance was slow"
    own = [each.generation.version for each in sessions if not each.generation.mirrored]
    assert own == ["v1", "v1"], "it was hedged"
    go.set()
    await eventually(lambda: not served.working)
    assert hedged.json()["choices"][0]["text"] == answer_to("abc", 8)
    assert [each.generation.version for each in sessions if each.generation.mirrored] == ["v2"]


async def test_how_drawn_requests_ended_is_told_and_nothing_of_them(
    served: Served, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    told = await with_second(served, gateway, weights={"v1": 5_000, "v2": 5_000})
    answered = [await complete(http, user=f"u{number % 4}") for number in range(8)]
    versions = [each.headers["dmsc-answered-by"].partition("@")[2] for each in answered]
    assert versions[:4] == versions[4:], "a user meets one version"
    await complete(http, model="letters@v2")  # who picks a version has not drawn it
    await complete(http, n=3)
    for each in served.last:
        each.fails = "bad_model_output: not finite"
    assert (await complete(http)).status_code == 500
    for each in served.last:
        each.fails = ""
    too_long = await complete(http, max_tokens=500)
    assert too_long.status_code == 400

    requests = await eventually(
        lambda: len(found := [each for one in told for each in one.requests]) >= 10 and found
    )
    assert [each.version for each in requests[:8]] == versions
    assert len({each.key for each in requests[:8]}) == 4
    assert all(each.ok and each.tokens == 8 and each.score == -1.5 for each in requests[:9])
    assert all(0 < each.first_token_s < PATIENCE_S and each.per_token_s is not None for each in requests[:9])
    assert [each.key for each in requests[8:]] == [None, None], "drawn for these alone, one draw each"
    assert (requests[9].ok, requests[9].failure) == (False, "bad_model_output")
    assert len(requests) == 10
    body = "".join(each.model_dump_json() for each in told)
    assert "abc" not in body
    assert "u1" not in body
    assert told[-1].jobs == {"v1": "serve1", "v2": "serve1"}

    # A change of traffic is told without a request; then there is nothing to judge.
    service = gateway.generations.book.get("letters")
    assert service is not None
    back = service.model_copy(update={"weights": {"v1": 10_000}, "revision": 4})
    await served.bus.bucket(subjects.MODEL_SERVICE).put(back, service="letters")
    last = await eventually(lambda: told[-1].revision == 4 and told[-1])
    assert (last.weights, last.requests, last.candidates) == ({"v1": 10_000}, (), ())


def only(told: list[ServiceOutcomes]) -> Callable[[], AnsweredRequest | None]:
    """The one outcome that was told so far, if there is one."""
    return lambda: next((each for one in told for each in one.requests), None)


HALVES = {"v1": 5_000, "v2": 5_000}
LONG = {"model": "letters", "prompt": "abc", "max_tokens": 64, "temperature": 0, "stream": True}


async def test_who_answers_is_known_with_the_first_token_and_leaving_changes_nothing_that_is_measured(
    served: Served, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    """Else a user could leave whatever one version answers slowly, and so have the other one go back."""
    told = await with_second(served, gateway, weights=HALVES)
    reached, first, never = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def gate(position: int) -> None:
        if position == 0:
            reached.set()
            await first.wait()
        elif position == MEASURED + 4:
            await never.wait()

    served.gate(gate)
    begun = asyncio.Event()

    async def leave_early() -> None:
        async with http.stream("POST", "/v1/completions", json=LONG, headers=RUTH) as response:
            begun.set()
            assert response.headers["dmsc-answered-by"].startswith("letters@v")

    leaving = asyncio.create_task(leave_early())
    await reached.wait()
    assert not begun.is_set(), "the headers came before the first token"
    first.set()
    await leaving
    outcome = await eventually(only(told))
    assert MEASURED <= outcome.tokens <= MEASURED + 4
    assert outcome.ok
    assert outcome.first_token_s is not None
    assert outcome.per_token_s is not None
    await eventually(lambda: not served.working)

    # One whose client is gone before the first token is measured, too.
    told.clear()
    reached.clear()
    first.clear()
    gone = asyncio.create_task(http.post("/v1/completions", json=LONG, headers=RUTH))
    await reached.wait()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    first.set()
    outcome = await eventually(only(told))
    assert outcome.tokens >= MEASURED
    assert outcome.per_token_s is not None
    await eventually(lambda: not served.working)


async def test_an_answer_that_its_user_has_another_writer_go_on_with_counts(
    served: Served, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    told = await with_second(served, gateway, weights=HALVES)
    go = asyncio.Event()

    async def gate(position: int) -> None:
        if position == 3:
            await go.wait()

    served.gate(gate)
    async with http.stream("POST", "/v1/completions", json=LONG, headers=RUTH) as response:
        path = f"/v1/generations/{response.headers['dmsc-generation']}/events"
        following = asyncio.create_task(http.get(path, headers=RUTH))
        outcome = await eventually(only(told))
        assert (outcome.ok, outcome.per_token_s, outcome.score) == (True, None, -1.5)
        assert outcome.first_token_s is not None
        go.set()
        assert "data: [DONE]" in (await following).text


async def test_users_whom_a_stranger_names_keep_their_version_and_prove_nothing(
    served: Served, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    """Who chooses users learns which version each of them meets, and could aim what fails at one."""
    told = await with_second(served, gateway, weights=HALVES)
    body = {"model": "letters", "prompt": "abc", "max_tokens": 2, "temperature": 0}

    async def ask(**more: str) -> str:
        response = await http.post("/v1/completions", json=body | more, headers=bearer("rob"))
        assert response.status_code == 200, response.text
        return response.headers["dmsc-answered-by"]

    assert len({await ask(user="victim") for _ in range(4)}) == 1
    await ask()
    await complete(http, user="victim")
    requests = await eventually(
        lambda: len(found := [each for one in told for each in one.requests]) >= 2 and found
    )
    assert [each.key is None for each in requests] == [True, False]
