"""The state of some layers, copied while the stage computes (ADR-0090)."""

from __future__ import annotations

import pytest
import torch

from tests.builders import graphs
from tests.builders.jobs import gpt, spec
from workers.compute.stage_compute import StageCompute
from workers.state import layer_state
from workers.state.layer_state import SnapshotInPieces, packed, snapshot_of


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> StageCompute:
    monkeypatch.setattr(layer_state, "PIECE_BYTES", 512)
    job = spec(
        model=gpt(layers=4, width=8, heads=1, context=4),
        data={"source": "stdlib:", "sample_tokens": 4},
        training={"steps": 4},
    )
    unit = graphs.unit("j-s0-r0", first_layer=0, last_layer=4)
    made = StageCompute(graphs.start(unit, spec=job, stages=2, layer_count=6), torch.device("cpu"))
    made.build()
    return made


def step(stage: StageCompute) -> None:
    stage.redo(stage.version, [torch.ones_like(weight) for weight in stage.parameters], 0.01)


def test_its_pieces_are_the_snapshot(stage: StageCompute) -> None:
    names = stage.names_in(1, 3)
    copying, pieces = SnapshotInPieces(stage, names), 1
    while copying.advance():
        pieces += 1
    assert pieces > 2
    version, tensors = snapshot_of(stage, names)
    assert copying.is_whole
    assert copying.version == version
    pairs = zip(packed(copying.copied), tensors, strict=True)
    assert all(torch.equal(copied, taken) for copied, taken in pairs)
    step(stage)
    assert any(
        not torch.equal(copied, now)
        for copied, now in zip(packed(copying.copied), snapshot_of(stage, names)[1], strict=True)
    )


def test_a_step_in_between_spoils_it(stage: StageCompute) -> None:
    copying = SnapshotInPieces(stage, stage.names_in(0, 4))
    assert copying.advance()
    step(stage)
    assert not copying.advance()
    assert not copying.is_whole
