"""The orchestrator's checkpoints against stand-in instances on a real bus: each moment where one may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entities.orchestrator.job_state.instances import MemberLost
from entities.orchestrator.job_state.retry_limits import Unrecoverable
from schemas.envelope import EntityKind
from schemas.errors import Conflict, Unavailable
from schemas.recipe_progress import RecipeProgress
from schemas.signals import QosReport
from tests.conftest import Connect
from tests.integration.entities.checkpoint_rig import JOB, NODE, Rig, StandIn, serve_node
from tests.patience import PATIENCE_S


@pytest.fixture
async def make(connect: Connect, tmp_path: Path) -> Callable[..., Any]:
    async def rig(**more: Any) -> Rig:
        stand_ins = [
            StandIn(await connect(f"{JOB}-s{stage}-r0", EntityKind.INSTANCE), stage) for stage in (0, 1)
        ]
        for one in stand_ins:
            await one.serve()
        orchestrator = await connect("orchestrator", EntityKind.ORCHESTRATOR)
        made = Rig(orchestrator, stand_ins, tmp_path, **more)
        made.node = await serve_node(await connect(NODE.sid, EntityKind.CLUSTER))
        await made.start(1)
        return made

    return rig


def whole(*names: str) -> list[str]:
    """The files of these checkpoints, all of them."""
    return [
        f"{name}/{file}"
        for name in names
        for file in ("manifest.json", "stage-00000/data", "stage-00001/data")
    ]


async def test_the_manifest_comes_last_and_the_loop_does_not_wait_for_it(make: Any) -> None:
    rig = await make()
    slow = rig.stand_ins[1]
    slow.go_on.clear()
    await rig.checkpoints.at_boundary(1, rig.instances.stages())
    assert rig.left() == []
    await rig.checkpoints.at_boundary(2, rig.instances.stages())  # returns, though nothing is written yet
    await asyncio.wait_for(slow.asked.wait(), PATIENCE_S)
    assert not any("manifest" in name for name in rig.left())
    assert rig.journal.record.checkpoint_step is None
    await rig.checkpoints.at_boundary(4, rig.instances.stages())
    slow.go_on.set()
    await rig.checkpoints.finish()
    assert rig.left() == whole("00000002-1-1")
    assert rig.journal.record.checkpoint_step == 2
    skipped, published = (await rig.told())[-2:]
    assert "step 4: none taken, that of step 2 is still being written" in skipped
    assert "step 2 at" in published
    assert "why: every 2 steps" in published


async def test_that_of_the_last_step_is_not_left_out(make: Any) -> None:
    """Steps may be shorter than a write; there is no later one that would make up for it."""
    rig = await make(training={"steps": 4, "checkpoint_every": 2})
    slow = rig.stand_ins[1]
    slow.go_on.clear()
    await rig.checkpoints.at_boundary(2, rig.instances.stages())
    await asyncio.wait_for(slow.asked.wait(), PATIENCE_S)
    last = asyncio.create_task(rig.checkpoints.at_boundary(4, rig.instances.stages()))
    await asyncio.wait({last}, timeout=0.05)
    assert not last.done()
    slow.go_on.set()
    await last
    await rig.checkpoints.finish()
    assert rig.left() == whole("00000002-1-1", "00000004-1-2")
    assert rig.journal.record.checkpoint_step == 4


async def test_two_are_kept(make: Any) -> None:
    rig = await make()
    for step in (2, 4, 6):
        await rig.take(step)
    assert rig.left() == whole("00000004-1-2", "00000006-1-3")


async def test_a_writer_that_dies_costs_that_checkpoint_alone(make: Any) -> None:
    rig = await make()
    await rig.take(2)
    victim = rig.stand_ins[0]
    victim.go_on.clear()
    victim.asked.clear()
    await rig.checkpoints.at_boundary(4, rig.instances.stages())
    await asyncio.wait_for(victim.asked.wait(), PATIENCE_S)
    assert any(name.startswith("00000004") for name in rig.left()), "the fault never fired"
    rig.instances.mark_lost(victim.member)
    await asyncio.wait_for(rig.checkpoints.finish(), PATIENCE_S)
    assert rig.left() == whole("00000002-1-1")
    assert any("step 4: not written" in text for text in await rig.told())
    rig.instances.lost.clear()  # it was replaced
    assert await rig.checkpoints.restore() == 2
    victim.go_on.set()


async def test_one_that_dies_before_its_copy_is_the_loop_s_business(make: Any) -> None:
    rig = await make()
    rig.instances.mark_lost(rig.stand_ins[1].member)
    with pytest.raises(MemberLost):
        await rig.checkpoints.at_boundary(2, rig.instances.stages())
    assert rig.checkpoints.due(2), "after the recovery it is due as before"


async def test_a_store_that_refuses_costs_that_checkpoint_alone(make: Any) -> None:
    rig = await make()
    rig.stand_ins[1].fails = Unavailable("the disk is full")
    await rig.take(2)
    assert rig.left() == []
    assert any("step 2: not written: the disk is full" in text for text in await rig.told())
    rig.stand_ins[1].fails = None
    await rig.take(4)
    assert rig.left() == whole("00000004-1-2")


async def test_a_manifest_that_one_instance_can_t_write_another_one_writes(make: Any) -> None:
    rig = await make()
    rig.stand_ins[0].silent = Unavailable("the folder does not answer")
    await rig.take(2)
    assert len(rig.stand_ins[0].unanswered) == 1
    assert rig.left() == whole("00000002-1-1")
    assert rig.journal.record.checkpoint_step == 2


async def test_a_manifest_that_nobody_is_sure_of_finds_its_parts_when_it_comes(make: Any) -> None:
    rig = await make()
    await rig.take(2)
    for one in rig.stand_ins:
        one.silent = Unavailable("the folder does not answer")
    await rig.take(4)
    (late,) = rig.stand_ins[0].unanswered
    told = (await rig.told())[-1]
    assert "step 4: not written: the folder does not answer; its files stay, for it may still come" in told
    assert rig.journal.record.checkpoint_step == 2
    for one in rig.stand_ins:
        one.silent = None
    await rig.take(6)
    assert rig.left() == sorted([*whole("00000002-1-1", "00000006-1-3"), *whole("00000004-1-2")[1:]]), (
        "two are whole, and the one between may still be the second"
    )
    await rig.stand_ins[0].publish(late)
    await rig.take(8)
    assert rig.left() == whole("00000006-1-3", "00000008-1-4")
    await rig.stand_ins[0].publish(late)  # its parts have gone: it pushes out nothing
    assert await rig.checkpoints.restore() == 8
    await rig.checkpoints.close()
    assert rig.left() == whole("00000006-1-3", "00000008-1-4")


async def test_a_manifest_whose_parts_are_not_seen_is_told_and_its_leftovers_go(make: Any) -> None:
    rig = await make()
    rig.stand_ins[0].silent = Conflict("artifacts has to be one and the same folder on all nodes")
    await rig.take(2)
    assert rig.stand_ins[0].unanswered
    assert not rig.stand_ins[1].unanswered
    assert rig.left() == []
    assert "step 2: not written: artifacts has to be one and the same" in (await rig.told())[-1]


async def test_a_folder_in_which_nothing_is_found_is_no_beginning(make: Any) -> None:
    rig = await make()
    await rig.take(2)
    rig.folder.rename(rig.folder.with_name("away"))
    with pytest.raises(Unavailable, match="that of step 2 is not at"):
        await rig.checkpoints.restore()
    assert rig.stand_ins[0].restored == []
    rig.folder.with_name("away").rename(rig.folder)
    assert await rig.checkpoints.restore() == 2


async def test_without_a_node_the_end_of_a_job_says_what_may_be_left(make: Any) -> None:
    rig = await make()
    for step in (2, 4):
        await rig.take(step)
    for one in rig.node:
        await one.stop(drain=False)
    await rig.checkpoints.close()
    assert f"what is unfinished or too old may be left at {rig.folder}" in (await rig.told())[-1]


async def test_leftovers_of_an_orchestrator_that_died_while_writing_are_removed(make: Any) -> None:
    rig = await make()
    await rig.take(2)
    rig.stand_ins[0].go_on.clear()
    rig.stand_ins[0].asked.clear()
    await rig.checkpoints.at_boundary(4, rig.instances.stages())
    await asyncio.wait_for(rig.stand_ins[0].asked.wait(), PATIENCE_S)
    await rig.checkpoints.abandon()  # what is left of one that is killed: no more than this
    assert any(name.startswith("00000004-1") for name in rig.left())
    rig.stand_ins[0].go_on.set()
    await rig.start(2)
    assert await rig.checkpoints.restore(fresh=True) == 2
    await rig.take(4)
    assert rig.left() == whole("00000002-1-1", "00000004-2-1")


async def test_the_newest_that_is_whole_is_used_and_the_damaged_one_goes(make: Any) -> None:
    rig = await make()
    await rig.take(2)
    await rig.take(4)
    rig.stand_ins[0].damaged = {4}
    assert await rig.checkpoints.restore() == 2
    assert rig.stand_ins[0].restored == [(2, f"{rig.folder}/00000002-1-1")]
    assert any("00000004-1-2/stage-00000/data is damaged" in text for text in await rig.told())
    rig.stand_ins[0].damaged = set()
    await rig.take(4)
    assert rig.left() == whole("00000002-1-1", "00000004-1-3")
    (rig.folder / "00000004-1-3" / "manifest.json").write_text("{")
    (rig.folder / "00000002-1-1" / "manifest.json").write_text("")
    assert await rig.checkpoints.restore() == 0
    assert rig.stand_ins[0].restored[-1] == (0, None)


async def test_a_stage_whose_part_was_whole_does_not_stay_there_alone(make: Any) -> None:
    rig = await make()
    await rig.take(2)
    rig.stand_ins[1].damaged = {2}
    await rig.start(2)
    assert await rig.checkpoints.restore(fresh=True) == 0
    assert [version for version, _ in rig.stand_ins[0].restored] == [2, 0]
    assert rig.stand_ins[1].restored == [(0, None)]


async def test_a_store_that_does_not_answer_is_not_damage(make: Any) -> None:
    rig = await make()
    await rig.take(2)
    rig.stand_ins[0].unreachable = True
    with pytest.raises(Unavailable):
        await rig.checkpoints.restore()
    rig.stand_ins[0].unreachable = False
    assert await rig.checkpoints.restore() == 2


async def test_a_job_without_checkpoints_begins_where_its_spec_says(
    make: Any, connect: Connect, tmp_path: Path
) -> None:
    rig = await make()
    assert await rig.checkpoints.restore(fresh=True) == 0
    assert rig.stand_ins[0].restored == []
    await rig.take(2)
    named = str(rig.folder)
    rig.spec = rig.spec.model_copy(update={"resume_from": named, "artifacts": str(tmp_path / "other")})
    await rig.start(1)
    for one in rig.node:
        await one.stop(drain=False)
    with pytest.raises(Unavailable, match="no node could read it"):  # nor does the orchestrator try
        await rig.checkpoints.restore(fresh=True)
    await serve_node(await connect(NODE.sid, EntityKind.CLUSTER))
    assert await rig.checkpoints.restore(fresh=True) == 2
    assert rig.stand_ins[0].restored == [(2, f"{named}/00000002-1-1")]
    rig.spec = rig.spec.model_copy(update={"resume_from": str(tmp_path / "nothing")})
    await rig.start(1)
    with pytest.raises(Unrecoverable, match=r"there is no manifest\.json"):
        await rig.checkpoints.restore(fresh=True)


async def test_what_validations_decided_goes_back_with_the_weights_and_not_before(
    make: Any, tmp_path: Path
) -> None:
    """A successor that finds members at their old version goes on there, by what was decided there."""
    rig = await make()
    stopped = RecipeProgress(step=2, drops=1, stopped_at=2, because="loss has not improved")
    later = RecipeProgress(step=4, drops=3)

    async def goes_back(to: RecipeProgress) -> None:
        await rig.journal.note(now=True, progress=later)
        rig.stand_ins[0].unreachable = True
        with pytest.raises(Unavailable):
            await rig.checkpoints.restore()
        assert rig.journal.record.progress == later
        rig.stand_ins[0].unreachable = False
        await rig.checkpoints.restore()
        assert rig.journal.record.progress == to

    await goes_back(RecipeProgress())
    await rig.journal.note(now=True, progress=stopped)
    await rig.take(2)
    await goes_back(stopped)

    elsewhere = {"resume_from": str(rig.folder), "artifacts": str(tmp_path / "other")}
    same = rig.spec.model_copy(update=elsewhere)
    other = same.model_copy(update={"data": same.data.model_copy(update={"sample_tokens": 99})})
    for job, progress in ((same, stopped), (other, RecipeProgress(drops=1))):
        rig.spec = job
        await rig.start(1)
        await goes_back(progress)


async def test_auto_learns_the_cost_answers_a_hot_device_and_does_not_besiege_a_store(make: Any) -> None:
    rig = await make(training={"steps": 100_000})
    checkpoints = rig.checkpoints
    for step in range(1, 7):
        rig.commit(step, 10.0)
    assert not checkpoints.due(5)
    rig.stand_ins[0].fails = Unavailable("the disk is full")
    await rig.take(6)  # the first, after a minute
    assert not checkpoints.due(7)
    assert checkpoints.due(12)
    rig.stand_ins[0].fails = None
    await rig.take(12)
    assert rig.left() == whole("00000012-1-2")
    told = (await rig.told())[-1]
    assert "the first, whose cost is not known yet" in told
    assert "2 instances" in told
    assert not checkpoints.due(13)

    def heat(temperature_c: float) -> None:
        report = QosReport(sid="router-a", cluster="a", window_s=1.0, job=JOB, temperature_c=temperature_c)
        rig.mesh.report(report)

    heat(94.0)
    await rig.take(13)
    assert rig.left() == whole("00000012-1-2", "00000013-1-3")
    assert "at once: cluster a: a device at 94 °C" in (await rig.told())[-1]
    await rig.take(14)  # a cheap one pays at every step of 10 s, with a failure every 10 minutes ahead
    assert "at once" not in (await rig.told())[-1].partition("why: ")[2]
    heat(60.0)
    assert not checkpoints.due(15)
    heat(95.0)
    assert checkpoints.due(16)
