"""What a gateway keeps of requests: both sides say so, it is redacted, it ends, it can be erased."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bus import subjects
from bus.connection import Bus
from dmsc.client.async_client import AsyncClient
from entities.gateway import Gateway
from entities.gateway.generation.session import GenerationSession
from schemas.envelope import EntityKind, Envelope
from schemas.serve_spec import KeepSpec
from schemas.services.keeping import KeptCollection, KeptItem
from schemas.services.model_service import ServiceList, ServiceQuery
from tests.builders.jobs import job, spec
from tests.integration.dmsc.command_line import dmsc
from tests.integration.entities.conftest import Dial, bearer
from tests.integration.entities.serving_stand_in import Gate, StandInInstance, answer_to, deploy
from tests.waiting import eventually

PROMPT = "I am ann@example.com"
ALL = KeepSpec(days=2, share=1.0, hide=("bluebird",))


class Keeping:
    """A service `letters` that keeps, one `plain` that does not, both answered by one instance each."""

    def __init__(self, bus: Bus, http: httpx.AsyncClient, instances: list[StandInInstance]) -> None:
        self.bus = bus
        self.http = http
        self.instances = instances

    async def ask(
        self, by: str = "ruth", prompt: str = PROMPT, model: str = "letters", said: str = "", **more: Any
    ) -> httpx.Response:
        headers = bearer(by) | ({"dmsc-consent": said} if said else {})
        body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0} | more
        return await self.http.post("/v1/completions", json=body, headers=headers)

    async def post(self, path: str, user: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return await self.http.post(path, json=body or {}, headers=bearer(user))

    async def items(self) -> list[KeptItem]:
        return [entry.message for entry in await self.bus.bucket(subjects.KEPT_ITEM).entries()]

    async def until(self, count: int) -> list[KeptItem]:
        async def are_there() -> bool:
            return len(await self.items()) == count

        await eventually(are_there)
        return await self.items()


@pytest.fixture
async def keeping(dial: Dial, gateway: Gateway, http: httpx.AsyncClient) -> AsyncIterator[Keeping]:
    bus = await dial("orchestrator-records", EntityKind.ORCHESTRATOR)
    instances = []
    for name in ("serve1", "serve2"):
        sid = f"{name}-s0-r0"
        instances.append(StandInInstance(await dial(sid, EntityKind.INSTANCE), sid, 1))
        await instances[-1].start()
    await deploy(bus, "letters", job="serve1", stages=1, keep=ALL)
    await deploy(bus, "plain", job="serve2", stages=1)
    view, book = gateway.follower.view, gateway.generations.book
    await eventually(
        lambda: all(
            view.active(job=name, stage=0) and gateway.jobs.cache.get(name) is not None
            for name in ("serve1", "serve2")
        )
    )
    await eventually(lambda: book.get("letters") is not None and book.get("plain") is not None)
    yield Keeping(bus, http, instances)
    for each in instances:
        await each.kill()


async def settled(gateway: Gateway) -> None:
    """Whatever was answered is stored by now."""
    await gateway.backflow.keeping.settle()


async def test_nothing_is_kept_unless_both_say_so(keeping: Keeping, gateway: Gateway) -> None:
    refused = await keeping.ask(said="maybe")
    assert refused.status_code == 400
    for response in (
        await keeping.ask(),
        await keeping.ask(said="none"),
        await keeping.ask(said="train", model="plain"),
        await keeping.ask("rob"),
    ):
        assert response.status_code == 200, response.text
        assert "dmsc-kept-until" not in response.headers
    plain = await keeping.post("/v1/consents/plain/give", "ruth")
    assert (plain.status_code, "keeps nothing" in plain.text) == (422, True)
    await settled(gateway)
    assert await keeping.items() == []

    # With a word in the request, and with one that was given before; not with `none` all the same.
    asked = await keeping.ask(said="train")
    assert "dmsc-kept-until" in asked.headers
    (item,) = await keeping.until(1)
    assert [message.text for message in item.messages] == ["I am [EMAIL]", answer_to(PROMPT, 6)]
    assert (item.redacted, item.version, item.until - item.at) == ({"email": 1}, "v1", 2 * 86_400)
    assert not item.standing
    assert "ruth" not in item.model_dump_json()
    given = await keeping.post("/v1/consents/letters/give", "ruth")
    assert given.json()["days"] == 2
    await keeping.ask(prompt="Bluebird flies")
    await keeping.ask(said="none")
    await keeping.ask("rob")
    await keeping.ask(user="customer")  # another person, who has said nothing
    items = await keeping.until(2)
    assert sorted(each.standing for each in items) == [False, True]
    await settled(gateway)
    assert len(await keeping.items()) == 2
    assert {message.text for each in items for message in each.messages} >= {"[HIDDEN] flies"}
    listed = (await keeping.http.get("/v1/consents", headers=bearer("ruth"))).json()
    assert [(each["service"], each["state"]) for each in listed["consents"]] == [("letters", "given")]


async def test_a_chat_and_a_stream_are_kept_whole(keeping: Keeping) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "call 415-555-0123"}]
    body = {
        "model": "letters",
        "messages": messages,
        "max_completion_tokens": 4,
        "temperature": 0,
        "stream": True,
    }
    headers = bearer("ruth") | {"dmsc-consent": "train"}
    async with keeping.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert "dmsc-kept-until" in response.headers
        lines = [line async for line in response.aiter_lines()]
    assert lines[-2] == "data: [DONE]"
    (item,) = await keeping.until(1)
    assert [(each.role, each.text) for each in item.messages[:2]] == [
        ("system", "be kind"),
        ("user", "call [PHONE]"),
    ]
    assert (item.messages[2].role, len(item.messages[2].text)) == ("assistant", 4)


@pytest.fixture
async def letters(keeping: Keeping, gateway: Gateway, dial: Dial) -> AsyncIterator[list[StandInInstance]]:
    """`letters` has two versions of two instances each, which share its traffic: these three come to it."""
    beside = []
    for sid in ("serve1-s0-r1", "serve3-s0-r0", "serve3-s0-r1"):
        beside.append(StandInInstance(await dial(sid, EntityKind.INSTANCE), sid, 1))
        await beside[-1].start()
    book, view = gateway.generations.book, gateway.follower.view
    former = book.get("letters")
    assert former is not None
    second = await deploy(keeping.bus, "letters", job="serve3", version="v2", stages=1, keep=ALL)
    versions, shares = (*former.versions, *second.versions), {"v1": 5_000, "v2": 5_000}
    both = second.model_copy(update={"versions": versions, "weights": shares, "stable": "v1"})
    await keeping.bus.bucket(subjects.MODEL_SERVICE).put(both, service="letters")
    await eventually(lambda: book.get("letters") == both and gateway.jobs.cache.get("serve3") is not None)
    await eventually(lambda: all(len(view.active(job=name, stage=0)) == 2 for name in ("serve1", "serve3")))
    yield [keeping.instances[0], *beside]
    for each in beside:
        await each.kill()


async def test_nothing_is_kept_of_votes_of_calls_within_a_request_or_of_batches(
    keeping: Keeping, gateway: Gateway, letters: list[StandInInstance]
) -> None:
    await keeping.post("/v1/consents/letters/give", "ruth")
    headers = bearer("ruth") | {"dmsc-consent": "train"}
    voted = await keeping.ask(said="train", aggregation="vote")
    assert voted.headers["dmsc-answered-by"] == "letters@v1, letters@v2"
    assert "dmsc-kept-until" not in voted.headers

    text = {"model": "letters", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    chat = {"model": "letters", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6}
    calls = [
        {"path": "/v1/completions", "body": text},
        {"path": "/v1/completions", "body": text | {"aggregation": "first"}},
        {"path": "/v1/chat/completions", "body": chat},
    ]
    called = await keeping.http.post("/v1/aggregate", json={"calls": calls}, headers=headers)
    assert [each["status"] for each in called.json()["answers"]] == [200] * 3
    assert "dmsc-kept-until" not in called.headers

    made = await keeping.http.post(
        "/v1/files",
        files={"file": ("in.jsonl", json.dumps(text).encode())},
        data={"purpose": "batch"},
        headers=headers,
    )
    file = made.json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await keeping.http.post("/v1/batches", json=asked, headers=headers)).json()["id"]

    async def is_over() -> bool:
        view = (await keeping.http.get(f"/v1/batches/{batch}", headers=headers)).json()
        counts = {"total": 1, "completed": 1, "failed": 0}
        return bool(view["status"] == "completed" and view["request_counts"] == counts)

    await eventually(is_over)
    await settled(gateway)
    assert await keeping.items() == []
    await keeping.ask()  # the consent is there: what is asked by itself is kept
    await keeping.until(1)


async def test_of_two_answers_beside_each_other_the_one_that_was_given_is_kept(
    keeping: Keeping, gateway: Gateway, letters: list[StandInInstance]
) -> None:
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

    for each in letters:
        each.gate = hold_first(each)
    asked = await keeping.ask(said="train", aggregation="first")
    assert "dmsc-kept-until" in asked.headers
    assert len(sessions) == 2
    go.set()
    for session in sessions:
        await session.ended.wait()
    # Versions are compared by the late one, too: it has become whole, though nobody got it.
    assert [each.finished and each.finished.ended for each in sessions] == ["length"] * 2
    await settled(gateway)
    (item,) = await keeping.items()
    assert item.item == asked.headers["dmsc-generation"]

    # Nor is one kept that becomes whole for that alone, once its client has left.
    go.clear()

    async def gate(number: int) -> None:
        if number == 2:
            await go.wait()

    for each in letters:
        each.gate = gate
    body = {"model": "letters", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True}
    headers = bearer("ruth") | {"dmsc-consent": "train"}
    async with keeping.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert "dmsc-kept-until" in response.headers
    left = sessions[-1]
    await eventually(lambda: left.is_left)
    go.set()
    await left.ended.wait()
    assert left.finished is not None
    assert left.finished.ended == "length"
    await settled(gateway)
    assert [each.item for each in await keeping.items()] == [item.item]


async def test_feedback_is_the_askers_own(keeping: Keeping) -> None:
    asked = await keeping.ask(said="train")
    correction = "write b@c.de about Bluebird"
    body = {"generation": asked.headers["dmsc-generation"], "rating": -1, "correction": correction}
    assert (await keeping.post("/v1/feedback", "rob", body)).status_code == 404
    assert (await keeping.post("/v1/feedback", "ruth", body | {"rating": 2})).status_code == 422
    assert (await keeping.post("/v1/feedback", "ruth", body)).status_code == 200
    (item,) = await keeping.items()
    assert item.feedback is not None
    assert (item.feedback.rating, item.feedback.correction) == (-1.0, "write [EMAIL] about [HIDDEN]")


async def test_a_withdrawal_erases_and_lasts(keeping: Keeping) -> None:
    await keeping.post("/v1/consents/letters/give", "ruth")
    await keeping.ask()
    await keeping.ask(said="train", user="customer")
    await keeping.ask("rob", said="train")
    kept = await keeping.until(3)
    began = time.time()
    withdrawn = await keeping.post("/v1/consents/letters/withdraw", "ruth")
    assert (withdrawn.json()["state"], withdrawn.json()["erased"]) == ("withdrawn", 2)
    assert withdrawn.json()["at"] >= began + 5.0  # by which clocks of gateways may differ
    unknown = await keeping.post("/v1/consents/nosuch/withdraw", "ruth")  # else anybody could fill the bucket
    assert (unknown.status_code, "no service nosuch" in unknown.text) == (404, True)
    (left,) = await keeping.items()
    # What comes back from a disk, or was under way, is not trained on.
    back = next(item for item in kept if item.user != left.user)
    await keeping.bus.bucket(subjects.KEPT_ITEM).put(back, **key_of(back))
    made = (await keeping.post("/v1/services/letters/kept/collections", "ruth")).json()
    assert made["items"] == 1
    assert [each.item for each in await keeping.items()] == [left.item]


def key_of(item: KeptItem) -> dict[str, str]:
    return {"service": item.service, "user": item.user, "subject": item.subject, "item": item.item}


async def test_a_collection_is_its_owners_and_goes_with_a_subject(keeping: Keeping, gateway: Gateway) -> None:
    for user, subject in (("rob", "a"), ("rob", "b"), ("olga", "c")):
        await keeping.ask(user, said="train", user=subject)
    await keeping.until(3)
    kept = "/v1/services/letters/kept"
    for user in ("vera", "rob", "olga"):
        for path in (kept, f"{kept}/collections/1"):
            assert (await keeping.http.get(path, headers=bearer(user))).status_code == 403, (user, path)
        assert (await keeping.post(f"{kept}/collections", user)).status_code == 403
    for user in ("vera", "rob"):
        assert (await keeping.post(f"{kept}/erase", user, {"user": "olga"})).status_code == 403
    assert len(await keeping.items()) == 3
    # An operator may erase what they may not read.
    assert (await keeping.post(f"{kept}/erase", "olga", {"user": "rob"})).json()["items"] == 2
    await keeping.ask("ruth", said="train", user="d")
    await keeping.until(2)

    made = (await keeping.post(f"{kept}/collections", "ruth")).json()
    assert (made["number"], made["items"], made["users"], made["marks"]) == (1, 2, 2, "")
    lines = (await keeping.http.get(f"{kept}/collections/1", headers=bearer("ruth"))).text.splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0])["messages"][0] == {"role": "user", "content": "I am [EMAIL]"}
    refused = await keeping.post(f"{kept}/collections", "ruth", {"share": 0.4})
    assert (refused.status_code, "2 users have items" in refused.text) == (422, True)

    # A job that has read it is named; another user may not read it.
    learnt = job("learnt", spec=spec(data={"kind": "text", "source": made["source"]}), user="ruth")
    await keeping.bus.bucket(subjects.JOB_RECORD).put(learnt, job="learnt")
    await eventually(lambda: gateway.jobs.cache.get("learnt") is not None)
    document = spec(data={"kind": "text", "source": made["source"]}).model_dump(mode="json")
    stolen = await keeping.post("/v1/jobs", "rob", document)
    assert stolen.status_code == 403, stolen.text

    erased = (await keeping.post(f"{kept}/erase", "ruth", {"user": "ruth", "subject": "d"})).json()
    assert erased == {
        "service": "letters",
        "items": 1,
        "collections": [1],
        "jobs": ["learnt"],
        "models": [],
        "versions": [],
    }
    gone = await keeping.http.get(f"{kept}/collections/1", headers=bearer("ruth"))
    assert (gone.status_code, "was removed: a subject was erased" in gone.text) == (404, True)
    again = (await keeping.post(f"{kept}/collections", "ruth")).json()
    assert (again["number"], again["items"]) == (2, 1)
    summary = (await keeping.http.get(kept, headers=bearer("ruth"))).json()
    assert (summary["items"], [each["number"] for each in summary["collections"]]) == (1, [2])


async def test_the_command_line_gives_shows_and_takes_back(
    keeping: Keeping, gateway: Gateway, tmp_path: Path
) -> None:
    async def run(user: str, *command: str) -> tuple[int, str, str]:
        mesh = ("--gateway", str(keeping.http.base_url), "--token", user)
        done = await asyncio.to_thread(dmsc, *command, *mesh, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    code, text, errors = await run("ruth", "consent", "give", "letters")
    assert (code, "letters may keep prompt, answer, feedback for 2 days" in text) == (0, True), (text, errors)
    code, _, errors = await run("ruth", "consent", "give", "plain")
    assert (code, "keeps nothing" in errors, len(errors.splitlines())) == (2, True, 1), errors
    async with AsyncClient(str(keeping.http.base_url), token="rob") as rob:
        given = await rob.give_consent("letters")
        assert (given.service, given.state, given.days) == ("letters", "given", 2)
        (listed,) = await rob.consents()
        assert listed == given
    for user in ("ruth", "rob"):
        await keeping.ask(user)
    await keeping.until(2)
    code, text, errors = await run("ruth", "consent", "list", "--json")
    assert [each["service"] for each in json.loads(text)["consents"]] == ["letters"], errors
    code, text, errors = await run("ruth", "service", "kept", "letters")
    assert text.startswith("2 requests of 2 users (2 subjects), 0 with feedback"), (text, errors)
    code, _, errors = await run("rob", "service", "kept", "letters")
    assert (code, len(errors.splitlines())) == (4, 1), errors

    async def services(query: ServiceQuery, envelope: Envelope) -> ServiceList:
        entries = await keeping.bus.bucket(subjects.MODEL_SERVICE).entries()
        return ServiceList(services=tuple(entry.message for entry in entries))

    await keeping.bus.serve(subjects.SERVICES_QUERY, services)

    # Who has no right to erase is told so, and nothing goes.
    code, _, errors = await run("rob", "data", "erase", "ruth")
    assert (code, len(errors.splitlines())) == (4, 1), errors
    assert errors.startswith("dmsc: nothing was erased, for no service is yours: ")
    assert len(await keeping.items()) == 2
    await deploy(keeping.bus, "hers", job="serve3", stages=1)
    service = await keeping.bus.bucket(subjects.MODEL_SERVICE).get(service="hers")
    assert service is not None
    of_rob = service.message.model_copy(update={"user": "rob"})
    await keeping.bus.bucket(subjects.MODEL_SERVICE).put(of_rob, service="hers")
    book = gateway.generations.book
    await eventually(lambda: (found := book.get("hers")) is not None and found.user == "rob")
    code, text, errors = await run("ruth", "data", "erase", "rob", "--json")
    assert (code, errors) == (0, "not erased of services that are others': hers\n")
    counts = {each["service"]: each["items"] for each in json.loads(text)["erased"]}
    assert counts == {"letters": 1, "plain": 0}
    code, text, errors = await run("ruth", "consent", "withdraw", "letters")
    assert (code, text) == (0, "letters keeps nothing of yours any more; 1 requests were erased\n"), errors
    assert await keeping.items() == []


async def test_what_ends_is_gone(keeping: Keeping, gateway: Gateway) -> None:
    await keeping.ask(said="train")
    (item,) = await keeping.until(1)
    made = (await keeping.post("/v1/services/letters/kept/collections", "ruth")).json()
    bucket = keeping.bus.bucket(subjects.KEPT_COLLECTION)
    entry = await bucket.get(service="letters", number=1)
    assert entry is not None
    ended: KeptCollection = entry.message.model_copy(update={"until": 1.0})
    await bucket.put(ended, service="letters", number=1)
    assert await gateway.backflow.sweep() == 1
    gone = await keeping.http.get(
        f"/v1/services/letters/kept/collections/{made['number']}", headers=bearer("ruth")
    )
    assert "come to its end date" in gone.text
    # Nor does a file stay that a gateway stored, and died, while it was removed.
    await keeping.bus.objects.put("kept/letters/1.jsonl", b"{}")
    assert await gateway.backflow.sweep() == 0
    assert await keeping.bus.objects.list("kept/") == []
    # The server itself removes items: their rows have an end.
    await keeping.bus.bucket(subjects.KEPT_ITEM).put(item, ttl_s=1.0, **key_of(item))
    await keeping.until(0)


async def test_a_subject_of_one_user_is_not_that_of_another(keeping: Keeping) -> None:
    await keeping.ask("ruth", said="train", user="same")
    await keeping.ask("rob", said="train", user="same")
    first, second = sorted(await keeping.until(2), key=lambda item: item.at)
    assert first.subject != second.subject
    await keeping.post("/v1/consents/letters/withdraw", "rob", {"subject": "same"})
    (left,) = await keeping.items()
    assert left == first
