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
from bus.server.embedded import EmbeddedServer
from schemas.base import Message
from schemas.data_plane import MicrobatchNotice
from schemas.job import JobSpec
from schemas.registry import InstanceState
from schemas.step import GroupForm, Member, StepFence, StepVote
from tests.integration.mesh import sockets
from tests.integration.mesh.conftest import tiny_job
from tests.integration.mesh.course import Course, followed
from tests.integration.mesh.gates import gates_at
from tests.integration.mesh.own_mesh import OwnMesh
from tests.integration.mesh.undisturbed import undisturbed_at
from tests.patience import PATIENCE_S

STEPS = 4
MICROBATCHES = 4
SEED = 11
STRUCK_AT = 2
"""The step in which the fault is injected."""

Following = Callable[[JobSpec], AbstractAsyncContextManager[Course]]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnMesh]:
    """One mesh for all cases; what one kills is started again for the next."""
    folder = tmp_path_factory.mktemp("own")
    server = EmbeddedServer(folder / "nats", sync_always=False)
    asyncio.run(server.start())
    mesh = OwnMesh(folder, [server], slots=6)
    try:
        mesh.start_all("smo-1")
        yield mesh
    finally:
        mesh.stop_all()
        asyncio.run(server.stop())


@pytest_asyncio.fixture
async def follow(own: OwnMesh) -> AsyncIterator[Following]:
    """`async with follow(spec()) as course`: the job runs, and its every word is heard."""
    for name in own.commands.keys() - own.alive().keys():
        own.start(name)
    async with (
        own.client() as client,
        gates_at(own.folder / "gate", seed=SEED, steps=STEPS, microbatches=MICROBATCHES) as gates,
    ):
        await client.ready()

        @contextlib.asynccontextmanager
        async def follow_job(wanted: JobSpec) -> AsyncIterator[Course]:
            job = gated(own, wanted)
            expected = await undisturbed_at(client, job)
            async with followed(client, gates, job, expected) as course:
                yield course

        yield follow_job


def spec(name: str, stages: int = 2, replicas: int = 2, **training: object) -> JobSpec:
    return tiny_job(
        name,
        training={
            "steps": STEPS,
            "microbatches": MICROBATCHES,
            "seed": SEED,
            "validation_microbatches": 0,
            **training,
        },
        parallel={"stages": stages, "replicas": replicas},
        routing={"algorithm": "round-robin"},  # by load, one that was slow for once may get nothing to hold
    )


def gated(own: OwnMesh, wanted: JobSpec) -> JobSpec:
    model = wanted.model.model_copy(
        update={"factory": "gated:gated", "args": {"gate": str(own.folder / "gate")}}
    )
    return wanted.model_copy(update={"model": model})


async def test_an_idle_instance_dies(follow: Following) -> None:
    async with follow(spec("idle")) as course:
        entries = [
            course.gates.hold(course.pid(unit), direction="forward", step=STRUCK_AT)
            for unit in ("s0-r0", "s0-r1")
        ]
        for entry in entries:
            await entry.reached()
        await course.until_open("s1-r0", STRUCK_AT)
        status = await course.status("s1-r0", STRUCK_AT)
        assert (status.version, status.claims, status.waiting) == (STRUCK_AT, (), ())
        course.kill("s1-r0")
        course.gates.open_all()
        await course.check(lost=["s1-r0"])


@pytest.mark.parametrize("victim", ["s0-r0", "s1-r1"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
async def test_an_instance_dies_while_it_computes(follow: Following, direction: str, victim: str) -> None:
    async with follow(spec(direction)) as course:
        hold = course.gates.hold(course.pid(victim), direction=direction, step=STRUCK_AT)
        microbatch = await hold.reached()
        assert microbatch not in course.claimed(victim, STRUCK_AT)
        status = await course.status(victim, STRUCK_AT)
        assert status.version == STRUCK_AT
        queued = "backward" if direction == "backward" and victim == "s0-r0" else "forward"
        assert f"microbatch {microbatch}: {queued} queued" in status.waiting
        course.kill(victim)
        hold.open()
        await course.check(lost=[victim])


async def test_an_instance_dies_after_its_last_backward_pass(follow: Following) -> None:
    async with follow(spec("after")) as course:
        hold = course.gates.hold(course.pid("s0-r1"), direction="backward", step=STRUCK_AT)
        await hold.reached()
        await course.until_all_but_held("s0-r1", STRUCK_AT)
        assert not course.of(subjects.STEP_PREPARE, "s0-r0", step=STRUCK_AT)
        course.kill("s0-r0")
        hold.open()
        await course.check(lost=["s0-r0"])


async def test_an_instance_dies_when_it_is_to_prepare(follow: Following) -> None:
    """It is stopped, and its agent with it (which would tell), so that the order is given and not obeyed."""
    async with follow(spec("preparing")) as course:
        hold = course.gates.hold(course.pid("s0-r1"), direction="backward", step=STRUCK_AT)
        await hold.reached()
        await course.until_all_but_held("s0-r1", STRUCK_AT)
        with course.frozen(course.agent("s0-r0"), course.pid("s0-r0")):
            hold.open()
            await course.until_said(subjects.STEP_PREPARE, "s0-r0", step=STRUCK_AT)
            course.kill("s0-r0")
        assert not votes(course, "s0-r0")
        await course.check(lost=["s0-r0"])


def votes(course: Course, unit: str) -> list[StepVote]:
    return [
        vote
        for vote in course.of(subjects.STEP_PREPARE, unit, answer=True, step=STRUCK_AT)
        if isinstance(vote, StepVote)
    ]


async def until_in_all_reduce(course: Course, inside: str, outside: str) -> None:
    """`inside` has begun to exchange with `outside`, which is stopped: bytes lie there that nobody takes."""
    async with asyncio.timeout(PATIENCE_S):
        while not sockets.unread_bytes(course.pid(outside), course.pid(inside)):  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.002)


async def test_an_instance_dies_inside_the_all_reduce(follow: Following) -> None:
    async with follow(spec("reducing")) as course:
        hold = course.gates.hold(course.pid("s0-r0"), direction="backward", step=STRUCK_AT)
        await hold.reached()
        await course.until_all_but_held("s0-r0", STRUCK_AT)
        with course.frozen(course.agent("s0-r1"), course.pid("s0-r1")):
            assert not sockets.unread_bytes(course.pid("s0-r1"), course.pid("s0-r0"))
            hold.open()
            await course.until_said(subjects.STEP_PREPARE, "s0-r0", step=STRUCK_AT)
            await until_in_all_reduce(course, "s0-r0", "s0-r1")
            course.kill("s0-r0")
        assert not votes(course, "s0-r0")
        await course.check(lost=["s0-r0"])


async def test_an_instance_dies_between_decision_and_apply(follow: Following) -> None:
    """It has voted, is stopped, and the others' votes make the decision: that one stands."""
    async with follow(spec("decided")) as course:
        stage = (course.pid("s0-r0"), course.pid("s0-r1"))
        hold = course.gates.hold(*stage, direction="backward", step=STRUCK_AT, before=MICROBATCHES - 1)
        await hold.reached()
        # stage 1 is done with the microbatches of the step, stage 0 is not
        await course.until(lambda: len(votes(course, "s1-r0")) == 1, "s1-r0 votes")
        with course.frozen(course.agent("s1-r0"), course.pid("s1-r0")):
            hold.open()
            await course.until_said(subjects.STEP_DECISION, step=STRUCK_AT)
            await course.until_said(subjects.STEP_COMMIT, "s1-r0", step=STRUCK_AT)
            course.kill("s1-r0")
        assert not course.applied("s1-r0", STRUCK_AT + 1)
        await course.check(lost=["s1-r0"])
        decided = [one.attempt for one in course.of(subjects.STEP_DECISION, step=STRUCK_AT)]
        assert len(decided) == 1


async def test_a_frozen_instance_is_replaced_and_wakes_up(follow: Following) -> None:
    """A zombie: fenced while it was stopped in a forward pass, it goes on with it as if nothing was.

    Its agent would kill it as soon as it is fenced, and stands still from its report on.
    """
    async with follow(spec("zombie")) as course:
        hold = course.gates.hold(course.pid("s0-r1"), direction="forward", step=STRUCK_AT)
        microbatch = await hold.reached()
        zombie, pid = course.member("s0-r1"), course.pid("s0-r1")
        with course.frozen(pid):
            await course.until(
                lambda: course.record("s0-r1").state is InstanceState.FAULTED,
                "its agent tells that it stands",
            )
            with course.frozen(course.agent("s0-r1")):
                hold.open()
                await course.until(lambda: bool(fences(course, zombie)), "the zombie is fenced")
                before = len(course.of(subjects.NOTICE, step=STRUCK_AT))
                os.kill(pid, signal.SIGCONT)
                await course.until(
                    lambda: microbatch in offers(course, zombie, before), "the zombie offers its microbatch"
                )
        await course.check(lost=["s0-r1"])
        assert not course.claimed("s0-r1", STRUCK_AT)


def fences(course: Course, member: Member) -> list[Message]:
    return [
        order
        for order in course.of(subjects.STEP_FENCE)
        if isinstance(order, StepFence) and member in order.fenced
    ]


def offers(course: Course, sender: Member, start: int = 0) -> list[int]:
    """Microbatches of the struck step that this incarnation offers to the next stage."""
    return [
        notice.microbatch
        for notice in course.of(subjects.NOTICE, step=STRUCK_AT)[start:]
        if isinstance(notice, MicrobatchNotice) and notice.sender == sender and notice.direction == "forward"
    ]


async def test_replicas_of_two_neighbouring_stages_die_at_once(follow: Following) -> None:
    async with follow(spec("neighbours")) as course:
        victims = ["s0-r0", "s1-r0"]
        for hold in [
            course.gates.hold(course.pid(unit), direction="forward", step=STRUCK_AT) for unit in victims
        ]:
            await hold.reached()
        course.kill(*victims)
        course.gates.open_all()
        await course.check(lost=victims)


async def test_an_instance_dies_while_its_group_is_built(follow: Following) -> None:
    """Of three replicas one dies, another is stopped: the third one builds a group with it in vain."""
    async with follow(spec("building", stages=1, replicas=3)) as course:
        units = ["s0-r0", "s0-r1", "s0-r2"]
        by_agent = {
            course.agent(unit): [one for one in units if course.agent(one) == course.agent(unit)]
            for unit in units
        }
        (builder, second), (first,) = sorted(by_agent.values(), key=len, reverse=True)
        hold = course.gates.hold(course.pid(first), direction="forward", step=STRUCK_AT)
        await hold.reached()
        await course.until_all_but_held(
            first, STRUCK_AT
        )  # else the group is built once the stopped one is lost
        before = len(course.of(subjects.GROUP_FORM, builder))
        with course.frozen(course.agent(second), course.pid(second)):
            course.kill(first)
            await course.until(
                lambda: len(course.of(subjects.GROUP_FORM, builder)) > before, "a group is to be built"
            )
            order = course.of(subjects.GROUP_FORM, builder)[-1]
            assert isinstance(order, GroupForm)
            assert {member.sid for member in order.members} == {course.sid(builder), course.sid(second)}, (
                order
            )
            course.kill(second)
        formed = course.of(subjects.GROUP_FORM, answer=True)
        assert not any(getattr(answer, "generation", -1) == order.generation for answer in formed)
        await course.check(lost=[first, second])


async def test_a_newcomer_dies_while_the_state_is_sent_to_it(follow: Following) -> None:
    """Its source has the order and computes: held there, it does not come to send."""
    async with follow(spec("newcomer")) as course:
        hold = course.gates.hold(course.pid("s0-r1"), direction="forward", step=STRUCK_AT)
        await hold.reached()
        course.kill("s0-r0")
        await course.until_said(subjects.STATE_SEND, "s0-r1")
        assert len(course.pids("s0-r0")) == 2
        assert not course.of(subjects.STATE_SEND, "s0-r1", answer=True)
        course.kill("s0-r0")
        hold.open()
        await course.check(lost=["s0-r0"])


async def test_the_source_dies_while_it_sends_its_state_to_a_newcomer(follow: Following) -> None:
    async with follow(spec("source", stages=1, replicas=3)) as course:
        survivors = ["s0-r1", "s0-r2"]
        for hold in [
            course.gates.hold(course.pid(unit), direction="forward", step=STRUCK_AT) for unit in survivors
        ]:
            await hold.reached()
        course.kill("s0-r0")
        await course.until_said(subjects.STATE_SEND)
        source = next(unit for unit in survivors if course.of(subjects.STATE_SEND, unit))
        assert not course.of(subjects.STATE_SEND, answer=True)
        course.kill(source)
        course.gates.open_all()
        await course.check(lost=["s0-r0", source])


async def test_a_whole_stage_dies_and_all_go_back_to_the_checkpoint(follow: Following) -> None:
    async with follow(spec("stage", checkpoint_every=2)) as course:
        victims = ["s1-r0", "s1-r1"]
        holds = [course.gates.hold(course.pid(unit), direction="forward", step=STEPS - 1) for unit in victims]
        for hold in holds:
            await hold.reached()
        async for event in course.client.events(course.job):
            if event.kind == "checkpoint" and "written in" in event.text:
                break
        course.kill(*victims)
        course.gates.open_all()
        await course.check(lost=victims, back=True)


async def test_a_cluster_dies_with_its_router_and_its_gateway(follow: Following, own: OwnMesh) -> None:
    async with follow(spec("cluster")) as course:
        lost = [unit for unit in course.units() if course.record(unit).endpoint.cluster == "b"]
        assert {unit[:2] for unit in lost} >= {"s0", "s1"}
        hold = course.gates.hold(course.pid("s0-r1"), direction="forward", step=STRUCK_AT)
        await hold.reached()
        assert "s0-r1" in lost
        for name in ("agent-b", "router-b", "gateway-b"):
            own.kill(name)
        course.gates.open_all()
        await course.check(lost=lost)


async def test_a_data_instance_dies_in_the_middle_of_a_step(follow: Following) -> None:
    async with follow(spec("data-middle")) as course:
        for hold in [
            course.gates.hold(course.pid(unit), direction="forward", step=STRUCK_AT)
            for unit in ("s0-r0", "s0-r1")
        ]:
            await hold.reached()
        await course.until_said(subjects.STEP_BEGIN, step=STRUCK_AT)
        course.kill("data-r0")
        course.gates.open_all()
        await course.check(lost=["data-r0"])


async def test_a_data_instance_dies_at_the_begin_of_a_step(follow: Following) -> None:
    """It is stopped while the step before computes: what it is to send next it never reads."""
    async with follow(spec("data-begin")) as course:
        hold = course.gates.hold(course.pid("s0-r0"), direction="backward", step=STRUCK_AT - 1)
        await hold.reached()
        await course.until_all_but_held("s0-r0", STRUCK_AT - 1)  # of the step before all is sent
        with course.frozen(course.agent("data-r0"), course.pid("data-r0")):
            hold.open()
            await course.until_said(subjects.STEP_DISPATCH, "data-r0", step=STRUCK_AT)
            course.kill("data-r0")
        assert not course.of(subjects.STEP_DISPATCH, "data-r0", answer=True)[STRUCK_AT:]
        await course.check(lost=["data-r0"])


async def test_a_link_between_neighbouring_stages_is_cut(follow: Following) -> None:
    """Both ends live: another link takes its place, and nobody is replaced."""
    async with follow(spec("cut-link")) as course:
        hold = course.gates.hold(course.pid("s1-r0"), direction="forward", step=STRUCK_AT)
        microbatch = await hold.reached()
        await course.until(
            lambda: bool(hops(course, "s1-r0", microbatch)), "the offer that is computed now"
        )  # the gate may tell sooner than the tap
        before = hops(course, "s1-r0", microbatch)[0]
        sender = before.sender.sid.removeprefix(f"{course.job}-")
        await sockets.until_cut(course.pid(sender), course.pid("s1-r0"))
        await course.until_said(subjects.LINK_FAULT)
        hold.open()
        await course.check()
        back = hops(course, sender, microbatch)
        assert {notice.link for notice in back if notice.direction == "backward"} != {before.link}


def hops(course: Course, unit: str, microbatch: int) -> list[MicrobatchNotice]:
    """What a unit is offered of a microbatch of the struck step."""
    return [
        notice
        for notice in course.of(subjects.NOTICE, unit, step=STRUCK_AT)
        if isinstance(notice, MicrobatchNotice) and notice.microbatch == microbatch
    ]


async def test_a_link_between_replicas_is_cut_inside_the_all_reduce(follow: Following) -> None:
    """Both ends live: the stage builds another group, and nobody is replaced."""
    async with follow(spec("cut-group")) as course:
        hold = course.gates.hold(course.pid("s0-r0"), direction="backward", step=STRUCK_AT)
        await hold.reached()
        await course.until_all_but_held("s0-r0", STRUCK_AT)
        with course.frozen(course.agent("s0-r1"), course.pid("s0-r1")):
            hold.open()
            await course.until_said(subjects.STEP_PREPARE, "s0-r0", step=STRUCK_AT)
            await until_in_all_reduce(course, "s0-r0", "s0-r1")
            await sockets.until_cut(course.pid("s0-r0"), course.pid("s0-r1"))
        await course.check()
        orders = course.of(subjects.GROUP_FORM, "s0-r0")
        assert {order.generation for order in orders if isinstance(order, GroupForm)} == {0, 1}
