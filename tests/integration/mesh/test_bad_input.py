"""What people give a running mesh: each mistake is one clear line, and the mesh serves whoever comes next.

Without a mesh it is tested in `tests/integration/dmsc` (nothing there, ports taken, a second `up`, a wrong
bus token); what arrives on the bus, in `test_bad_messages.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bus import subjects
from bus.wire import codec
from entities.orchestrator.job_state.retry_limits import STEP_ATTEMPTS
from schemas.envelope import EntityKind, Envelope
from schemas.gateway_api import DoorRequest, JobList, SubmitJob
from schemas.job import JobEvent, JobRecord, JobSpec, JobState
from schemas.registry import InstanceState
from tests.integration.dmsc.command_line import dmsc, running, wait_for
from tests.integration.mesh.conftest import Mesh, done, outcome
from tests.integration.mesh.own_mesh import USER_MODELS
from tests.integration.mesh.user_jobs import HELD_STEPS, hold, poison, user_job
from tests.patience import PATIENCE_S
from tests.warm_processes import incubator


@pytest.fixture(autouse=True)
def _the_mesh_is_as_it_was(mesh: Mesh) -> Iterator[None]:
    """No entity died of it, and no instance is left."""
    before = entities(mesh)
    yield
    assert entities(mesh) == before
    wait_for(lambda: not busy(mesh), lambda: f"still there: {busy(mesh)}")
    assert mesh.process.poll() is None


def entities(mesh: Mesh) -> dict[str, tuple[str, str]]:
    """Brokers and the accountant and model registries serve before they are registered."""
    return {
        record.sid: (record.incarnation, record.state)
        for record in mesh.client.mesh().services
        if record.kind
        not in (
            EntityKind.INSTANCE,
            EntityKind.BROKER,
            EntityKind.ACCOUNTANT,
            EntityKind.MODEL_REGISTRY,
            EntityKind.PROVISIONER,
        )
    }


def busy(mesh: Mesh) -> list[str]:
    status = mesh.client.mesh()
    held = [slot.busy_with for node in status.nodes for slot in node.slots if slot.busy_with]
    return held + [record.sid for record in status.services if record.kind is EntityKind.INSTANCE]


def failure(mesh: Mesh, job: str) -> JobRecord:
    """Its reason is one line for a person."""
    record = mesh.client.wait(job, timeout_s=PATIENCE_S)
    assert record.state is JobState.FAILED
    assert record.reason
    assert "\n" not in record.reason
    assert "Traceback" not in record.reason
    return record


# --- job files ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("training: {stepz: 2}", "bad.yaml:3: training.stepz: unknown key; did you mean training.steps?"),
        ("training: {steps: two}", "bad.yaml:3: training.steps: 'two' does not fit; give a whole number ≥ 1"),
        (
            "training: {steps: 2}\nparallel: {stages: 2, replicas: [1, 1, 1]}",
            "bad.yaml:4: parallel: replicas names 3 stages, but stages is 2",
        ),
    ],
    ids=["key", "type", "shape"],
)
def test_a_wrong_job_file_is_refused_with_place_and_remedy(
    mesh: Mesh, tmp_path: Path, wrong: str, expected: str
) -> None:
    (tmp_path / "bad.yaml").write_text(f"name: bad\nmodel: {{factory: 'troubled:sound'}}\n{wrong}\n")
    before = len(mesh.client.jobs())
    told = mesh.dmsc("train", "bad.yaml", cwd=tmp_path)
    assert told.returncode == 2
    assert f"dmsc: {expected}" in told.stderr.splitlines()
    assert all(line.startswith("dmsc: bad.yaml:") for line in told.stderr.splitlines())
    assert told.stdout == ""
    assert len(mesh.client.jobs()) == before


# --- models and data ------------------------------------------------------------------------------------
HOPELESS: dict[str, tuple[str, dict[str, Any], str]] = {
    "factory fails": (
        "raising",
        {},
        r"^troubled:raising failed: OSError: the tokenizer's file \(troubled\.py:\d+\)$",
    ),
    "no such factory": ("missing", {}, r"^troubled:missing: module troubled \(.*\) has no 'missing'$"),
    "not a model": ("no_model", {}, r"^troubled:no_model returned a dict; it must return an nn\.Sequential"),
    "layers do not fit": (
        "misfit",
        {},
        r"^layer 2 \(2: Linear\) does not fit behind layer 1 \(1: Linear\), which gives \[1,16,16\] float32",
    ),
    "more stages than layers": (
        "sound",
        {"parallel": {"stages": 5}},
        r"^parallel\.stages is 5, but the model has only 4 layers: set parallel\.stages to at most 4$",
    ),
    "no such device": (
        "sound",
        {"requires": {"device": "cuda", "labels": {"region": "eu"}}},
        r"^requires asks for device cuda and region=eu, no slot has it: a-\S+ has 6 cpu, .*; b-\S+ has 6 cpu",
    ),
    "no dataset": (
        "sound",
        {"data": {"source": "nowhere/x.txt"}},
        r"^data\.source nowhere/x\.txt does not exist on this node",
    ),
    "empty dataset": ("sound", {"data": {"source": "EMPTY"}}, r"^data\.source \S+ is empty$"),
    "dataset too short": (
        "sound",
        {"data": {"source": "SHORT", "validation_fraction": 0}},
        r"^data\.source \S+ leaves 16 of its 16 bytes for training, less than one sample of 16 tokens",
    ),
}


@pytest.fixture(scope="module")
def hopeless(mesh: Mesh, source: Path) -> dict[str, str]:
    """All of them at once, and one that is sound among them. Job ids by name."""
    (source.parent / "EMPTY").write_bytes(b"")
    (source.parent / "SHORT").write_bytes(bytes(16))
    jobs = {}
    for name, (factory, sections, _) in HOPELESS.items():
        data = dict(sections.get("data", {}))
        if data.get("source") in ("EMPTY", "SHORT"):
            sections = sections | {"data": data | {"source": str(source.parent / data["source"])}}
        jobs[name] = mesh.client.submit(user_job(factory, source, **sections)).job
    jobs["sound"] = mesh.client.submit(user_job("sound", source)).job
    return jobs


@pytest.mark.parametrize("name", HOPELESS)
def test_what_can_not_be_trained_fails_with_one_line(mesh: Mesh, hopeless: dict[str, str], name: str) -> None:
    record = failure(mesh, hopeless[name])
    pattern = HOPELESS[name][2]
    assert re.search(pattern, record.reason), record.reason
    assert record.recoveries == 0


def test_a_sound_job_among_them_is_trained(mesh: Mesh, hopeless: dict[str, str], source: Path) -> None:
    trained = done(mesh.client, hopeless["sound"])
    classes = {slot.bits_class for node in mesh.client.mesh().nodes for slot in node.slots}
    assert {trained.bits_class} == classes  # all on one machine
    done(mesh.client, mesh.client.submit(user_job("tied", source)).job)  # in one piece it can be


# --- user code in mid-run -------------------------------------------------------------------------------
def test_what_is_not_exact_is_trained_and_not_promised(mesh: Mesh, source: Path) -> None:
    """An operation without a deterministic form: the job says which, and trains all the same."""
    record = done(mesh.client, mesh.client.submit(user_job("scattering", source)).job)
    assert not record.exact
    assert "layer 1 (1: Scattering) uses put_" in record.inexact_because
    rounded = outcome(mesh.client, user_job("sound", source, training={"exact_accumulation": False}))
    assert not rounded.exact
    assert rounded.inexact_because == "training.exact_accumulation is off"
    exact = outcome(mesh.client, user_job("sound", source))
    assert exact.exact
    assert exact.inexact_because == ""


@pytest.mark.parametrize(
    ("reaction", "error"),
    [
        ("raise", r"LookupError: no such word \(troubled\.py:\d+\)"),
        ("nan", "the loss is nan; lower the learning rate, or look at this microbatch's data"),
    ],
)
@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.matrix)])
def test_what_breaks_the_same_step_twice_ends_the_job(
    mesh: Mesh, source: Path, reaction: str, error: str, stages: int, replicas: int
) -> None:
    spec = user_job(
        "allergic",
        source,
        model={"args": {"poison": poison(source, 1), "reaction": reaction}},
        training={"steps": 3},
        parallel={"stages": stages, "replicas": replicas},
    )
    job = mesh.client.submit(spec).job
    seen = list(mesh.client.events(job))
    record = failure(mesh, job)
    assert re.fullmatch(
        rf"step 1, microbatch 1, stage \d: {error} \(failed on 2 instances: {job}-s\d-r\d, {job}-s\d-r\d\); "
        "mend it, or set training.on_bad_microbatch to skip: then such steps are left out",
        record.reason,
    ), record.reason
    # a neighbour's broken link may be the first that is heard of it, and a newcomer may meet it before both
    # have said what ended them
    assert 1 <= record.recoveries <= STEP_ATTEMPTS
    assert len([event for event in seen if event.kind == "fault"]) >= 2
    assert {event.result.step for event in seen if event.result is not None} == {0}


def test_what_breaks_each_validation_ends_the_job(mesh: Mesh, source: Path) -> None:
    record = failure(mesh, mesh.client.submit(user_job("exam_nerves", source)).job)
    assert "ValueError: nothing prepared me for this" in record.reason
    assert 1 <= record.recoveries <= 2


# --- slots ----------------------------------------------------------------------------------------------
def until_state(mesh: Mesh, job: str, state: JobState, text: str = "") -> JobEvent:
    for event in mesh.client.events(job):
        if event.state is state and text in event.text:
            return event
    raise AssertionError(f"{job} was never {state} with {text!r}: {mesh.client.job(job).history}")


def test_without_room_a_job_waits_its_turn_and_says_why(mesh: Mesh, source: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def in_a(replicas: int, **sections: Any) -> JobSpec:
        factory = "held" if "model" in sections else "sound"
        return user_job(factory, source, parallel={"clusters": ["a"], "replicas": replicas}, **sections)

    spec = in_a(5, model={"args": {"gate": str(gate)}}, training={"steps": HELD_STEPS})
    holder = hold(mesh.client, spec, gate)
    waiting = mesh.client.submit(in_a(2)).job
    too_large = mesh.client.submit(in_a(7)).job
    until_state(mesh, waiting, JobState.QUEUED, "needs 2 slots, 1 of 6 free in a")
    until_state(mesh, too_large, JobState.QUEUED, "the whole mesh has no room for it")
    assert mesh.client.job(waiting).state is JobState.QUEUED
    mesh.printed("cancel", too_large)
    record = mesh.client.wait(too_large, timeout_s=PATIENCE_S)
    assert record.state is JobState.CANCELLED
    gate.unlink()
    done(mesh.client, holder)
    done(mesh.client, waiting)


# --- tokens and servers ---------------------------------------------------------------------------------
def test_a_wrong_token_gets_nobody_in(mesh: Mesh, source: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(user_job("sound", source).model_dump_json())
    told = mesh.dmsc("train", "job.yaml", "--token", "wrong", cwd=tmp_path)
    assert told.returncode == 4
    assert len(told.stderr.splitlines()) == 1
    told = dmsc("join", mesh.servers[0], "--token", "wrong", "--slots", "1", cwd=tmp_path)
    assert told.returncode == 4
    (line,) = [line for line in told.stderr.splitlines() if line.startswith("dmsc: ")]
    assert "wrong" not in line.replace("wrong token", "")


def test_the_http_door_tells_unknown_from_not_permitted(mesh: Mesh, source: Path) -> None:
    users = mesh.state / "tokens.yaml"
    before = users.read_text()
    digest = hashlib.sha256(b"a-viewer").hexdigest()
    users.write_text(f"{before}  - {{name: vera, role: viewer, token_sha256: {digest}}}\n")
    job = user_job("sound", source).model_dump(mode="json")
    try:
        for url in gateways(mesh):
            check_door(url, job)
    finally:
        users.write_text(before)


def check_door(url: str, job: dict[str, Any]) -> None:
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:

        def ask(token: str) -> httpx.Response:
            return http.post("/v1/jobs", json=job, headers={"Authorization": f"Bearer {token}"})

        wait_for(lambda: ask("a-viewer").status_code == 403)
        for token, status in (("wrong", 401), ("a-viewer", 403)):
            answer = ask(token)
            assert answer.status_code == status, answer.text
            assert answer.json()["code"] == "refused"
            assert "\n" not in answer.json()["detail"]
        assert http.post("/v1/jobs", json=job).status_code == 401
        listed = http.get("/v1/jobs", headers={"Authorization": "Bearer a-viewer"})
        assert listed.status_code == 200


def gateways(mesh: Mesh) -> list[str]:
    return [
        record.endpoint.address
        for record in mesh.client.mesh().services
        if record.kind is EntityKind.GATEWAY and record.state is InstanceState.ACTIVE
    ]


def test_a_gateway_that_is_not_there_is_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(user_job("sound", source).model_dump_json())
    told = dmsc("train", "job.yaml", "--gateway", "http://127.0.0.1:9", cwd=tmp_path)
    assert told.returncode == 3
    (line,) = told.stderr.splitlines()
    assert line.startswith("dmsc: no gateway answers at http://127.0.0.1:9")


# --- code -----------------------------------------------------------------------------------------------
def test_other_code_on_another_node_is_refused_with_one_line(
    mesh: Mesh, source: Path, tmp_path: Path
) -> None:
    """Same module, another version: the node says so itself, before it has computed anything."""
    other = (USER_MODELS / "troubled.py").read_text().replace("WIDTH = 8", "WIDTH = 16")
    (tmp_path / "troubled.py").write_text(other)
    secret = mesh.bus_token or ""
    arguments = ("join", mesh.servers[0], "--cluster", "c", "--node", "other", "--slots", "1")
    before = entities(mesh)
    shared = {"DMSC_BUS_TOKEN": secret, **incubator()}
    with running(*arguments, "--code", str(tmp_path), cwd=tmp_path, **shared) as node:
        wait_for(
            lambda: any(one.node == "other" and one.slots for one in mesh.client.mesh().nodes),
            lambda: node.output,
        )
        spec = user_job("sound", source, parallel={"clusters": ["a", "c"], "replicas": 2})
        record = failure(mesh, mesh.client.submit(spec).job)
        assert re.fullmatch(
            rf"{record.job}-(s0|data)-r1: troubled:sound on node other differs from the one that was "
            r"analysed \(\w{12} ≠ \w{12}\): install the same code on every node",
            record.reason,
        ), record.reason
        assert record.recoveries == 0
        node.interrupt()
        assert node.wait() == 0
    wait_for(lambda: entities(mesh) == before)


# --- a command that is heard twice ----------------------------------------------------------------------
async def test_a_repeated_submission_is_one_job_whichever_gateways_hear_it(mesh: Mesh, source: Path) -> None:
    spec = user_job("raising", source)  # what becomes of it does not matter here
    jobs_before = {record.job for record in await asyncio.to_thread(mesh.client.jobs)}
    through: set[str] = set()

    async def witness(message: SubmitJob, envelope: Envelope) -> None:
        through.add(message.gateway)

    async with mesh.bus("repeater") as bus:
        await bus.subscribe(subjects.SUBMIT, witness)
        request = DoorRequest(token=mesh.token, action="job.submit", spec=spec)
        data = codec.encode(request, bus.sender_map, "the-same-command")
        subject = subjects.DOOR(action="job-submit")
        gateways = subjects.DOOR.answerer({})

        async def ask(data: bytes) -> object:
            answer = await bus.connection.ask(subject, data, timeout_s=PATIENCE_S, answerer=gateways)
            return codec.decode_answer(answer.data)

        told = await asyncio.gather(*(ask(data) for _ in range(24)))
        told.append(await ask(codec.encode(request, bus.sender_map, "another-command")))
    assert through == {"gateway-a", "gateway-b"}, "the repetition never reached a second gateway"
    jobs = [record.job for answer in told if isinstance(answer, JobList) for record in answer.jobs]
    assert len(jobs) == 25
    assert len(set(jobs[:24])) == 1
    after = {record.job for record in await asyncio.to_thread(mesh.client.jobs)}
    assert after - jobs_before == set(jobs)
    assert len(set(jobs)) == 2
    for job in set(jobs):
        await asyncio.to_thread(failure, mesh, job)
