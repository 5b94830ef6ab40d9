"""The doors of model services: answers, streams, refusals; lost owners, messages, gateways (ADR-0146)."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from bus import subjects
from bus.tap.live_tap import Tap
from bus.tap.message import TappedMessage
from dmsc.metrics.exposition import Exposition
from entities.gateway import Gateway, GatewayConfig
from schemas.accounts import ServiceUse
from schemas.envelope import EntityKind
from tests.integration.entities.conftest import Dial, Start, bearer
from tests.integration.entities.serving_stand_in import RUTH, Served, answer_to, complete, deploy
from tests.patience import PATIENCE_S
from tests.waiting import eventually


class EventReader:
    """An open stream, read event by event: pairs of id and data."""

    def __init__(self, response: httpx.Response) -> None:
        self.headers = response.headers
        self._lines = response.aiter_lines()

    async def __aiter__(self) -> AsyncIterator[tuple[str, Any]]:
        number, data = "", ""
        async for line in self._lines:
            if line.startswith("id: "):
                number = line[4:]
            elif line.startswith("data: "):
                data = line[6:]
            elif not line and data:
                yield number, data if data == "[DONE]" else json.loads(data)
                number, data = "", ""


async def test_answers_in_the_shapes_of_openai(served: Served, http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models", headers=RUTH)).json()
    assert [each["id"] for each in listed["data"]] == ["letters", "letters@v1"]
    assert (await http.get("/v1/models/letters", headers=RUTH)).json()["object"] == "model"

    response = await complete(http)
    assert response.status_code == 200, response.text
    answer = response.json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (answer_to("abc", 8), "length")
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert response.headers["dmsc-answered-by"] == "letters@v1"
    assert answer["dmsc"]["exact"] is True

    # Several prompts, a stop, log-probabilities, a pinned version.
    whole = answer_to("abc", 8)
    answer = (
        await complete(http, ["abc", "abd"], n=2, model="letters@v1", logprobs=2, stop=whole[3:5])
    ).json()
    assert [each["text"] for each in answer["choices"]][:2] == [whole[:3]] * 2
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    told = answer["choices"][0]["logprobs"]
    assert told["token_logprobs"][0] == -0.5
    assert len(told["top_logprobs"][0]) in (1, 2)
    assert answer["choices"][0]["finish_reason"] == "stop"

    # A seed gives the same draws again, and so does an idempotency key.
    drawn = [(await complete(http, temperature=1, seed=7)).json()["choices"][0]["text"] for _ in range(2)]
    assert drawn == [answer_to("abc", 8, seed=8)] * 2
    keyed = RUTH | {"Idempotency-Key": "once"}
    body = {"model": "letters", "prompt": "abc", "max_tokens": 8}
    texts = [
        (await http.post("/v1/completions", json=body, headers=keyed)).json()["choices"][0]["text"]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]

    chat = {
        "model": "letters",
        "messages": [{"role": "user", "content": "abc"}],
        "max_completion_tokens": 5,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
    }
    answer = (await http.post("/v1/chat/completions", json=chat, headers=RUTH)).json()
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": answer_to("user: abc\nassistant:", 5), "refusal": None}
    assert len(answer["choices"][0]["logprobs"]["content"]) == 5
    # Nobody works for a session any more.
    await eventually(lambda: not served.working)


async def test_streams_end_with_done_and_usage(served: Served, http: httpx.AsyncClient) -> None:
    body = {
        "model": "letters",
        "prompt": "abc",
        "max_tokens": 6,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with http.stream("POST", "/v1/completions", json=body, headers=RUTH) as response:
        events = [event async for event in EventReader(response)]
        assert response.headers["dmsc-generation"]
    assert [number for number, _ in events] == ["1", "2", "3", "4", "5", "6", "", ""]
    assert "".join(data["choices"][0]["text"] for _, data in events[:6]) == answer_to("abc", 6)
    assert events[6][1]["usage"]["completion_tokens"] == 6
    assert events[7][1] == "[DONE]"

    chat = body | {"messages": [{"role": "user", "content": "abc"}], "n": 2}
    del chat["prompt"]
    async with http.stream("POST", "/v1/chat/completions", json=chat, headers=RUTH) as response:
        events = [event async for event in EventReader(response)]
    deltas = [choice for _, data in events[:-1] for choice in data["choices"]]
    for index in range(2):
        texts = [each["delta"]["content"] for each in deltas if each["index"] == index]
        assert "".join(texts) == answer_to("user: abc\nassistant:", 6)
    assert {each["finish_reason"] for each in deltas} == {None, "length"}


async def test_lost_owners_and_messages_cost_no_token(served: Served, http: httpx.AsyncClient) -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def gate(number: int) -> None:
        if number == 4:
            reached.set()
            await go.wait()

    served.gate(gate)
    for each in served.last:
        each.lost_positions = {2}
    asked = asyncio.create_task(complete(http))
    await reached.wait()
    victims = served.working
    assert {each.is_last for each in victims} == {True, False}
    for victim in victims:  # neighbours, at once
        await victim.kill()
    others = [each for each in served.instances.values() if each not in victims]
    await eventually(lambda: all(each.binds for each in others), "nobody took the session")
    go.set()
    response = await asked
    assert response.json()["choices"][0]["text"] == answer_to("abc", 8)


async def test_a_client_that_leaves_ends_its_session(served: Served, http: httpx.AsyncClient) -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def gate(number: int) -> None:
        if number == 3:
            reached.set()
            await go.wait()

    served.gate(gate)
    for stream in (False, True):
        reached.clear()
        asked = asyncio.create_task(complete(http, stream=stream))
        await reached.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await eventually(lambda: not served.working)
    assert {record.ended for record in await served.records()} == {"cancelled"}
    go.set()


async def test_another_gateway_goes_on_with_a_stream(
    served: Served, http: httpx.AsyncClient, gateway: Gateway, dial: Dial, start: Start
) -> None:
    other = Gateway(
        await dial("gateway-west", EntityKind.GATEWAY), GatewayConfig(cluster="west", http_port=0)
    )
    await start(other)
    assert other.url is not None
    await eventually(lambda: other.generations.book.get("letters") and other.jobs.cache.get("serve1"))
    reached, go = asyncio.Event(), asyncio.Event()

    async def gate(number: int) -> None:
        if number == 4:
            reached.set()
            await go.wait()

    served.gate(gate)
    body = {
        "model": "letters",
        "prompt": "abc",
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "logprobs": 1,
    }
    async with http.stream("POST", "/v1/completions", json=body, headers=RUTH) as response:
        events = aiter(EventReader(response))
        seen = [await anext(events) for _ in range(3)]
        await reached.wait()
        id = response.headers["dmsc-generation"]
        async with httpx.AsyncClient(base_url=other.url, timeout=PATIENCE_S, trust_env=False) as west:
            # Somebody else's answer is nobody's business.
            stranger = await west.get(f"/v1/generations/{id}/events", headers=bearer("rob"))
            assert stranger.status_code == 404
            headers = RUTH | {"Last-Event-ID": "2"}
            async with west.stream("GET", f"/v1/generations/{id}/events", headers=headers) as rest:
                assert rest.status_code == 200
                following = asyncio.create_task(_all(EventReader(rest)))
                (record,) = await served.records()
                assert (record.writer, record.fence) == ("gateway-west", 2)
                served.gate(None)
                go.set()
                later = await following
        former = [event async for event in events]  # its gateway learns of the fence, and stops
    assert [number for number, _ in seen] == ["1", "2", "3"]
    assert former[-1:] != [("", "[DONE]")]
    assert [number for number, _ in later] == ["3", "4", "5", "6", "7", "8", ""]
    text = "".join(data["choices"][0]["text"] for _, data in [*seen[:2], *later[:-1]])
    assert text == answer_to("abc", 8)
    assert all(data["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] for _, data in later[:-1])


async def _all(events: EventReader) -> list[tuple[str, Any]]:
    return [event async for event in events]


REFUSALS: tuple[tuple[dict[str, Any], int, str, str], ...] = (
    ({"model": "nobody"}, 404, "model_not_found", "letters"),
    ({"model": "letters@v9"}, 404, "model_not_found", "letters@v1"),
    ({"max_tokens": 500}, 400, "context_length_exceeded", "200"),
    ({"tools": [{"type": "function"}]}, 400, "unsupported_parameter", "tool calls"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "JSON mode"),
    ({"frequency_penalty": 0.5}, 400, "unsupported_parameter", "frequency_penalty"),
    ({"temprature": 1}, 400, "unknown_parameter", "temprature"),
    ({"temperature": -1}, 400, "invalid_value", "temperature"),
    ({"prompt": ""}, 400, "bad_input", "prompt"),
    ({"prompt": [256]}, 400, "bad_input", "256"),
    ({"n": 17}, 400, "invalid_value", "n"),
    ({"prompt": ["a", "b", "c"], "n": 6}, 400, "bad_input", "18 answers"),
    ({"prompt": ["a"] * 100_000}, 400, "bad_input", "100000 answers"),
)
"""A change of a request, its status and code, and words of its message."""


async def test_refusals_name_what_is_wrong(served: Served, http: httpx.AsyncClient) -> None:
    for change, status, code, words in REFUSALS:
        response = await complete(http, **change)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (status, code), response.text
        assert words in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
    for headers, status in (({}, 401), (bearer("nobody"), 401), (bearer("vera"), 403)):
        body = {"model": "letters", "prompt": "abc"}
        response = await http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == status
        assert response.json()["error"]["message"]
    response = await http.post("/v1/completions", content=b"{", headers=RUTH)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]
    # What asks for nothing is no reason to refuse.
    neutral: dict[str, Any] = {"frequency_penalty": 0, "logit_bias": None, "store": False, "best_of": 1}
    assert (await complete(http, **neutral)).status_code == 200
    for each in served.last:
        each.load = each.load.model_copy(update={"most_sessions": 0})
    response = await complete(http)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_tensors_in_and_out(served: Served, http: httpx.AsyncClient) -> None:
    await deploy(served.bus, "tensors", kind="predict")
    data = base64.b64encode(bytes(range(4))).decode()
    inputs = {"x": [[1, 2.5], [3, 4]], "y": {"dtype": "uint8", "shape": [2, 2], "data": data}}

    async def ask(inputs: dict[str, Any]) -> httpx.Response:
        return await http.post("/v1/predict", json={"model": "tensors", "inputs": inputs}, headers=RUTH)

    await eventually(lambda: _is_known(http))
    answer = (await ask(inputs)).json()
    assert answer["outputs"]["x_again"]["values"] == [[1.0, 2.5], [3.0, 4.0]]
    assert answer["outputs"]["y_again"]["values"] == [[0, 1], [2, 3]]
    for wrong, words in (
        ({"x": [[1], [2, 3]]}, "one length"),
        ({"x": {"dtype": "float32", "shape": [3], "data": data}}, "12"),
        ({"x": "text"}, "inputs.x"),
        ({"x": {"dtype": ["float32"], "values": [1]}}, "dtype"),
        ({"x" * 121: [1]}, "inputs"),
        ({"x": [[]] * 300_000}, "more than 262,144 lists"),
        ({"x": {"dtype": "bool", "shape": [4], "data": data}}, "0 or 1"),
    ):
        response = await ask(wrong)
        assert response.status_code == 422
        assert words in response.json()["detail"]


def _numbers(value: Any) -> list[list[Any]]:
    """Each list of numbers in a tree of plain values."""
    if isinstance(value, dict):
        return [found for each in value.values() for found in _numbers(each)]
    if isinstance(value, list | tuple):
        whole = [list(value)] if value and all(isinstance(each, int | float) for each in value) else []
        return whole + [found for each in value for found in _numbers(each)]
    return []


async def test_what_is_answered_is_counted_and_a_tap_shows_nothing_of_it(
    served: Served, gateway: Gateway, http: httpx.AsyncClient, dial: Dial
) -> None:
    await deploy(served.bus, "tensors", kind="predict")
    await eventually(lambda: _is_known(http))
    seen: list[TappedMessage] = []
    text, answer = "an okapi eats", answer_to("an okapi eats", 8)
    secret = base64.b64encode(b"OKAPI-TENSOR").decode()
    async with Tap(await dial("tap", EntityKind.TAP), (">", "$KV.>"), replies=True) as tap:

        async def listen() -> None:
            async for tapped in tap:
                seen.append(tapped)

        listening = asyncio.create_task(listen())
        assert (await complete(http, text, logprobs=2, stop="okapi stop")).status_code == 200
        keyed = RUTH | {"Idempotency-Key": "once"}
        chat = {"model": "letters", "messages": [{"role": "user", "content": text}], "stream": True}
        chat |= {"max_completion_tokens": 8, "temperature": 0}
        asked = await http.post("/v1/chat/completions", json=chat, headers=keyed)
        assert asked.text.count("data: ") >= 9
        inputs = {"x": {"dtype": "uint8", "shape": [12], "data": secret}}
        asked = await http.post("/v1/predict", json={"model": "tensors", "inputs": inputs}, headers=RUTH)
        assert secret in asked.text or "outputs" in asked.json()
        for each in served.last:
            each.load = each.load.model_copy(update={"most_sessions": 0})
        assert (await complete(http)).status_code == 429

        def told() -> dict[str, Any] | None:
            """What the gateway said of the version, once it has counted all."""
            messages = [each.message for each in seen if each.row is subjects.SERVICE_FIGURES]
            figures = [each for message in messages for each in message.versions if each.service == "letters"]
            return figures[-1] if figures and figures[-1].refused else None

        figures = await eventually(told)
        rows = {"generation", "bind session", "wave tokens", "predict", "service figures"}
        await eventually(lambda: rows <= {each.row.name for each in seen if each.row is not None})

        async def shown() -> dict[str, Any] | None:
            """The version's row of the page of services, once the page has heard of it."""
            page = await http.get("/v1/overview", params={"part": "services"}, headers=bearer("vera"))
            (row,) = [row for row in page.json()["services"] if row["service"] == "letters"]
            version: dict[str, Any] = row["versions"][0]
            return version if "requests_per_s" in version else None

        row = await eventually(shown)
        listening.cancel()
    assert figures.requests == {"full": 1, "ok": 2}
    assert (figures.tokens, sum(figures.first_token), figures.sessions, figures.waiting) == (16, 2, 0, 0)
    assert set(figures.loads) <= set(served.instances)
    assert (row["weight"], row["stable"], row["sessions"], row["waiting"]) == (1.0, True, 0, 0)

    exposition = Exposition()
    exposition.add(served.bus, gateway)
    page = (await exposition.render(""))[0].decode()
    names = 'gateway="gateway-east",service="letters",version="v1"'
    for line in (
        f'dmsc_service_requests_total{{{names},outcome="ok"}} 2.0',
        f'dmsc_service_requests_total{{{names},outcome="full"}} 1.0',
        f'dmsc_service_tokens_total{{{names},kind="answer"}} 16.0',
        f"dmsc_service_first_token_seconds_count{{{names}}} 2.0",
        f"dmsc_service_weight_ratio{{{names}}} 1.0",
        f"dmsc_service_sessions{{{names}}} 0.0",
    ):
        assert _sorted_labels(line) in {_sorted_labels(each) for each in page.splitlines()}, line

    tokens = [list(each.encode()) for each in (text, answer)]
    for tapped in seen:
        tree = tapped.tree()
        words = repr(tree).encode() + tapped.raw
        assert b"okapi" not in words.lower(), tapped.subject
        assert answer.encode() not in words, tapped.subject
        for numbers in _numbers(tree):
            for token in tokens:
                ends = range(len(numbers) - len(token) + 1)
                assert not any(numbers[at : at + len(token)] == token for at in ends), tapped.subject
        for wave in tree["body"]["tokens"] if tapped.row is subjects.WAVE_TOKENS else ():
            assert (wave["token"], wave["logprob"]) == (0, 0.0)


def _sorted_labels(line: str) -> str:
    """A line of a page of metrics with its labels in order of their names."""
    name, opened, rest = line.partition("{")
    labels, closed, value = rest.partition("}")
    return name + opened + ",".join(sorted(labels.split(","))) + closed + value


async def _is_known(http: httpx.AsyncClient) -> bool:
    return (await http.get("/v1/models/tensors", headers=RUTH)).status_code == 200


async def test_what_a_user_was_given_is_told_the_accountant_once(
    served: Served, http: httpx.AsyncClient, gateway: Gateway, dial: Dial
) -> None:
    """Also if a client comes back for the end of an answer; copies for a version in shadow are nobody's."""
    service = gateway.generations.book.get("letters")
    assert service is not None
    (stable,) = service.versions
    versions = (stable, stable.model_copy(update={"version": "v2"}))
    changed = service.model_copy(update={"versions": versions, "shadow": ("v2",)})
    await served.bus.bucket(subjects.MODEL_SERVICE).put(changed, service="letters")
    await eventually(lambda: gateway.generations.book.get("letters") == changed)
    accountant = await dial("accountant", EntityKind.ACCOUNTANT)
    response = await complete(http)
    assert response.status_code == 200

    async def over() -> bool:
        found = {(record.version, record.ended) for record in await served.records()}
        return found == {("v1", "length"), ("v2", "length")}

    await eventually(over)
    id = response.headers["dmsc-generation"]
    again = await http.get(f"/v1/generations/{id}/events", headers=RUTH | {"Last-Event-ID": "6"})
    assert again.text.rstrip().endswith("[DONE]")
    await eventually(over)
    now = time.time()

    async def told() -> list[ServiceUse]:
        records = [each.message async for each in accountant.history(subjects.USE_REPORT)]
        return list(records[-1].uses) if records and records[-1].at > now else []

    (use,) = await eventually(told)
    assert (use.job, use.user, use.prompt_tokens, use.tokens, use.answers) == ("serve1", "ruth", 3, 8, 1)
