"""The six phases of draft §4.4, recorded on a whole job and checked as (sender, receiver, subject), in order.

Every entity runs alone in its own process; the job goes in at the NATS door; one instance is killed; a
functional module suggests weights. A tap that was there before all of them is the only witness.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from bus import subjects
from bus.server.embedded import EmbeddedServer
from bus.subject_row import Names, Subject
from bus.tap.live_tap import Tap
from bus.tap.message import TappedMessage
from schemas.base import Message
from schemas.envelope import EntityKind, Envelope
from schemas.fault import FaultReport, FaultVerdict
from schemas.gateway_api import DoorRequest, JobList
from schemas.job import ENDED, JobEvent, JobRecord, JobState
from schemas.names import MESH
from schemas.policy import ModuleLifecycle, ModuleState, PolicyDecision, PolicySuggestion, SetWeights
from schemas.registry import InstanceState, ServiceRecord
from schemas.signals import CommunicationPolicy, RouteAdvertisement
from tests.conftest import Connect
from tests.integration.mesh.conftest import padded, tiny_job
from tests.integration.mesh.own_mesh import TOKEN, users_file
from tests.patience import PATIENCE_S
from tests.waiting import beside
from tests.warm_processes import incubator, start_module

M = TypeVar("M", bound=Message)
Step = tuple[str, str, str]
"""(sender, receiver, row of the table of subjects)."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A message of the table of subjects, as a tap decoded it."""

    row: Subject
    tokens: dict[str, str]
    envelope: Envelope
    message: Message


def receiver(seen: Seen) -> str:
    """Who a message is for: the name in its subject, or the kind that the table of subjects names."""
    for token in ("agent", "gateway"):
        if token in seen.tokens and seen.row.names is not Names.SENDER:
            return seen.tokens[token]
    directed = (
        subjects.QOS_POLICY,
        subjects.STEP_DISPATCH,
        subjects.GROUP_FORM,
        subjects.STEP_PREPARE,
        subjects.STEP_COMMIT,
        subjects.STEP_ABORT,
        subjects.NOTICE,
        subjects.NOTICE_ANSWER,
        subjects.STATE_SEND,
        subjects.STATE_WAIT,
        subjects.STEP_FENCE,
        subjects.STEP_ASSIGN,
    )
    if seen.row in directed:
        return seen.tokens["sid"]
    return "+".join(sorted(kind.value for kind in seen.row.receivers))


class Recording:
    """Everything on the bus since before the mesh started. A run has tens of thousands of messages, and every
    one of them wakes who waits: so each is looked at once, and kept by its row."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.steps: list[Step] = []
        self.problems: list[TappedMessage] = []
        self.news = asyncio.Event()
        self._places: dict[Subject, list[int]] = {}

    def add(self, tapped: TappedMessage) -> None:
        """Messages of the table; what can't be decoded apart; marks of deleted keys carry nothing."""
        if tapped.envelope is not None and tapped.row is not None and tapped.message is not None:
            seen = Seen(tapped.row, tapped.tokens, tapped.envelope, tapped.message)
            self._places.setdefault(seen.row, []).append(len(self.seen))
            self.seen.append(seen)
            self.steps.append((seen.envelope.sender.name, receiver(seen), seen.row.name))
            self.news.set()
        elif tapped.problem:
            self.problems.append(tapped)

    def index(self, expected: Step, start: int = 0) -> int:
        try:
            return self.steps.index(expected, start)
        except ValueError:
            near = [step for step in dict.fromkeys(self.steps) if step[2] == expected[2]]
            places = [place for place, step in enumerate(self.steps) if step == expected]
            text = f"{expected} was not seen after {start}, but at {places}; of that kind: {near[:12]}"
            raise AssertionError(text) from None

    def ordered(self, *expected: Step, start: int = 0) -> int:
        """All of them, in this order; returns the place of the last."""
        place = start
        for step in expected:
            place = self.index(step, place)
        return place

    def messages(self, row: Subject, kind: type[M]) -> list[M]:
        found = (self.seen[place].message for place in self._places.get(row, ()))
        return [message for message in found if isinstance(message, kind)]

    def senders(self, row: Subject) -> set[str]:
        return {self.steps[place][0] for place in self._places.get(row, ())}

    def find(self, row: Subject, condition: Callable[[Seen], bool] = lambda _: True) -> list[int]:
        return [place for place in self._places.get(row, ()) if condition(self.seen[place])]


@pytest_asyncio.fixture
async def recording(server: EmbeddedServer, connect: Connect) -> AsyncIterator[Recording]:
    bus = await connect("witness", EntityKind.TAP)
    found = Recording()
    async with Tap(bus, [">", "$KV.>"], limit=1_000_000) as tap:

        async def keep() -> None:
            async for tapped in tap:
                found.add(tapped)

        async with beside(keep()):
            yield found
        assert tap.dropped == 0


@pytest_asyncio.fixture
async def processes(server: EmbeddedServer, recording: Recording, tmp_path: Path) -> AsyncIterator[None]:
    """Every entity in a process of its own; two clusters."""
    tokens = users_file(tmp_path)
    environment = {
        **os.environ,
        **incubator(),
        "DMSC_BUS": server.url,
        "DMSC_LOGS": str(tmp_path / "logs"),
    }
    learned = ("--allow-url", str(Path(argparse.__file__).parent))  # the data of tiny_job
    commands = [
        ["run", "service-registry"],
        ["run", "authorizer", "--tokens", str(tokens)],
        ["run", "orchestrator"],
        *(
            ["run", kind, "--cluster", cluster, *learned]
            for cluster in "ab"
            for kind in ("gateway", "router")
        ),
        *(
            ["join", "--cluster", cluster, "--node", "n", "--slots", "3", "--address", "127.0.0.1", *learned]
            for cluster in "ab"
        ),
    ]
    log = tmp_path / "log"
    started = [
        start_module("dmsc", tuple(command), cwd=Path(), environment=environment, out=log)
        for command in commands
    ]
    try:
        yield
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGINT)
        codes = await asyncio.gather(*(asyncio.to_thread(process.wait, PATIENCE_S) for process in started))
        assert set(codes) <= {0, 130}, (codes, log.read_text()[-2000:])


async def until(recording: Recording, condition: Callable[[], bool], what: str) -> None:
    """Looks again whenever something new was seen."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                recording.news.clear()
                await recording.news.wait()
    except TimeoutError:
        pytest.fail(f"{what}: not within {PATIENCE_S:.0f} s")


async def test_the_six_phases_of_section_4_4(connect: Connect, recording: Recording, processes: None) -> None:
    client = await connect("rita", EntityKind.CLIENT)
    registered = {"gateway-a", "gateway-b", "router-a", "router-b"}
    await until(
        recording,
        lambda: (
            registered <= recording.senders(subjects.MESH_REGISTRATION)
            and len(recording.senders(subjects.NODE_STATUS)) == 2
            and "authorizer" in recording.senders(subjects.REGISTRATION)
        ),
        "gateways, routers, agents and the authorizer registered",
    )

    spec = tiny_job(
        "phases",
        model={"args": {"layers": 3, "width": 32, "heads": 2, "context": 32, "dropout": 0.1}},
        training={"steps": 24, "seed": 3},
        parallel={"stages": 2, "replicas": 2},
    )
    # a suggestion must not be of the past by the time that it is heard
    spec = padded(spec, 16.0)
    asked = DoorRequest(token=TOKEN, action="job.submit", spec=spec)
    answer = await client.command(subjects.DOOR, asked, action="submit")
    assert isinstance(answer, JobList)
    record = answer.jobs[0]
    job = record.job

    def committed() -> int:
        """The last step that is."""
        events = recording.messages(subjects.JOB_EVENT, JobEvent)
        return max((event.result.step for event in events if event.result is not None), default=-1)

    # phase 4's functional module
    lifecycle = ModuleLifecycle(module="two-to-one", version="1", state=ModuleState.ACTIVE)
    module = await connect("two-to-one", EntityKind.FUNCTIONAL_MODULE)
    await module.command(subjects.MODULE_LIFECYCLE, lifecycle, owner=MESH, module="two-to-one")
    await until(recording, lambda: committed() >= 2, "three steps")
    suggestion = PolicySuggestion(
        module="two-to-one",
        version="1",
        job=job,
        confidence=0.9,
        reason="the test wants it",
        input_revision=committed(),
        valid_s=600,
        action=SetWeights(stage=1, weights={f"{job}-s1-r0": 2.0, f"{job}-s1-r1": 1.0}),
    )
    await module.publish(subjects.SUGGESTION, suggestion, owner=MESH, module="two-to-one")
    await until(recording, lambda: bool(recording.find(subjects.POLICY_DECISION)), "a decision")
    await until(recording, lambda: bool(recording.find(subjects.QOS_REPORT)), "a report")
    # phase 5's fault
    victim = f"{job}-s1-r1"
    records = recording.messages(subjects.REGISTRY_RECORD, ServiceRecord)
    pid = next(one.endpoint.pid for one in reversed(records) if one.sid == victim)
    os.kill(pid, signal.SIGKILL)

    def ended() -> bool:
        """Record and event, each by its own subscription of the tap: either may be seen first."""
        events = recording.messages(subjects.JOB_EVENT, JobEvent)
        records = recording.messages(subjects.JOB_RECORD, JobRecord)
        return all(any(one.job == job and one.state in ENDED for one in found) for found in (events, records))

    await until(recording, ended, "the end of the job")
    last = [one for one in recording.messages(subjects.JOB_RECORD, JobRecord) if one.job == job][-1]
    assert last.state is JobState.DONE, last.reason

    problems = [(one.subject, one.problem) for one in recording.problems if "rendezvous" not in one.subject]
    assert not problems, problems[:3]
    unexpected = {
        (one.envelope.sender.kind.value, one.row.name)
        for one in recording.seen
        if one.envelope.sender.kind not in one.row.senders
    }
    assert not unexpected, f"senders that the table of subjects does not name: {unexpected}"

    check_registration_and_configuration(recording, job)
    check_data_exchange(recording, job)
    check_telemetry(recording)
    check_policy_update(recording, job)
    check_fault_handling(recording, job, victim)
    check_termination(recording, job)


def check_registration_and_configuration(recording: Recording, job: str) -> None:
    """§4.4(1): MG and SR register with SMO (and SRD, §5.3); topology from MIC; strategy to each node."""
    submitted = recording.find(subjects.SUBMIT)[0]
    for sid in ("gateway-a", "gateway-b", "router-a", "router-b"):
        assert recording.index((sid, "orchestrator", "mesh registration")) < submitted
        assert recording.index((sid, "service-registry", "registration")) < submitted
    door = recording.find(subjects.DOOR)[0]
    taker = recording.steps[submitted][0]
    assert door < recording.index((taker, "authorizer", "access")) < submitted
    analyse = recording.find(subjects.ANALYSE)[0]
    agent = recording.steps[analyse][1]
    place = recording.ordered(
        ("orchestrator", agent, "analyse"), (agent, "orchestrator", "topology"), start=submitted
    )
    for sid in ("gateway-a", "gateway-b", "router-a", "router-b"):
        assert recording.index(("orchestrator", sid, "qos policy")) > place
    first = recording.find(subjects.STEP_BEGIN)[0]
    for sid in (f"{job}-s0-r0", f"{job}-s0-r1", f"{job}-s1-r0", f"{job}-s1-r1", f"{job}-data-r0"):
        pending = recording.index((sid, "service-registry", "registration"), place)
        active = recording.index((sid, "service-registry", "state change"), pending)
        assert active < first
    routes = {
        record.route_id
        for record in recording.messages(subjects.REGISTRY_RECORD, ServiceRecord)
        if record.job == job
    }
    assert 0 not in routes
    advertised = recording.find(
        subjects.ADVERTISEMENT,
        lambda one: (
            isinstance(one.message, RouteAdvertisement) and any(r.job == job for r in one.message.changed)
        ),
    )
    assert advertised
    tables = recording.find(subjects.ROUTE_TABLE)
    assert {recording.seen[number].tokens["cluster"] for number in tables} == {"a", "b"}
    prepared = recording.find(subjects.STEP_PREPARE)[0]  # until then, a step computes while its groups meet
    assert recording.index(("orchestrator", f"{job}-s0-r0", "group form")) < prepared


def check_data_exchange(recording: Recording, job: str) -> None:
    """§4.4(2), §7.2: MG is the data entry; hops go from instance to instance; gradients come back."""
    begin = recording.find(subjects.STEP_BEGIN)[0]
    gateway = recording.steps[begin][1]
    dispatch = recording.find(subjects.STEP_DISPATCH)[0]
    assert recording.steps[dispatch][0] == gateway
    data = recording.steps[dispatch][1]
    hop = next(
        number
        for number in recording.find(subjects.NOTICE)
        if recording.seen[number].envelope.sender.name == data
    )
    first = recording.steps[hop][1]
    assert first.startswith(f"{job}-s0-")
    forward = next(
        number for number in recording.find(subjects.NOTICE) if recording.steps[number][0] == first
    )
    second = recording.steps[forward][1]
    assert second.startswith(f"{job}-s1-")
    assert begin < dispatch < hop < forward
    recording.ordered((second, first, "notice"), start=forward)
    claimed = recording.index(
        (second, "accountant+functional-module+gateway+orchestrator", "step claim"), forward
    )
    prepared = recording.ordered(("orchestrator", second, "step prepare"), start=claimed)
    decided = recording.index(("orchestrator", "orchestrator", "step decision"), prepared)
    recording.index(("orchestrator", second, "step commit"), decided)


def check_telemetry(recording: Recording) -> None:
    """§4.4(3): instances' samples; MG and SR report communication quality to the SMO."""
    steps = recording.steps
    assert any(name == "instance sample" for _, _, name in steps)
    for sid in ("gateway-a", "gateway-b", "router-a", "router-b"):
        recording.index((sid, "functional-module+orchestrator", "qos report"))
    for cluster in "ab":
        recording.index((f"router-{cluster}", "functional-module+gateway+router", "compute"))


def check_policy_update(recording: Recording, job: str) -> None:
    """§4.4(4): module → SMO, decision with reason, new policy to each MG and SR, tables follow."""
    suggested = recording.index(("two-to-one", "orchestrator", "policy suggestion"))
    decided = recording.find(subjects.POLICY_DECISION)[0]
    decision = recording.seen[decided].message
    assert isinstance(decision, PolicyDecision)
    assert decision.adopted, decision.reason
    assert recording.seen[decided].envelope.causation == recording.seen[suggested].envelope.id
    for sid in ("gateway-a", "gateway-b", "router-a", "router-b"):
        issued = recording.index(("orchestrator", sid, "qos policy"), suggested)
        policy = recording.seen[issued].message
        assert isinstance(policy, CommunicationPolicy)
        assert policy.stages[1].weights[f"{job}-s1-r0"] > policy.stages[1].weights[f"{job}-s1-r1"]
    written = [number for number in recording.find(subjects.ROUTE_TABLE) if number > suggested]
    assert written, "no route table followed the policy"


def check_fault_handling(recording: Recording, job: str, victim: str) -> None:
    """§4.4(5), §5.5: SR reports, SMO locates with SRD and MIC, replaces, and the step goes on."""
    agent = "b-n"
    recording.index((agent, "service-registry", "instance state"))
    reported = recording.find(
        subjects.FAULT_REPORT, lambda one: isinstance(one.message, FaultReport) and one.message.sid == victim
    )[0]  # a neighbour's router may be first: its instance lost a link before the registry knew
    assert recording.steps[reported][0] in ("router-a", "router-b")
    place = recording.ordered(
        ("orchestrator", "service-registry", "resolve"), ("orchestrator", agent, "judge"), start=reported
    )
    verdict_at = recording.find(subjects.FAULT_VERDICT)[0]
    verdict = recording.seen[verdict_at].message
    assert isinstance(verdict, FaultVerdict)
    assert (verdict.verdict, verdict.scope) == ("structural", "instance")
    assert verdict_at > place
    # the job is fenced and goes on while a newcomer starts: neither waits for the other
    recording.index(("orchestrator", f"{job}-s0-r0", "step fence"), verdict_at)
    recording.ordered(
        ("orchestrator", agent, "start instance"),
        (victim, "service-registry", "registration"),
        ("orchestrator", f"{job}-s1-r0", "state send"),
        ("orchestrator", victim, "group form"),
        ("orchestrator", victim, "step prepare"),
        start=verdict_at,
    )


def check_termination(recording: Recording, job: str) -> None:
    """§4.4(6): MG and SR report to SMO and SRD; SMO deactivates; SRD releases; MIC drops the topology."""
    reports = []
    for sid in ("gateway-a", "gateway-b", "router-a", "router-b"):
        reports.append(recording.index((sid, "orchestrator+service-registry", "termination")))
    stopped = [number for number in recording.find(subjects.STOP_INSTANCE) if number > max(reports)]
    assert {recording.steps[number][1] for number in stopped} == {"a-n", "b-n"}
    released = recording.index(("orchestrator", "service-registry", "release job"), max(stopped))
    for agent in ("a-n", "b-n"):
        assert recording.index(("orchestrator", agent, "forget topology"), released) > released
    gone = [
        sid
        for number in recording.find(subjects.ADVERTISEMENT)
        if isinstance(message := recording.seen[number].message, RouteAdvertisement)
        for sid in message.removed
    ]
    assert {f"{job}-s0-r0", f"{job}-s1-r1"} <= set(gone)
    left = [one for one in recording.messages(subjects.REGISTRY_RECORD, ServiceRecord) if one.job == job][-1:]
    assert all(one.state is not InstanceState.FAULTED for one in left)
