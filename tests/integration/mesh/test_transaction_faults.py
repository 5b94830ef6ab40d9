"""DESIGN §5 with real processes: a death or a freeze in each phase of a step, and the same weights.

The phase is hit exactly: a pass of the model is held at a gate, a stopped process keeps its order unread,
and what is asserted before each fault is what the victim itself, or the bus, says about where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager

import pytest
import pytest_asyncio

from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.module.service import FunctionalModule
from schemas.base import Message
from schemas.cluster import Judge
from schemas.data_plane import MicrobatchNotice
from schemas.envelope import EntityKind
from schemas.fault import FaultReport
from schemas.fault_choices import FaultAnswer, FaultOutcome, FaultQuestion, FaultWay
from schemas.registry import InstanceState
from schemas.step import GroupForm, Member, StepFence, StepVote
from schemas.telemetry import InstanceSample
from tests.integration.mesh import sockets
from tests.integration.mesh.conftest import gated_job
from tests.integration.mesh.expected_weights import undisturbed_at
from tests.integration.mesh.followed_job import FollowedJob, following
from tests.integration.mesh.own_mesh import OwnMesh, Witness
from tests.integration.mesh.pass_gates import gates_at
from tests.patience import PATIENCE_S
from tests.waiting import beside, eventually

STEPS = 4
MICROBATCHES = 4
TRAINING = {"steps": STEPS, "microbatches": MICROBATCHES, "seed": 11}
STRUCK_AT = 2
"""The step in which the fault is injected."""

Following = Callable[..., AbstractAsyncContextManager[FollowedJob]]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> Iterator[OwnMesh]:
    """One mesh for all cases; what one kills is started again for the next."""
    with OwnMesh(tmp_path_factory.mktemp("own"), [server], slots=6).running() as mesh:
        yield mesh


@pytest_asyncio.fixture
async def follow(own: OwnMesh, witness: Witness) -> AsyncIterator[Following]:
    """`async with follow("a name") as followed`: a job runs, and its every word is heard."""
    gate = own.folder / "gate"
    async with gates_at(gate, TRAINING) as gates:

        @contextlib.asynccontextmanager
        async def follow_job(
            name: str, stages: int = 2, replicas: int = 2, **training: int
        ) -> AsyncIterator[FollowedJob]:
            parallel = {"stages": stages, "replicas": replicas}
            # by load, one that was slow for once may get nothing to hold
            routing = {"algorithm": "round-robin"}
            job = gated_job(name, gate, TRAINING | training, parallel, routing=routing)
            expected = await undisturbed_at(witness, job)
            async with following(witness, gates, job, expected) as followed:
                yield followed

        yield follow_job


async def test_an_idle_instance_dies(follow: Following) -> None:
    async with follow("idle") as followed:
        await followed.all_held("s0-r0", "s0-r1", step=STRUCK_AT)
        await followed.until_open("s1-r0", STRUCK_AT)
        status = await followed.status("s1-r0", STRUCK_AT)
        assert (status.version, status.claims, status.waiting) == (STRUCK_AT, (), ())
        followed.kill("s1-r0")
        followed.gates.open_all()
        await followed.check(lost=["s1-r0"])


@pytest.mark.parametrize(
    ("direction", "victim"),
    [
        ("forward", "s1-r1"),
        ("backward", "s0-r0"),
        pytest.param("forward", "s0-r0", marks=pytest.mark.matrix),
        pytest.param("backward", "s1-r1", marks=pytest.mark.matrix),
    ],
)
async def test_an_instance_dies_while_it_computes(follow: Following, direction: str, victim: str) -> None:
    async with follow(direction) as followed:
        hold = followed.hold(victim, direction=direction, step=STRUCK_AT)
        microbatch = await hold.reached()
        assert microbatch not in followed.claimed(victim, STRUCK_AT)
        status = await followed.status(victim, STRUCK_AT)
        assert status.version == STRUCK_AT
        queued = "backward" if direction == "backward" and victim == "s0-r0" else "forward"
        assert f"microbatch {microbatch}: {queued} queued" in status.waiting
        followed.kill(victim)
        hold.open()
        await followed.check(lost=[victim])


async def test_an_instance_dies_after_its_last_backward_pass(follow: Following) -> None:
    async with follow("after") as followed:
        hold = await followed.held_alone("s0-r1", STRUCK_AT)
        assert not followed.of(subjects.STEP_PREPARE, "s0-r0", step=STRUCK_AT)
        followed.kill("s0-r0")
        hold.open()
        await followed.check(lost=["s0-r0"])


async def test_an_instance_dies_when_it_is_to_prepare(follow: Following) -> None:
    """It is stopped, and its agent with it (which would tell), so that the order is given and not obeyed."""
    async with follow("preparing") as followed:
        hold = await followed.held_alone("s0-r1", STRUCK_AT)
        with followed.frozen(followed.agent("s0-r0"), followed.pid("s0-r0")):
            hold.open()
            await followed.until_said(subjects.STEP_PREPARE, "s0-r0", step=STRUCK_AT)
            followed.kill("s0-r0")
        assert not votes(followed, "s0-r0")
        await followed.check(lost=["s0-r0"])


def votes(followed: FollowedJob, unit: str) -> list[StepVote]:
    return [
        vote
        for vote in followed.of(subjects.STEP_PREPARE, unit, answer=True, step=STRUCK_AT)
        if isinstance(vote, StepVote)
    ]


async def until_in_all_reduce(followed: FollowedJob, inside: str, outside: str) -> None:
    """`inside` has begun to exchange with `outside`, which is stopped: bytes lie there that nobody takes."""
    await eventually(lambda: sockets.unread_bytes(followed.pid(outside), followed.pid(inside)), every_s=0.002)


async def test_an_instance_dies_inside_the_all_reduce(follow: Following) -> None:
    async with follow("reducing") as followed:
        hold = await followed.held_alone("s0-r0", STRUCK_AT)
        with followed.frozen(followed.agent("s0-r1"), followed.pid("s0-r1")):
            assert not sockets.unread_bytes(followed.pid("s0-r1"), followed.pid("s0-r0"))
            hold.open()
            await followed.until_said(subjects.STEP_PREPARE, "s0-r0", step=STRUCK_AT)
            await until_in_all_reduce(followed, "s0-r0", "s0-r1")
            followed.kill("s0-r0")
        assert not votes(followed, "s0-r0")
        await followed.check(lost=["s0-r0"])


async def test_an_instance_dies_between_decision_and_apply(follow: Following) -> None:
    """It has voted, is stopped, and the others' votes make the decision: that one stands."""
    async with follow("decided") as followed:
        before = MICROBATCHES - 1
        hold = followed.hold("s0-r0", "s0-r1", direction="backward", step=STRUCK_AT, before=before)
        await hold.reached()
        # stage 1 is done with the microbatches of the step, stage 0 is not
        await followed.until(lambda: len(votes(followed, "s1-r0")) == 1, "s1-r0 votes")
        with followed.frozen(followed.agent("s1-r0"), followed.pid("s1-r0")):
            hold.open()
            await followed.until_said(subjects.STEP_DECISION, step=STRUCK_AT)
            await followed.until_said(subjects.STEP_COMMIT, "s1-r0", step=STRUCK_AT)
            followed.kill("s1-r0")
        assert not followed.applied("s1-r0", STRUCK_AT + 1)
        await followed.check(lost=["s1-r0"])
        decided = [one.attempt for one in followed.of(subjects.STEP_DECISION, step=STRUCK_AT)]
        assert len(decided) == 1


async def test_a_frozen_instance_is_replaced_and_wakes_up(follow: Following) -> None:
    """A zombie: fenced while it was stopped in a forward pass, it goes on with it as if nothing was.

    Its agent would kill it as soon as it is fenced, and stands still from its report on.
    """
    async with follow("zombie") as followed:
        hold = followed.hold("s0-r1", direction="forward", step=STRUCK_AT)
        microbatch = await hold.reached()
        zombie, pid = followed.member("s0-r1"), followed.pid("s0-r1")
        with followed.frozen(pid):
            await followed.until(
                lambda: followed.record("s0-r1").state is InstanceState.FAULTED,
                "its agent tells that it stands",
            )
            with followed.frozen(followed.agent("s0-r1")):
                hold.open()
                await followed.until(lambda: bool(fences(followed, zombie)), "the zombie is fenced")
                before = len(followed.of(subjects.NOTICE, step=STRUCK_AT))
                os.kill(pid, signal.SIGCONT)
                await followed.until(
                    lambda: microbatch in offers(followed, zombie, before), "the zombie offers its microbatch"
                )
        await followed.check(lost=["s0-r1"])
        assert not followed.claimed("s0-r1", STRUCK_AT)


def fences(followed: FollowedJob, member: Member) -> list[Message]:
    return [
        order
        for order in followed.of(subjects.STEP_FENCE)
        if isinstance(order, StepFence) and member in order.fenced
    ]


def offers(followed: FollowedJob, sender: Member, start: int = 0) -> list[int]:
    """Microbatches of the struck step that this incarnation offers to the next stage."""
    return [
        notice.microbatch
        for notice in followed.of(subjects.NOTICE, step=STRUCK_AT)[start:]
        if isinstance(notice, MicrobatchNotice) and notice.sender == sender and notice.direction == "forward"
    ]


async def test_replicas_of_two_neighbouring_stages_die_at_once(follow: Following) -> None:
    async with follow("neighbours") as followed:
        victims = ["s0-r0", "s1-r0"]
        await followed.all_held(*victims, step=STRUCK_AT)
        followed.kill(*victims)
        followed.gates.open_all()
        await followed.check(lost=victims)


async def test_an_instance_dies_while_its_group_is_built(follow: Following) -> None:
    """Of three replicas one dies, another is stopped: the third one builds a group with it in vain."""
    async with follow("building", stages=1, replicas=3) as followed:
        units = ["s0-r0", "s0-r1", "s0-r2"]
        by_agent = {
            followed.agent(unit): [one for one in units if followed.agent(one) == followed.agent(unit)]
            for unit in units
        }
        (builder, second), (first,) = sorted(by_agent.values(), key=len, reverse=True)
        hold = followed.hold(first, direction="forward", step=STRUCK_AT)
        await hold.reached()
        # else the group is built once the stopped one is lost
        await followed.until_all_but_held(first, STRUCK_AT)
        before = len(followed.of(subjects.GROUP_FORM, builder))
        with followed.frozen(followed.agent(second), followed.pid(second)):
            followed.kill(first)
            await followed.until(
                lambda: len(followed.of(subjects.GROUP_FORM, builder)) > before, "a group is to be built"
            )
            order = followed.of(subjects.GROUP_FORM, builder)[-1]
            assert isinstance(order, GroupForm)
            members = {member.sid for member in order.members}
            assert members == {followed.sid(builder), followed.sid(second)}, order
            followed.kill(second)
        formed = followed.of(subjects.GROUP_FORM, answer=True)
        assert not any(getattr(answer, "generation", -1) == order.generation for answer in formed)
        await followed.check(lost=[first, second])


async def test_a_newcomer_dies_while_the_state_is_sent_to_it(follow: Following) -> None:
    """Its source has the order and computes: held there, it does not come to send."""
    async with follow("newcomer") as followed:
        hold = followed.hold("s0-r1", direction="forward", step=STRUCK_AT)
        await hold.reached()
        followed.kill("s0-r0")
        await followed.until_said(subjects.STATE_SEND, "s0-r1")
        assert len(followed.pids("s0-r0")) == 2
        assert not followed.of(subjects.STATE_SEND, "s0-r1", answer=True)
        followed.kill("s0-r0")
        hold.open()
        await followed.check(lost=["s0-r0"])


async def test_the_source_dies_while_it_sends_its_state_to_a_newcomer(follow: Following) -> None:
    async with follow("source", stages=1, replicas=3) as followed:
        survivors = ["s0-r1", "s0-r2"]
        await followed.all_held(*survivors, step=STRUCK_AT)
        followed.kill("s0-r0")
        await followed.until_said(subjects.STATE_SEND)
        source = next(unit for unit in survivors if followed.of(subjects.STATE_SEND, unit))
        assert not followed.of(subjects.STATE_SEND, answer=True)
        followed.kill(source)
        followed.gates.open_all()
        await followed.check(lost=["s0-r0", source])


async def test_a_whole_stage_dies_and_all_go_back_to_the_checkpoint(follow: Following) -> None:
    async with follow("stage", checkpoint_every=2) as followed:
        victims = ["s1-r0", "s1-r1"]
        await followed.all_held(*victims, step=STEPS - 1)
        await followed.client.until_published(followed.job)
        followed.kill(*victims)
        followed.gates.open_all()
        await followed.check(lost=victims, back=True)


async def test_a_cluster_dies_with_its_router_and_its_gateway(follow: Following, own: OwnMesh) -> None:
    async with follow("cluster") as followed:
        lost = [unit for unit in followed.units() if followed.record(unit).endpoint.cluster == "b"]
        assert {unit[:2] for unit in lost} >= {"s0", "s1"}
        hold = followed.hold("s0-r1", direction="forward", step=STRUCK_AT)
        await hold.reached()
        assert "s0-r1" in lost
        for name in ("agent-b", "router-b", "gateway-b"):
            own.kill(name)
        followed.gates.open_all()
        await followed.check(lost=lost)


async def test_a_data_instance_dies_in_the_middle_of_a_step(follow: Following) -> None:
    async with follow("data-middle") as followed:
        await followed.all_held("s0-r0", "s0-r1", step=STRUCK_AT)
        await followed.until_said(subjects.STEP_BEGIN, step=STRUCK_AT)
        followed.kill("data-r0")
        followed.gates.open_all()
        await followed.check(lost=["data-r0"])


async def test_a_data_instance_dies_at_the_begin_of_a_step(follow: Following) -> None:
    """It is stopped while the step before computes: what it is to send next it never reads."""
    async with follow("data-begin") as followed:
        hold = await followed.held_alone("s0-r0", STRUCK_AT - 1)
        # of the step before all is sent
        with followed.frozen(followed.agent("data-r0"), followed.pid("data-r0")):
            hold.open()
            await followed.until_said(subjects.STEP_DISPATCH, "data-r0", step=STRUCK_AT)
            followed.kill("data-r0")
        assert not followed.of(subjects.STEP_DISPATCH, "data-r0", answer=True)[STRUCK_AT:]
        await followed.check(lost=["data-r0"])


async def test_a_link_between_neighbouring_stages_is_cut(follow: Following) -> None:
    """Both ends live: another link takes its place, and nobody is replaced."""
    async with follow("cut-link") as followed:
        hold = followed.hold("s1-r0", direction="forward", step=STRUCK_AT)
        microbatch = await hold.reached()
        # the gate may tell sooner than the tap
        await followed.until(
            lambda: bool(hops(followed, "s1-r0", microbatch)), "the offer that is computed now"
        )
        before = hops(followed, "s1-r0", microbatch)[0]
        sender = before.sender.sid.removeprefix(f"{followed.job}-")
        await sockets.until_cut(followed.pid(sender), followed.pid("s1-r0"))
        await followed.until_said(subjects.LINK_FAULT)
        hold.open()
        await followed.check()
        back = hops(followed, sender, microbatch)
        assert {notice.link for notice in back if notice.direction == "backward"} != {before.link}


class Patient(Policy):
    """Has every instance waited for that may be there again."""

    name = "patient"

    def decide(self, view: JobView, now: float) -> Suggestions:
        return None

    def on_fault(self, fault: FaultQuestion, view: JobView) -> FaultAnswer | None:
        return None if fault.lost else self.wait(fault, fault.most_wait_s, reason="its link broke, no more")


async def test_a_living_instance_is_waited_for_because_a_module_says_so(
    follow: Following, witness: Witness
) -> None:
    """Its link is cut and its node's agent is silent: by itself the orchestrator replaces it (ADR-0099)."""
    async with Bus.connect(witness.mesh.urls, name=Patient.name, kind=EntityKind.FUNCTIONAL_MODULE) as bus:
        ready = asyncio.Event()
        async with beside(FunctionalModule(bus, Patient()).run(ready)):
            await asyncio.wait_for(ready.wait(), PATIENCE_S)  # before a job could be past the struck step
            async with follow("waited-for") as followed:
                hold = followed.hold("s1-r0", direction="forward", step=STRUCK_AT)
                microbatch = await hold.reached()
                await followed.until(
                    lambda: bool(hops(followed, "s1-r0", microbatch)), "the offer that is computed now"
                )
                sender = hops(followed, "s1-r0", microbatch)[0].sender.sid.removeprefix(f"{followed.job}-")
                with followed.frozen(followed.agent("s1-r0")):
                    await sockets.until_cut(followed.pid(sender), followed.pid("s1-r0"))
                    # who seems slow on a busy machine is a fault that is asked about, too
                    await followed.until(lambda: answered(followed, "replace"), "the module has its say")
                    hold.open()
                    await followed.until_said(subjects.STEP_DECISION, step=STRUCK_AT)
                record = await followed.check()
        choices = [one for one in record.fault_choices if one.usual == "replace"]
        assert choices
        assert {(one.way, one.by, one.lost) for one in choices} == {("wait", "patient", False)}
        assert {one.outcome for one in choices} == {FaultOutcome.MEASURED}, "no loss was measured before"
        assert all(one.took_s is not None and one.took_s <= (one.limit_s or 0.0) for one in choices)


def answered(followed: FollowedJob, usual: FaultWay) -> bool:
    """A module has said what it would do about a fault about which the orchestrator does this by itself."""
    asked = {
        question.id
        for question in followed.of(subjects.FAULT_QUESTION)
        if isinstance(question, FaultQuestion) and question.usual == usual
    }
    said = followed.of(subjects.FAULT_ANSWER)
    return any(isinstance(answer, FaultAnswer) and answer.question in asked for answer in said)


async def test_of_two_that_do_not_reach_each_other_the_one_with_other_broken_links_is_replaced(
    follow: Following, witness: Witness
) -> None:
    """§4.4(5): both live; what the agent judges by the samples of the one that reports decides (ADR-0116)."""
    async with follow("two-ends") as followed:
        hold = followed.hold("s1-r0", direction="forward", step=STRUCK_AT)
        await hold.reached()
        accused, reporter = followed.member("s1-r0"), followed.member("s0-r0")
        await until_a_link_is_broken(followed, witness.bus, "s0-r0")
        seen = {"kind": "unreachable", "evidence": "nobody answers there", "witness": reporter}
        report = FaultReport(
            reporter="rita", job=followed.job, sid=accused.sid, incarnation=accused.incarnation, **seen
        )
        await witness.bus.command(subjects.FAULT_REPORT, report, deadline_s=PATIENCE_S, sid="rita")
        verdict = await followed.until_said(subjects.FAULT_VERDICT, "s1-r0")
        assert (verdict.verdict, verdict.at_fault) == ("transient", reporter.sid)
        turned = await followed.until_said(subjects.FAULT_VERDICT, "s0-r0")
        assert (turned.verdict, turned.action, turned.at_fault) == ("structural", "fence and replace", "")
        hold.open()
        await followed.check(lost=["s0-r0"])


async def until_a_link_is_broken(followed: FollowedJob, bus: Bus, unit: str) -> None:
    """Returns once the unit's agent takes one of its links for broken, which samples in its name say."""
    record = followed.record(unit)
    place = {"cluster": record.endpoint.cluster, "node": record.endpoint.node}
    name = {"job": followed.job, "sid": record.sid, "incarnation": record.incarnation}
    links = [{"peer": "elsewhere", "errors": 3}]
    sample = InstanceSample.model_validate(name | place | {"stage": 0, "step": STRUCK_AT, "links": links})

    async def judged() -> bool:
        await bus.publish(subjects.INSTANCE_SAMPLE, sample, job=followed.job, sid=record.sid)
        agent = f"{record.endpoint.cluster}-{record.endpoint.node}"
        found = await bus.command(subjects.JUDGE, Judge(**name), deadline_s=PATIENCE_S, agent=agent)
        return found.broken == (f"{record.sid} -> elsewhere: its links there fail",)

    await eventually(judged, "a broken link")


def hops(followed: FollowedJob, unit: str, microbatch: int) -> list[MicrobatchNotice]:
    """What a unit is offered of a microbatch of the struck step."""
    return [
        notice
        for notice in followed.of(subjects.NOTICE, unit, step=STRUCK_AT)
        if isinstance(notice, MicrobatchNotice) and notice.microbatch == microbatch
    ]


async def test_a_link_between_replicas_is_cut_inside_the_all_reduce(follow: Following) -> None:
    """Both ends live: the stage builds another group, and nobody is replaced."""
    async with follow("cut-group") as followed:
        hold = await followed.held_alone("s0-r0", STRUCK_AT)
        with followed.frozen(followed.agent("s0-r1"), followed.pid("s0-r1")):
            hold.open()
            await followed.until_said(subjects.STEP_PREPARE, "s0-r0", step=STRUCK_AT)
            await until_in_all_reduce(followed, "s0-r0", "s0-r1")
            await sockets.until_cut(followed.pid("s0-r0"), followed.pid("s0-r1"))
        await followed.check()
        orders = followed.of(subjects.GROUP_FORM, "s0-r0")
        assert {order.generation for order in orders if isinstance(order, GroupForm)} == {0, 1}
