"""An instance changes its stage in mid-run, for a policy and by hand: the weights do not change."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.automation import OPERATOR, Knob
from schemas.changes import ChangeState, JobChange
from schemas.errors import Conflict
from schemas.job import JobSpec, JobState
from tests.integration.dmsc.command_line import running
from tests.integration.mesh.conftest import Mesh, padded, tiny_job
from tests.integration.mesh.expected_weights import undisturbed
from tests.patience import PATIENCE_S

STEPS = 34
MICROBATCHES = 4
JUDGED = (ChangeState.BETTER, ChangeState.NO_BETTER)
"""Which of the two depends on what else the machine does meanwhile."""


def shape(name: str) -> JobSpec:
    """One block in stage 0, two in stage 1; padded, so that they take as long as they say."""
    job = tiny_job(
        name,
        model={"args": {"layers": 3, "width": 32, "heads": 2, "context": 32, "dropout": 0.1}},
        training={"steps": STEPS, "microbatches": MICROBATCHES, "seed": 5},
        parallel={"stages": 2, "replicas": (3, 1), "segmentation": "uniform"},
        # else the orchestrator would cut it anew first: those three blocks for three replicas
        plan={"shared": [["block_1", "block_2", "head"]]},
    )
    return padded(job, 24.0)


def test_an_instance_moves_to_the_stage_that_holds_the_others_up(mesh: Mesh, tmp_path: Path) -> None:
    with running("policy", "run", "stage-rebalancing", "--state", str(mesh.state), cwd=tmp_path) as policy:
        policy.until("module ready")
        job = mesh.client.submit(shape("moved")).job
        moves: list[JobChange] = []
        texts: list[str] = []
        shares: list[dict[str, int]] = []
        asked = ""
        by_person: list[Knob] = []
        for event in mesh.client.events(job):
            texts += [f"{event.kind}: {event.text}"] if event.text else []
            if event.result is not None:
                shares.append(event.result.shares)
            if event.change is None:
                continue
            moves.append(event.change)
            if asked and event.change.state is ChangeState.UNDER_WAY and event.change.forecast is None:
                by_person = [knob for knob in mesh.client.automation(job).knobs if knob.holder == OPERATOR]
            if event.change.state in JUDGED and not asked:
                asked = mesh.client.move(job, f"{job}-s1-r0", 0)
                with pytest.raises(Conflict, match=r"is changing its stage|must have joined first"):
                    mesh.client.recut(job, "0-3,4")
        record = mesh.client.wait(job, timeout_s=PATIENCE_S)
        said = policy.output

    story = "\n".join([*texts, said])
    assert record.state is JobState.DONE, story
    assert [move.state for move in moves[:2]] == [ChangeState.UNDER_WAY, ChangeState.IN_EFFECT], story
    judged = moves[2]
    assert judged.state in JUDGED, story
    assert (judged.from_stage, judged.to_stage, judged.by) == (0, 1, "stage-rebalancing")
    assert judged.newcomers[0] == f"{job}-s1-r1"
    assert judged.forecast is not None
    assert judged.before_s is not None
    assert judged.after_s is not None
    assert judged.cost_s is not None
    assert any(text.startswith("change: ") and "measured cost" in text for text in texts), story
    assert asked == f"{job}-s1-r0 will leave for stage 0 at the end of this step"
    by_hand = [move for move in moves if move.forecast is None and not move.takes_back]
    assert by_hand, story
    assert (by_hand[0].sid, by_hand[0].newcomers[0]) == (f"{job}-s1-r0", judged.sid)
    assert [(knob.name, knob.value) for knob in by_person] == [(f"place of {judged.sid}", "stage 0")]
    assert record.changes[0] == judged
    assert record.recoveries == 0, story
    assert len(shares) == STEPS
    assert all(sum(share.values()) == 2 * MICROBATCHES for share in shares), "nothing lost, nothing twice"
    assert record.weights is not None
    assert record.weights.sha256 == undisturbed(mesh.client, record.spec)
