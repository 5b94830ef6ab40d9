"""Several calls in one answer, several versions in one, and vectors of texts (ADR-0153, ADR-0154)."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from bus import subjects
from dmsc.client.async_client import AsyncClient
from entities.gateway import Gateway
from entities.gateway.http.config import HttpConfig
from entities.gateway.http.rate_limit import RequestRate
from schemas.envelope import EntityKind
from schemas.errors import BadInput
from schemas.services.model_service import VersionState
from schemas.services.prediction import NamedTensor, Predict
from tests.integration.dmsc.command_line import dmsc
from tests.integration.entities.conftest import Dial, bearer
from tests.integration.entities.serving_stand_in import Served, StandInInstance, answer_to, deploy
from tests.waiting import eventually

RUTH, ROB = bearer("ruth"), bearer("rob")
BURST = 60


@pytest.fixture
def door() -> HttpConfig:
    """A bucket of requests that hardly fills again."""
    return HttpConfig(rate=RequestRate(per_s=0.01, burst=BURST))


async def post(
    http: httpx.AsyncClient, path: str, headers: dict[str, str] = RUTH, **body: Any
) -> httpx.Response:
    return await http.post(path, json=body, headers=headers)


async def test_several_calls_have_one_answer_and_each_its_own_status(
    served: Served, http: httpx.AsyncClient
) -> None:
    text = {"model": "letters", "prompt": "abc", "max_tokens": 4, "temperature": 0}
    chat = {"model": "letters", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
    calls: list[dict[str, Any]] = [
        {"id": "a", "path": "/v1/completions", "body": text},
        {"id": "b", "path": "/v1/chat/completions", "body": chat | {"temperature": 0}},
        {"id": "c", "path": "/v1/embeddings", "body": {"model": "letters", "input": "abc"}},
        {"id": "d", "path": "/v1/completions", "body": text | {"model": "nobody"}},
        {"id": "e", "path": "/v1/completions", "body": text | {"stream": True}},
        {"id": "f", "path": "/v1/predict", "body": {"model": "letters", "inputs": {"x": [1]}}},
    ]
    whole = (await post(http, "/v1/aggregate", calls=calls)).json()
    answers = {each["id"]: each for each in whole["answers"]}
    assert [each["id"] for each in whole["answers"]] == list("abcdef")
    assert {id: each["status"] for id, each in answers.items()} == {
        "a": 200,
        "b": 200,
        "c": 200,
        "d": 404,
        "e": 400,
        "f": 400,
    }
    assert whole["failed"] == 3
    assert answers["a"]["body"]["choices"][0]["text"] == answer_to("abc", 4)
    said = answers["b"]["body"]["choices"][0]["message"]["content"]
    assert said == answer_to("user: abc\nassistant:", 3)
    assert answers["d"]["body"]["error"]["code"] == "model_not_found"
    assert "stream" in answers["e"]["body"]["error"]["message"]

    async with AsyncClient(str(http.base_url), token="ruth") as client:
        found = await client.aggregate([(each["path"], each["body"]) for each in calls[:4]])
    assert [each.status for each in found] == [200, 200, 200, 404]
    assert found[0].body["choices"][0]["text"] == answer_to("abc", 4)

    # A call that nobody answers is late, and holds up no other.
    reached, go = asyncio.Event(), asyncio.Event()

    async def gate(number: int) -> None:
        reached.set()
        await go.wait()

    served.gate(gate)
    late = (await post(http, "/v1/aggregate", calls=[calls[0], calls[2]], wait_s=2)).json()
    assert reached.is_set()
    assert [each["status"] for each in late["answers"]] == [504, 200]
    go.set()
    served.gate(None)
    await eventually(lambda: not served.working)

    # Rights are each call's own, and so is its charge; a request of too many is refused whole.
    refused = (await post(http, "/v1/aggregate", bearer("vera"), calls=calls[:1])).json()
    assert [each["status"] for each in refused["answers"]] == [403]
    assert (await post(http, "/v1/aggregate", calls=[calls[0]] * 17)).status_code == 422
    assert (await http.get("/v1/models", headers=ROB)).status_code == 200  # a stranger's rate is another one
    many = [calls[3]] * 16
    statuses = [
        each["status"]
        for _ in range(5)
        for each in (await post(http, "/v1/aggregate", ROB, calls=many)).json().get("answers", ())
    ]
    assert (statuses.count(404), 429 in statuses) == (BURST, True)


def logits(*rows: tuple[float, ...]) -> Callable[[Predict], tuple[NamedTensor, ...]]:
    """An instance's answer: these rows, whatever it is asked."""
    data = array("f", [value for row in rows for value in row]).tobytes()
    shape = (len(rows), len(rows[0]))
    return lambda _: (NamedTensor(name="logits", dtype="float32", shape=shape, data=data),)


@pytest_asyncio.fixture
async def three(served: Served, gateway: Gateway, dial: Dial) -> AsyncIterator[list[StandInInstance]]:
    """The service `kinds` with three versions of one instance each, which share its traffic 5 : 3 : 2."""
    instances = []
    versions: dict[str, Any] = {}
    for number in range(1, 4):
        sid = f"kinds{number}-s0-r0"
        instance = StandInInstance(await dial(sid, EntityKind.INSTANCE), sid, 1)
        await instance.start()
        instances.append(instance)
        made = await deploy(
            served.bus, "kinds", job=f"kinds{number}", version=f"v{number}", stages=1, kind="predict"
        )
        versions[f"v{number}"] = made.versions[0]
    weights = {"v1": 5_000, "v2": 3_000, "v3": 2_000}
    changed = made.model_copy(update={"versions": tuple(versions.values()), "weights": weights})
    await served.bus.bucket(subjects.MODEL_SERVICE).put(changed, service="kinds")
    await eventually(lambda: gateway.generations.book.get("kinds") == changed)
    view = gateway.follower.view
    await eventually(lambda: all(view.active(job=f"kinds{number}", stage=0) for number in range(1, 4)))
    yield instances
    for each in instances:
        await each.kill()


async def test_versions_answer_together(
    three: list[StandInInstance], served: Served, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    rows = [
        ((2.0, 1.0, 0.0), (0.0, 3.0, 0.0)),
        ((0.0, 1.0, 2.0), (0.0, 1.0, 2.0)),
        ((1.0, 1.0, 5.0), (0.0, 0.0, 1.0)),
    ]
    for instance, of in zip(three, rows, strict=True):
        instance.outputs = logits(*of)

    async def ask(how: Any, **more: Any) -> dict[str, Any]:
        body = {"model": "kinds", "inputs": {"x": [[1.0], [2.0]]}, "aggregation": how} | more
        response = await post(http, "/v1/predict", **body)
        return response.json() | {
            "status": response.status_code,
            "by": response.headers.get("dmsc-answered-by"),
        }

    voted = await ask("vote")
    # Half of the weight agrees on class 2 in both rows; the heaviest single voter has the other half.
    assert voted["outputs"]["choice"]["values"] == [0, 1]
    assert voted["by"] == "kinds@v1, kinds@v2, kinds@v3"
    assert voted["dmsc"]["aggregation"]["shares"] == {"v1": 0.5, "v2": 0.3, "v3": 0.2}
    named = await ask({"how": "vote", "over": ["v2", "v3"], "min_voters": 2})
    assert named["outputs"]["choice"]["values"] == [2, 2]

    mixed = (await ask("weighted"))["outputs"]["probabilities"]
    assert mixed["dtype"] == "float64"
    for row in mixed["values"]:
        assert abs(sum(row) - 1) < 1e-12
    again = (await ask("weighted"))["outputs"]["probabilities"]
    assert again == mixed  # to the bit, whoever came first
    sure = (await ask({"how": "attention", "temperature": 0.01}))["outputs"]["probabilities"]["values"]
    assert sure[0][2] > 0.95  # v3 is the surest of the first row

    # One of them is frozen: the others answer in time, and it is named.
    three[2].held = asyncio.Event()
    without = await ask({"how": "weighted", "wait_s": 2})
    assert without["dmsc"]["aggregation"]["missing"] == ["v3"]
    assert without["dmsc"]["aggregation"]["shares"] == {"v1": 0.625, "v2": 0.375}
    short = await ask({"how": "weighted", "wait_s": 0.2, "min_voters": 3})
    assert (short["status"], "missing: v3" in short["detail"]) == (503, True)
    three[2].held.set()

    # The first that answers: a slow one is asked no longer than the service usually takes.
    for _ in range(20):
        assert (await ask({"how": "first", "over": ["v1", "v2"]}))["by"] == "kinds@v1"
    three[0].held = asyncio.Event()
    assert (await ask({"how": "first", "over": ["v1", "v2"]}))["by"] == "kinds@v2"
    three[0].held.set()

    # One that does not answer is missing, and not waited for.
    former = gateway.generations.book.get("kinds")
    assert former is not None
    versions = tuple(
        each.model_copy(update={"state": VersionState.REFUSED}) if each.version == "v2" else each
        for each in former.versions
    )
    changed = former.model_copy(update={"versions": versions})
    await served.bus.bucket(subjects.MODEL_SERVICE).put(changed, service="kinds")
    await eventually(lambda: gateway.generations.book.get("kinds") == changed)
    left = await ask({"how": "vote", "over": ["v1", "v2"], "wait_s": 60})
    assert left["dmsc"]["aggregation"]["missing"] == ["v2"]

    for how, model, words in (
        ("median", "kinds", "aggregation"),
        ({"how": "first", "min_voters": 2}, "kinds", "min_voters"),
        ({"how": "vote", "over": ["v9"]}, "kinds", "v1, v2, v3"),
        ("vote", "kinds@v1", "one version"),
        ({"how": "vote", "output": "x"}, "kinds", "logits"),
    ):
        wrong = await ask(how, model=model)
        assert wrong["status"] in (404, 422)
        assert words in wrong["detail"]


async def test_texts_are_voted_on_and_the_first_token_wins(
    served: Served, gateway: Gateway, http: httpx.AsyncClient, dial: Dial, tmp_path: Path
) -> None:
    other = StandInInstance(await dial("serve2-s0-r0", EntityKind.INSTANCE), "serve2-s0-r0", 1)
    other.shift = 1
    await other.start()
    book = gateway.generations.book
    former = book.get("letters")
    assert former is not None
    second = await deploy(served.bus, "letters", job="serve2", version="v2", stages=1)
    shares = {"v1": 4_000, "v2": 6_000}
    changed = second.model_copy(
        update={"versions": (*former.versions, *second.versions), "weights": shares, "stable": "v1"}
    )
    await served.bus.bucket(subjects.MODEL_SERVICE).put(changed, service="letters")
    await eventually(lambda: book.get("letters") == changed and gateway.jobs.cache.get("serve2"))
    await eventually(lambda: gateway.follower.view.active(job="serve2", stage=0))
    body = {"model": "letters", "prompt": "abc", "max_tokens": 5, "temperature": 0}
    won = await post(http, "/v1/completions", **body, aggregation="vote")
    assert won.json()["choices"][0]["text"] == answer_to("abc", 5, seed=1)
    assert won.headers["dmsc-answered-by"] == "letters@v1, letters@v2"
    assert won.json()["dmsc"]["version"] == "v2"
    url = str(http.base_url)
    mesh = ("--gateway", url, "--token", "ruth")
    command = ("ask", "letters", "abc", "--tokens", "5", "--temperature", "0", "--aggregation", "vote")
    done = await asyncio.to_thread(dmsc, *command, *mesh, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip("\n")) == (0, answer_to("abc", 5, seed=1)), done.stderr
    async with AsyncClient(url, token="ruth") as client:
        voted = await client.complete("letters", "abc", tokens=5, temperature=0, aggregation="vote")
        assert voted.choices[0].text == answer_to("abc", 5, seed=1)
        with pytest.raises(BadInput, match="consent: nothing of aggregation vote is kept"):
            await client.complete("letters", "abc", temperature=0, aggregation="vote", consent=True)
    for more, words in (
        ({"stream": True}, "stream"),
        ({"temperature": 1}, "temperature"),
        ({"aggregation": "weighted"}, "/v1/predict"),
        ({"aggregation": {"how": "vote", "over": "replicas"}}, "versions"),
    ):
        wrong = await post(http, "/v1/completions", **({**body, "aggregation": "vote"} | more))
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "unsupported_parameter")
        assert words in wrong.json()["error"]["message"]

    # `first`: the chosen instances of v1 are held, and others of the same version answer.
    pinned = body | {"model": "letters@v1", "aggregation": "first"}
    for _ in range(20):
        assert (await post(http, "/v1/completions", **pinned)).json()["choices"][0]["text"] == answer_to(
            "abc", 5
        )
    go = asyncio.Event()
    held: list[StandInInstance] = []

    def hold_one(instance: StandInInstance) -> Callable[[int], Any]:
        async def gate(number: int) -> None:
            if not held:
                held.append(instance)
            if held[0] is instance:
                await go.wait()

        return gate

    for each in served.last:
        each.gate = hold_one(each)
    hedged = await post(http, "/v1/completions", **pinned)
    assert hedged.json()["choices"][0]["text"] == answer_to("abc", 5)
    assert held
    go.set()
    await eventually(lambda: not served.working)
    await other.kill()


async def test_vectors_of_texts(served: Served, http: httpx.AsyncClient) -> None:
    response = await post(http, "/v1/embeddings", model="letters", input=["abc", [1, 2]])
    answer = response.json()
    assert response.status_code == 200, response.text
    assert [each["embedding"] for each in answer["data"]] == [[3.0, 294.0], [2.0, 3.0]]
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert (answer["object"], answer["pooled"]) == ("list", "mean of rows")
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert response.headers["dmsc-answered-by"] == "letters@v1"
    form = await post(http, "/v1/embeddings", model="letters", input="abc", encoding_format="base64")
    assert array("f", base64.b64decode(form.json()["data"][0]["embedding"])).tolist() == [3.0, 294.0]
    for change, status, code in (
        ({"input": ""}, 400, "bad_input"),
        ({"input": "x" * 300}, 400, "context_length_exceeded"),
        ({"input": [[256]]}, 400, "bad_input"),
        ({"dimensions": 3}, 400, "unsupported_parameter"),
        ({"model": "nobody"}, 404, "model_not_found"),
        ({"encoding_format": "int8"}, 400, "invalid_value"),
        ({"truncate": True}, 400, "unknown_parameter"),
    ):
        wrong = await post(http, "/v1/embeddings", **({"model": "letters", "input": "abc"} | change))
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (status, code), wrong.text
