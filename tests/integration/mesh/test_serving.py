"""What was trained serves: eight clients at once, with kills, get what each one gets alone (ADR-0146)."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from bus import subjects
from bus.server.embedded import EmbeddedServer
from dmsc.backflow.learning import LearnOptions, learn
from dmsc.client.async_client import AsyncClient
from schemas.errors import NotFound
from schemas.job import JobSpec, JobState
from schemas.registry import InstanceState, ServiceRecord
from schemas.services.batches import UNIT_LINES
from schemas.services.completion import Completion
from schemas.services.model_service import ModelService, ServedVersion, VersionState
from tests.integration.mesh.conftest import tiny_job
from tests.integration.mesh.own_mesh import CLUSTERS, TOKEN, OwnMesh, Witness
from tests.patience import PATIENCE_S
from tests.waiting import eventually

CONTEXT = 32
PROMPTS = ("def parse(", "import ", "class A", "    return", "x", "for each in", "# a", "self.")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> Iterator[OwnMesh]:
    """Two clusters of three slots; gateways with HTTP doors."""
    mesh = OwnMesh(tmp_path_factory.mktemp("own"), [server])
    for cluster in CLUSTERS:
        mesh.commands[f"gateway-{cluster}"] = ["run", "gateway", "--cluster", cluster, "--http-port", "0"]
    with mesh.running():
        yield mesh


async def gateway_urls(witness: Witness) -> list[str]:
    """Of both gateways, as the registry has them, that of cluster a first."""

    async def found() -> list[str] | None:
        entries = await witness.bus.bucket(subjects.REGISTRY_RECORD).entries()
        records = sorted((entry.message for entry in entries), key=lambda record: record.sid)
        urls = [
            record.endpoint.address
            for record in records
            if record.sid.startswith("gateway-") and record.endpoint.address
        ]
        return urls if len(urls) == len(CLUSTERS) else None

    urls: list[str] = await eventually(found)
    return urls


@pytest.fixture
async def client(witness: Witness) -> AsyncIterator[AsyncClient]:
    urls = await gateway_urls(witness)
    async with AsyncClient(urls, token=TOKEN, timeout_s=PATIENCE_S, patience_s=PATIENCE_S) as client:
        yield client


async def trained(witness: Witness) -> str:
    """A job that is done; one for all tests here."""
    entries = await witness.bus.bucket(subjects.JOB_RECORD).entries()
    done = [
        each.message.job for each in entries if each.message.spec.name == "learns" and each.message.weights
    ]
    if done:
        return str(done[0])
    job = await witness.submit(tiny_job("learns", training={"steps": 3, "validation_microbatches": 0}))
    assert (await witness.ended(job)).state is JobState.DONE
    return job


def served(job: str, service: str = "library", replicas: Any = 1, **serve: Any) -> JobSpec:
    """A version of what the job has trained, over two stages."""
    return tiny_job(
        "served",
        initial_weights=f"job:{job}",
        parallel={"stages": 2, "replicas": replicas},
        serve={"service": service, "exact": "required", "chunk_tokens": 4, **serve},
    )


async def ready(client: AsyncClient, name: str = "library") -> ModelService:
    async def found() -> ModelService | None:
        service = await client.service(name)
        version = service.versions[-1]
        assert version.state is not VersionState.REFUSED, version.reason
        return service if version.state is VersionState.READY else None

    service: ModelService = await eventually(found)
    return service


async def answer(client: AsyncClient, prompt: str, seed: int, service: str = "library") -> Completion:
    temperature = 0.0 if seed % 2 else 1.0
    return await client.complete(
        service, prompt, tokens=CONTEXT - len(prompt) - 1, temperature=temperature, seed=seed, digests=True
    )


def essence(completion: Completion) -> tuple[str, tuple[str, ...] | None]:
    return completion.choices[0].text, completion.dmsc.digests


async def test_answers_are_the_same_whoever_dies(own: OwnMesh, witness: Witness, client: AsyncClient) -> None:
    job = await trained(witness)
    await client.deploy(served(job))
    service = await ready(client)
    serving = service.versions[0].job
    alone = [essence(await answer(client, prompt, seed)) for seed, prompt in enumerate(PROMPTS)]
    assert all(
        digests and len(digests) == CONTEXT - len(prompt) - 1
        for (_, digests), prompt in zip(alone, PROMPTS, strict=True)
    )

    answered: list[int] = []

    async def ask_for_long(seed: int, prompt: str, over: asyncio.Event) -> int:
        """Asks again and again, and compares; returns how often."""
        asked = 0
        while not (over.is_set() and asked):
            assert essence(await answer(client, prompt, seed)) == alone[seed], (seed, asked)
            asked += 1
            answered.append(seed)
        return asked

    async def lose_owner(stage: int) -> None:
        """Once answers come: sessions are bound then, to the one that is killed."""
        before = len(answered)
        await eventually(lambda: len(answered) > before)
        await kill_owner(witness, serving, stage)

    over = asyncio.Event()
    async with asyncio.TaskGroup() as clients:
        asking = [
            clients.create_task(ask_for_long(seed, prompt, over)) for seed, prompt in enumerate(PROMPTS)
        ]
        try:
            for stage in (1, 0):
                await lose_owner(stage)
            for _ in range(5):  # the answers of the killed one may be at their ends
                if goes_on := await takes_over(witness, own, answered):
                    break
            assert goes_on, "no answer of five killed gateways was gone on with"
            before = await witness.leader()
            own.kill("smo-1")
            own.start("smo-1")
            await witness.until_next_term(before)
            await lose_owner(1)
        finally:
            over.set()
    assert all(task.result() for task in asking)
    assert "owners lost" in log_of(own, "gateway-a") + log_of(own, "gateway-b")
    await client.stop_service("library")


async def test_a_batch_has_each_answer_once_whoever_dies(
    own: OwnMesh, witness: Witness, client: AsyncClient, tmp_path: Path
) -> None:
    await client.deploy(served(await trained(witness), "night"))
    serving = (await ready(client, "night")).versions[0].job
    vectors = await client.embed("night", list(PROMPTS[:2]))
    asked = [
        {"prompt": prompt, "max_tokens": 6, "temperature": seed % 2, "seed": seed, "digests": True}
        for seed, prompt in enumerate(PROMPTS)
    ]
    alone = [
        essence(
            await client.complete(
                "night",
                body["prompt"],
                tokens=6,
                temperature=body["temperature"],
                seed=body["seed"],
                digests=True,
            )
        )
        for body in asked
    ]
    count = 5 * UNIT_LINES
    bodies = [asked[number % len(asked)] for number in range(count)]
    lines = [json.dumps({"custom_id": f"r{number}", **body}) for number, body in enumerate(bodies)]
    file = await client.upload_file("\n".join(lines).encode())
    batch = await client.create_batch(file.id, model="night")

    async def committed() -> int:
        entries = await witness.bus.bucket(subjects.BATCH_UNIT).entries(batch=batch.id)
        return len(entries)

    await eventually(committed)
    record = await witness.bus.bucket(subjects.BATCH).get(batch=batch.id)
    assert record is not None
    worker = record.message.gateway
    own.kill(worker)
    assert await committed() < 5
    await kill_owner(witness, serving, 1)
    (other,) = {"gateway-a", "gateway-b"} - {worker}
    await eventually(lambda: "batch taken over" in log_of(own, other))
    own.start(worker)
    done = await client.wait_for_batch(batch.id, poll_s=0.2)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", count, 0)
    assert done.output_file_id is not None
    target = await client.download_file(done.output_file_id, tmp_path / "answers.jsonl")
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == [f"r{number}" for number in range(count)]
    for number, each in enumerate(answers):
        found = Completion.model_validate(each["response"]["body"])
        assert essence(found) == alone[number % len(asked)]
    # The same bytes as without kills, but for the time at which each batch was created.
    again = await client.wait_for_batch((await client.create_batch(file.id, model="night")).id, poll_s=0.2)
    assert again.output_file_id is not None
    second = await client.download_file(again.output_file_id, tmp_path / "again.jsonl")
    former, later = (re.sub(rb'"created": ?[0-9]+', b"", each.read_bytes()) for each in (target, second))
    assert former == later
    assert await client.embed("night", list(PROMPTS[:2])) == vectors
    await client.stop_service("night")


async def test_what_was_asked_is_learnt_by_the_next_version(
    own: OwnMesh, witness: Witness, client: AsyncClient
) -> None:
    """Both sides agree; a version is trained on it, passes, gets a part; and is named when it is erased."""
    own.start("model-registry", ["run", "model-registry"])
    job = await trained(witness)
    serve = {"service": "diary", "keep": {"share": 1.0}}
    await client.deploy(tiny_job("keeps", initial_weights=f"job:{job}", serve=serve))
    await ready(client, "diary")
    for seed, prompt in enumerate(PROMPTS):
        tokens = CONTEXT - len(prompt) - 1
        await client.complete("diary", prompt, tokens=tokens, temperature=1, seed=seed, consent=True)
    await client.complete("diary", "not this", tokens=4, consent=False)

    async def all_kept() -> bool:
        return (await client.kept("diary")).items == len(PROMPTS)

    await eventually(all_kept)
    exam = {"exam": {"source": f"file://{argparse.__file__}", "format": "text"}}
    data = {"kind": "text", "field": "text", "validation": exam, "validation_fraction": 0.0}
    file = tiny_job("goes-on", data=data, training={"steps": 4})
    # What is not good enough becomes no candidate, and gets no request.
    strict = LearnOptions(model="diary", worse=-100.0, canary=1000)
    refused = await learn(client, "diary", file, strict, lambda text: None)
    assert (refused.verdict.passed, refused.weights) == (False, None)
    assert "not better by 100" in refused.verdict.why
    with pytest.raises(NotFound):
        await client.model("diary@candidate")
    assert (await client.service("diary")).weights == {"v1": 10_000}

    # The round goes on with a gate that it passes: nothing is trained twice.
    options = LearnOptions(model="diary", collection=1, worse=10.0, canary=1000)
    learned = await learn(client, "diary", file, options, lambda text: None)
    assert (learned.job, learned.before) == (refused.job, refused.before)
    assert (learned.collection.items, learned.verdict.passed) == (len(PROMPTS), True), learned.verdict
    assert learned.verdict.before != learned.verdict.after
    service = await client.service("diary")
    assert service.weights == {"v1": 9000, "learnt-1": 1000}
    assert (await client.complete("diary@learnt-1", "def ", tokens=4)).choices[0].text
    candidate = await client.model("diary@candidate")
    assert (candidate.reference, candidate.lineage.job) == (learned.reference, learned.job)
    assert [each.source for each in candidate.lineage.data][:1] == [learned.collection.source]

    erased = await client.erase_kept("diary", "rita")
    assert (erased.items, erased.collections) == (len(PROMPTS), (1,))
    assert set(erased.jobs) == {learned.job, learned.before}
    assert erased.models == (learned.reference,)
    assert erased.versions == ("diary@learnt-1",)
    await client.stop_service("diary")


async def writer_of_open_answers(witness: Witness) -> str:
    """The gateway that answers at this moment; empty: none does."""
    entries = await witness.bus.bucket(subjects.GENERATION).entries()
    return next((entry.message.writer for entry in entries if not entry.message.ended), "")


async def takes_over(witness: Witness, own: OwnMesh, answered: list[int]) -> bool:
    """Kills the gateway that answers; whether the other one goes on with an answer of its."""
    asked = await eventually(lambda: writer_of_open_answers(witness))
    (other,) = {"gateway-a", "gateway-b"} - {asked}
    own.kill(asked)
    before = len(answered)

    def gone_on() -> bool:
        return "generation taken over" in log_of(own, other)

    def all_answered_twice() -> bool:
        since = Counter(answered[before:])
        return all(since[seed] > 1 for seed in range(len(PROMPTS)))

    await eventually(lambda: gone_on() or all_answered_twice())
    own.start(asked)
    return gone_on()


def log_of(own: OwnMesh, name: str) -> str:
    return (own.folder / f"{name}.log").read_text()


async def kill_owner(witness: Witness, job: str, stage: int) -> None:
    """Kills the instance of a stage while it serves; returns once another incarnation is active."""

    async def present() -> ServiceRecord | None:
        entries = await witness.bus.bucket(subjects.REGISTRY_RECORD).entries()
        for entry in entries:
            record: ServiceRecord = entry.message
            if (record.job, record.stage, record.state) == (job, stage, InstanceState.ACTIVE):
                return record
        return None

    former: ServiceRecord = await eventually(present)
    os.kill(former.endpoint.pid, signal.SIGKILL)

    async def is_replaced() -> bool:
        record = await present()
        return record is not None and record.incarnation != former.incarnation

    await eventually(is_replaced, f"stage {stage} was not replaced")


def damage(folder: Path) -> None:
    """Makes a model as sure as it is wrong: its logits are thirty times as large."""
    changed = 0
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if "head" in name:
                tensors[name] *= 30.0
                changed += 1
        save_file(tensors, path)
    assert changed


async def test_a_version_with_damaged_weights_goes_back_by_itself(
    own: OwnMesh, witness: Witness, client: AsyncClient, tmp_path: Path
) -> None:
    job = await trained(witness)
    await client.download_weights(job, tmp_path / "weights")
    damage(tmp_path / "weights")
    for name, weights in (("v1", f"job:{job}"), ("v2", str(tmp_path / "weights"))):
        serve = {"service": "judged", "version": name, "exact": "off", "chunk_tokens": 16}
        await client.deploy(tiny_job(f"judged-{name}", initial_weights=weights, serve=serve))
        await ready(client, "judged")
    own.start("policy", ["policy", "run", "canary-judge"])
    await client.set_traffic("judged", {"v1": 5_000, "v2": 5_000}, why="try v2")

    text = await asyncio.to_thread(Path(argparse.__file__).read_text)

    async def ask_until(over: asyncio.Event, number: int) -> None:
        while not over.is_set():
            number += 97
            await client.complete("judged", text[number : number + 24], tokens=1)

    async def gone_back() -> ModelService | None:
        service = await client.service("judged")
        return service if service.weights == {"v1": 10_000} else None

    over = asyncio.Event()
    async with asyncio.TaskGroup() as clients:
        for number in range(4):
            clients.create_task(ask_until(over, 1_000 * number))
        try:
            service = await eventually(gone_back)
        finally:
            over.set()
    change = service.history[-1]
    assert (change.by, change.action) == ("canary-judge", "rollback")
    assert "mean score" in change.why
    own.retire("policy")
    await client.stop_service("judged")


# --- by load, to zero, and back ----------------------------------------------------------------------------
async def version_of(client: AsyncClient, service: str) -> ServedVersion:
    (version,) = (await client.service(service)).versions
    return version


async def test_a_version_rests_while_nobody_asks_and_follows_its_load(
    own: OwnMesh, witness: Witness, client: AsyncClient
) -> None:
    """It gives slots back, starts with the next requests, and grows by load; what a person has set stays."""
    job = await trained(witness)
    scale = {"fill": 1.0, "up_s": 0.0, "down_s": 600.0, "idle_s": 0.5}
    spec = served(job, "sleepy", {"min": 0, "want": 1, "max": 2}, sessions=2, scale=scale)
    await client.deploy(spec)
    serving = (await client.service("sleepy")).versions[0].job

    async def rests() -> bool:
        return (await version_of(client, "sleepy")).state is VersionState.IDLE

    await eventually(rests)
    assert "the next request starts it" in (await version_of(client, "sleepy")).reason

    async def holds_nothing() -> bool:
        nodes = (await client.mesh()).nodes
        return not any(
            slot.busy_with and slot.busy_with.startswith(serving) for n in nodes for slot in n.slots
        )

    await eventually(holds_nothing)
    one, other = await asyncio.gather(*(answer(client, "import ", 1, "sleepy") for _ in range(2)))
    assert essence(one) == essence(other)
    await eventually(rests, "it does not rest again")

    over, answered = asyncio.Event(), 0

    async def keep_asking(seed: int) -> None:
        nonlocal answered
        while not over.is_set():
            assert essence(await answer(client, "import ", 2 * seed + 1, "sleepy")) == essence(one)
            answered += 1

    async def has(replicas: int) -> bool:
        return (await version_of(client, "sleepy")).replicas == (replicas, replicas)

    async with asyncio.TaskGroup() as askers:
        for seed in range(6):
            askers.create_task(keep_asking(seed))
        try:
            await eventually(lambda: has(2))
            history = witness.bus.history(subjects.JOB_EVENT, job=serving)
            said = [record.message.text async for record in history]
            assert any("2 replicas wanted instead of 1: " in text for text in said), said
            await client.scale_version("sleepy", "v1", 1)
            await eventually(lambda: has(1))
            assert [pin.knob for pin in (await client.job(serving)).pins] == ["replicas"]
            before = answered
            await eventually(lambda: answered > before + 30)
            assert await has(1), "what a person has set stays, whatever its load"
        finally:
            over.set()
    await client.stop_service("sleepy")


# --- a gateway that is frozen ------------------------------------------------------------------------------
async def test_a_frozen_gateway_writes_nothing_any_more(
    own: OwnMesh, witness: Witness, client: AsyncClient
) -> None:
    """Another one goes on with its answer under a higher fence; when it is thawed, it changes nothing."""
    job = await trained(witness)
    await client.deploy(served(job, "frozen"))
    await ready(client, "frozen")
    whole = (await answer(client, "x", 1, "frozen")).choices[0].text
    first, second = await gateway_urls(witness)
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    body = {"model": "frozen", "prompt": "x", "max_tokens": CONTEXT - 2, "temperature": 0, "stream": True}
    async with httpx.AsyncClient(headers=bearer, timeout=PATIENCE_S, trust_env=False) as http:
        while True:
            async with http.stream("POST", f"{first}/v1/completions", json=body) as response:
                id, lines = response.headers["dmsc-generation"], response.aiter_lines()
                begun = [await next_data(lines)]
                own.kill("gateway-a", signal.SIGSTOP)
                try:
                    entry = await witness.bus.bucket(subjects.GENERATION).get(leader=True, id=id)
                    assert entry is not None
                    if entry.message.ended:  # it was over before: once more
                        continue
                    assert (entry.message.writer, entry.message.fence) == ("gateway-a", 1)
                    rest = await http.get(f"{second}/v1/generations/{id}/events")
                finally:
                    own.kill("gateway-a", signal.SIGCONT)
                later = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
                break
    texts = [line.removeprefix("data: ") for line in rest.text.splitlines() if line.startswith("data: ")]
    assert texts[-1] == "[DONE]"
    assert text_of(texts) == whole
    assert whole.startswith(text_of([*begun, *later])), "what the frozen one says is a part of it"
    await eventually(lambda: id in log_of(own, "gateway-a").partition("generation over")[2])
    entry = await witness.bus.bucket(subjects.GENERATION).get(leader=True, id=id)
    assert entry is not None
    assert (entry.message.writer, entry.message.fence, entry.message.ended) == ("gateway-b", 2, "length")
    assert (await answer(client, "x", 1, "frozen")).choices[0].text == whole
    await client.stop_service("frozen")


async def next_data(lines: AsyncIterator[str]) -> str:
    async for line in lines:
        if line.startswith("data: "):
            return line.removeprefix("data: ")
    raise AssertionError("the stream ended")


def text_of(events: list[str]) -> str:
    return "".join(
        choice["text"] for event in events if event != "[DONE]" for choice in json.loads(event)["choices"]
    )
