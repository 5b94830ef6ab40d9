"""What an instance does with its microbatches at the boundaries of steps, and when it was replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from bus.mesh.registration import RegistrationClient
from bus.subjects import ADOPT, STEP_ABORT, STEP_STATUS
from schemas.cluster import InstanceStart
from schemas.data_plane import RouteTable
from schemas.errors import (
    BadModel,
    Conflict,
    DmscError,
    Fenced,
    GradientRefused,
    MicrobatchFailed,
    Unavailable,
)
from schemas.registry import Culprit, InstanceState
from schemas.step import (
    Adopt,
    GroupForm,
    Member,
    MicrobatchDispatch,
    MicrobatchState,
    StateRestore,
    StateSend,
    StateWait,
    StepAbort,
    StepCommit,
    StepPrepare,
    StepStatus,
)
from tests.builders import graphs, routes
from tests.builders.graphs import unit
from tests.builders.jobs import gpt, spec
from tests.builders.routes import entry
from tests.builders.steps import commit, notice
from workers.compute.attribution import attributing, failing_microbatch
from workers.compute.compute_thread import ComputeThread
from workers.compute.stage_compute import StageCompute
from workers.instance import Instance, InstancePayload
from workers.links.reduction import ReductionGroup
from workers.stage.data_runtime import DataRuntime
from workers.stage.hop_runtime import InstanceContext
from workers.stage.stage_runtime import StageRuntime
from workers.transaction.microbatch import Hop

ME, UP, DOWN = (Member(sid=sid, incarnation="i") for sid in ("me", "up", "down"))
SPEC = spec(
    model=gpt(layers=1, width=8, heads=1, context=4),
    data={"source": "stdlib:", "sample_tokens": 4},
    training={"steps": 2, "microbatches": 2, "microbatch_samples": 1},
)


def start(stage: int = 0, stages: int = 2) -> InstanceStart:
    layers = {0: (0, 1), 1: (1, 3)}[stage] if stages == 2 and stage >= 0 else (0, 3)
    sid = "j-data-r0" if stage < 0 else f"j-s{stage}-r0"
    started = unit(sid, first_layer=layers[0], last_layer=layers[1])
    return graphs.start(started.model_copy(update={"sid": ME.sid}), spec=SPEC, stages=stages)


def table(stage: int, sid: str) -> RouteTable:
    return routes.table(entry(sid, window=1), stage=stage)


class Cell:
    """A stage instance without a bus, and what it said of itself."""

    def __init__(self, compute: ComputeThread, unit: InstanceStart) -> None:
        self.failures: list[DmscError] = []
        bus: Any = None
        self.runtime = StageRuntime(
            InstanceContext(bus=bus, start=unit, member=ME, cluster="a", failed=self.failures.append),
            device=torch.device("cpu"),
            thread=compute,
            admitted=lambda: None,
            cut_anew=lambda unit: None,
        )

    def hop(self, microbatch: int, *states: MicrobatchState, evaluate: bool = False) -> Hop:
        hop = Hop(self.runtime.version, microbatch, 0, evaluate, UP)
        for state in states:
            hop.advance(state)
        self.runtime.machine.hops[hop.key] = hop
        return hop


@pytest.fixture
async def compute() -> AsyncIterator[ComputeThread]:
    async with ComputeThread() as thread:
        yield thread


QUEUED, DONE, SUMMED = (
    MicrobatchState.FORWARD_QUEUED,
    MicrobatchState.FORWARD_DONE,
    MicrobatchState.ACCUMULATED,
)


async def test_a_hop_that_its_step_leaves_behind_gives_its_window_back(compute: ComputeThread) -> None:
    runtime = (cell := Cell(compute, start(0))).runtime
    runtime.binder.update(table(1, DOWN.sid))
    sent = cell.hop(0, QUEUED, DONE, evaluate=True)
    sent.downstream = runtime.binder.bind(1)
    waiting = cell.hop(1, QUEUED, DONE, evaluate=True)
    runtime.machine._unbound.append(waiting)
    assert runtime.binder.bind(1) is None
    await runtime.state.move_to(1)
    assert runtime.flow.waiting() == ()
    assert runtime.binder.open == 0
    runtime.run(runtime.machine.bind())  # what waited for a window is gone, too
    assert runtime.binder.open == 0


async def test_a_data_instance_gives_windows_of_earlier_steps_back() -> None:
    bus: Any = None
    runtime = DataRuntime(
        InstanceContext(
            bus=bus, start=start(-1), member=ME, cluster="a", failed=lambda error: pytest.fail(error.text)
        )
    )
    runtime.binder.update(table(0, DOWN.sid))
    target = runtime.binder.bind(0)
    assert target is not None
    runtime.machine._open[0, 0, 3, True] = target
    await runtime.dispatch(MicrobatchDispatch(job="j", epoch=1, step=1, attempt=0, microbatches=()))
    assert runtime.machine.in_flight == 0
    assert runtime.binder.bind(0) == DOWN


async def test_orders_of_another_epoch_are_refused_but_a_new_leader_is_obeyed(compute: ComputeThread) -> None:
    runtime = Cell(compute, start(0)).runtime
    serve = dict(runtime.served())
    abort = StepAbort(job="j", epoch=2, step=0, attempt=1)
    with pytest.raises(Fenced, match="epoch 2 speaks to an instance of epoch 1"):
        await serve[STEP_ABORT](abort)
    assert (await serve[STEP_STATUS](StepStatus(job="j", epoch=2, step=0, attempt=0))).attempt == 0
    await serve[ADOPT](Adopt(job="j", epoch=2))
    assert runtime.exchange.epoch == runtime.machine.epoch == 2
    await runtime.build()
    await serve[STEP_ABORT](abort)
    assert runtime.attempt == 1
    with pytest.raises(Fenced, match="epoch 1 is older than 2"):
        await serve[ADOPT](Adopt(job="j", epoch=1))


async def test_only_the_last_stage_claims_what_it_scored(compute: ComputeThread) -> None:
    for stage, evaluated in ((0, []), (1, [5])):
        cell = Cell(compute, start(stage))
        cell.hop(4, QUEUED, SUMMED)
        cell.hop(5, QUEUED, SUMMED, evaluate=True)
        for evaluate, expected in ((False, [4]), (True, evaluated)):
            query = StepStatus(job="j", epoch=1, step=0, attempt=0, evaluate=evaluate)
            claims = (await cell.runtime.status(query)).claims
            assert [claim.microbatch for claim in claims] == expected
            assert all(claim.evaluate == evaluate for claim in claims)


async def test_an_incarnation_that_is_fenced_ends_itself(compute: ComputeThread) -> None:
    cell = Cell(compute, start(0))
    data_failures: list[DmscError] = []
    bus: Any = None
    data = DataRuntime(
        InstanceContext(bus=bus, start=start(-1), member=ME, cluster="a", failed=data_failures.append)
    )
    for fenced in (DOWN, ME):
        order = StepAbort(job="j", epoch=1, step=0, attempt=0, fenced=(fenced,))
        assert (await cell.runtime.abort(order)).member == ME
        assert (await data.abort(order)).member == ME
        expected = [] if fenced == DOWN else [Fenced]
        assert [type(error) for error in cell.failures] == expected
        assert [type(error) for error in data_failures] == expected


async def test_the_only_replica_votes_with_the_bits_of_a_copy(compute: ComputeThread) -> None:
    runtime = Cell(compute, start(0)).runtime
    await runtime.build()
    bus: Any = None
    runtime.reduction.group = await ReductionGroup.build(
        bus, job="j", stage=0, generation=0, members=[ME], me=ME, epoch=1
    )
    runtime.reduction.generation = 0
    trained = runtime.layers
    generator = torch.Generator().manual_seed(1)
    for microbatch in range(2):
        drawn = [torch.randn(weight.shape, generator=generator) for weight in trained.parameters]
        trained.sum.add(microbatch, drawn)
    vote = await runtime.prepare(StepPrepare(job="j", epoch=1, step=0, attempt=0, generation=0))
    microbatches, copied = trained.copy_sum()
    _, checksum, norms = trained.finish_sum(copied)
    assert (vote.microbatches, vote.checksum, vote.squared_norms) == (tuple(microbatches), checksum, norms)


def left_out(step: int = 0, **more: Any) -> StepCommit:
    return commit(step, **{"action": "skip", "quarantined": (1,)} | more)


async def test_a_step_with_a_bad_microbatch_is_left_out_without_a_prepare(compute: ComputeThread) -> None:
    cell = Cell(compute, start(0))
    runtime = cell.runtime
    await runtime.build()
    before = [weight.clone() for weight in runtime.layers.parameters]
    runtime.layers.sum.add(0, [torch.ones_like(weight) for weight in before])
    cell.hop(0, QUEUED, SUMMED)
    for wrong in (left_out(step=1), left_out(attempt=1), left_out(action="apply")):
        with pytest.raises(Conflict, match="is to be left out, but I am at 0/0"):
            await runtime.commit(wrong)
    assert (await runtime.commit(left_out())).version == 1
    assert (await runtime.commit(left_out())).version == 1  # repeated
    assert not runtime.layers.sum.microbatches
    assert not runtime.flow.waiting()
    assert all(torch.equal(old, new) for old, new in zip(before, runtime.layers.parameters, strict=True))


def test_what_fails_names_its_microbatch_unless_it_is_validation() -> None:
    hop = Hop(3, 1, 0, False, UP)
    with (
        pytest.raises(
            MicrobatchFailed, match=r"^microbatch 1: KeyError: 'x' \(test_stage_flow\.py:\d+\)$"
        ) as failed,
        attributing(hop),
    ):
        raise KeyError("x")
    assert failing_microbatch(failed.value) == Culprit(step=3, microbatch=1)
    with pytest.raises(GradientRefused) as refused, attributing(hop):
        raise GradientRefused("not finite", microbatch=1)
    assert failing_microbatch(refused.value) == Culprit(step=3, microbatch=1)
    for error in (Fenced("replaced"), GradientRefused("in the sum already")):
        with pytest.raises(type(error)) as passed, attributing(hop):
            raise error
        assert failing_microbatch(passed.value) is None
    with pytest.raises(KeyError), attributing(Hop(3, 1, 0, True, UP)):
        raise KeyError("x")


def test_a_stage_refuses_to_train_double_precision_parameters() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(BadModel, match="is float64; trained parameters must be float32, bfloat16 or"):
            StageCompute(start(0), torch.device("cpu")).build()
    finally:
        torch.set_default_dtype(before)


async def test_a_registry_that_is_away_does_not_spoil_the_end() -> None:
    said: list[InstanceState] = []

    class Away:
        async def change(self, state: InstanceState, *_: str, **__: str) -> None:
            said.append(state)
            raise Unavailable("the registry does not answer")

    away: Any = Away()
    instance = Instance(InstancePayload(start=start(0), servers=[], cluster="a", node="n", agent="x"))
    presence: RegistrationClient = away
    await instance._take_leave(presence, wants=False)
    instance._fail(Fenced("replaced"))
    await instance._take_leave(presence, wants=False)
    assert said == [InstanceState.DRAINING, InstanceState.FAULTED]


# --- newcomers that follow --------------------------------------------------------------------------------
async def following(compute: ComputeThread) -> tuple[Cell, list[tuple[str, int, bool]]]:
    """A stage that has applied step 0 and is followed by `UP`, and what it has sent since: the redo has
    tensors or has none."""
    cell = Cell(compute, start(0, 1))
    await cell.runtime.build()
    sent: list[tuple[str, int, bool]] = []

    async def send_aside(to: Member, direction: str, stage: int, step: int, tensors: Any, **more: Any) -> str:
        sent.append((direction, step, bool(tensors)))
        return "delivered"

    cell.runtime.send_aside = send_aside  # type: ignore[assignment]  # no bus: what goes out is looked at
    await form(cell.runtime, ME)
    ready = await cell.runtime.send_state(follow())
    assert (ready.version, ready.slow) == (0, False)
    assert ready.bytes == cell.runtime.layers.state_bytes
    return cell, sent


def follow(transfer: int = 1) -> StateSend:
    return StateSend(job="j", epoch=1, to=UP, version=0, transfer=transfer, follow=True)


async def form(runtime: StageRuntime, *members: Member, generation: int = 0) -> None:
    order = GroupForm(
        job="j", epoch=1, stage=0, step=runtime.version, attempt=0, generation=generation, members=members
    )
    await runtime.form_group(order)


async def train(runtime: StageRuntime) -> None:
    """One step, by a gradient of ones."""
    for microbatch in range(2):
        runtime.layers.sum.add(microbatch, [torch.ones_like(one) for one in runtime.layers.parameters])
    at = {"job": "j", "epoch": 1, "step": runtime.version, "attempt": runtime.attempt, "generation": 0}
    vote = await runtime.prepare(StepPrepare.model_validate(at))
    await runtime.commit(
        StepCommit.model_validate({**at, "checksum": vote.checksum, "clip": 1.0, "action": "apply"})
    )


async def test_every_step_is_told_to_who_follows_also_one_that_is_left_out(compute: ComputeThread) -> None:
    cell, sent = await following(compute)
    await train(cell.runtime)
    await cell.runtime.commit(left_out(step=1))
    assert (await cell.runtime.send_state(follow())).version == 2
    assert sent == [("state", 0, True), ("redo", 0, True), ("redo", 1, False)]
    assert cell.runtime.layers.version == 2, "a snapshot of now says so"


async def test_who_is_fenced_restored_or_admitted_follows_no_more(compute: ComputeThread) -> None:
    cell, _ = await following(compute)
    await cell.runtime.abort(StepAbort(job="j", epoch=1, step=0, attempt=0, fenced=(UP,)))
    with pytest.raises(Conflict, match="fenced"):
        await cell.runtime.send_state(follow(2))
    cell, _ = await following(compute)
    await cell.runtime.restore(StateRestore(job="j", epoch=1, version=0))
    assert not cell.runtime.followers
    cell, _ = await following(compute)
    with pytest.raises(AttributeError):  # the group of two is built over a bus, and here is none
        await form(cell.runtime, ME, UP, generation=1)
    assert not cell.runtime.followers


async def test_a_restored_instance_takes_no_state_that_was_on_its_way(compute: ComputeThread) -> None:
    """Else it would be at the version of before, while all others are back at the checkpoint."""
    cell = Cell(compute, start(0, 1))
    await cell.runtime.build()
    state = notice(UP, ME, step=5, stage=0, direction="state", transfer=1)
    assert cell.runtime.machine.offered(state) == "accepted"
    _, tensors = await cell.runtime.state.snapshot()
    async with cell.runtime.state._loading:  # it waits for its turn when all are told to go back
        cell.runtime.received(state, tensors)
        await asyncio.sleep(0)
        cell.runtime.machine.is_member = True
    await cell.runtime.restore(StateRestore(job="j", epoch=1, version=0))
    assert cell.runtime.version == 0
    assert cell.runtime.machine.offered(state) == "stale"


async def test_a_newcomer_without_its_last_redo_says_so(compute: ComputeThread) -> None:
    cell = Cell(compute, start(0, 1))
    with pytest.raises(Conflict, match="version 3 is not here"):
        await cell.runtime.state.wait(StateWait(job="j", epoch=1, version=3, within_s=0.01))
