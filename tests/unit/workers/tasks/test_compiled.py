"""Layers that torch's compiler compiles: refused in one line where that can't be, or where bits differ."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from schemas.checkpoint import spec_digests
from schemas.errors import BadModel
from tests.builders.jobs import spec
from workers.compute.deferred_model import outlined_graph
from workers.compute.determinism import compute_exactly
from workers.graph import compiled
from workers.graph.stage_module import slice_stage
from workers.tasks.compiled import check_compiled

PROOF = pytest.mark.skipif("COMPILE" not in os.environ, reason="compiles for minutes: make compiled")
SAMPLE = {"inputs": torch.arange(16).view(2, 8), "targets": torch.arange(16).view(2, 8)}
LAYERS = """
import torch
from torch import nn
def layer(): return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))
def tiny(): return nn.Sequential(nn.Embedding(256, 16), layer(), layer(), nn.Linear(16, 256))
class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        return self.linear(x) if x.sum().item() > 0 else x
def looks(): return nn.Sequential(nn.Embedding(256, 16), Looks(), nn.Linear(16, 256))
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "compiled_layers.py").write_text(LAYERS)
    monkeypatch.setenv("DMSC_CODE_PATH", str(tmp_path))
    sys.modules.pop("compiled_layers", None)
    compute_exactly(1, 0)
    return "compiled_layers:tiny"


def test_what_is_compiled_is_part_of_the_state_and_off_by_default() -> None:
    plain, none, some = (
        spec(training={"steps": 1} | more) for more in ({}, {"compile": "none"}, {"compile": "all"})
    )
    assert plain == none
    assert "compile" not in str(spec_digests(plain))
    assert some.training.compile == ("*",)
    assert spec_digests(some) != spec_digests(plain)


def test_a_node_without_a_compiler_and_a_name_that_no_layer_has_are_one_line(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = spec(model={"factory": tiny}, training={"steps": 1, "compile": ["3", "blocks.*"]})
    graph = outlined_graph(job.model, 0, SAMPLE)
    with pytest.raises(BadModel, match=r"'blocks\.\*' matches no layer; there are 0, 1, 2 and 1 more"):
        check_compiled(job, graph, SAMPLE, "n1", "cpu")
    monkeypatch.setenv("PATH", "")
    job = spec(model={"factory": tiny}, training={"steps": 1, "compile": ["3"]})
    with pytest.raises(BadModel, match=r"node n1 lacks a C\+\+ compiler \(g\+\+\)"):
        check_compiled(job, graph, SAMPLE, "n1", "cpu")


@PROOF
def test_compiled_layers_agree_in_two_processes_and_wherever_the_model_is_cut(tiny: str) -> None:
    job = spec(model={"factory": tiny}, training={"steps": 1, "compile": ["1", "2"]})
    graph = outlined_graph(job.model, 0, SAMPLE)
    assert check_compiled(job, graph, SAMPLE, "n1", "cpu") == compiled.compiler_digest("cpu")
    ends = []
    for cut in ([(0, 4)], [(0, 2), (2, 4)]):
        for recompute in ((), ("*",)):
            sent: tuple[Tensor, ...] = (SAMPLE["inputs"],)
            stages = [slice_stage(graph, *own, compiled=["1", "2"], recompute=recompute) for own in cut]
            for stage in stages:
                sent = stage(*sent, step=0, microbatch=0)
            sent[0].square().sum().backward()
            first = next(iter(graph.parameters(0).values()))
            assert first.grad is not None
            ends.append((sent[0].detach(), first.grad))
            first.grad = None
    plain = slice_stage(graph, 0, 4)(SAMPLE["inputs"], step=0, microbatch=0)[0]
    torch.testing.assert_close(ends[0][0], plain.detach(), rtol=1e-5, atol=1e-6)
    for end in ends[1:]:
        assert all(torch.equal(one, other) for one, other in zip(ends[0], end, strict=True))


@PROOF
def test_a_layer_that_can_not_be_compiled_is_one_line(tiny: str) -> None:
    job = spec(model={"factory": "compiled_layers:looks"}, training={"steps": 1, "compile": "all"})
    graph = outlined_graph(job.model, 0, SAMPLE)
    assert isinstance(graph.model, nn.Module)
    with pytest.raises(
        BadModel, match=r"layer 1 \(1: Looks\) can't be compiled: .*training.compile"
    ) as caught:
        check_compiled(job, graph, SAMPLE, "n1", "cpu")
    assert "\n" not in caught.value.text
