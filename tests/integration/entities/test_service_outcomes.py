"""What gateways tell of how requests ended, and of copies for versions in shadow (ADR-0150)."""

from __future__ import annotations

from typing import Any

import httpx

from bus import subjects
from entities.gateway import Gateway
from schemas.envelope import Envelope
from schemas.services.outcomes import ServiceOutcomes
from tests.integration.entities.serving_stand_in import Served, answer_to, complete
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
