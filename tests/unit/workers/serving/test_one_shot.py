"""Samples of many requests as one batch: the same bits as alone, or alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from schemas.errors import BadInput, BadModel
from schemas.job_file.model import ModelSpec
from tests.builders.served_models import compute_threads
from workers.compute.model import graph_of
from workers.graph.model_graph import ModelGraph
from workers.serving.one_shot import BatchProbe, OneShotModel, batch_unit, batched, probed_batches
from workers.serving.stage_model import run_layers, stage_layers

SPEC = ModelSpec(factory="user:model", args={})


class ByCompany(nn.Module):
    """What no padding mends: a sample's numbers depend on how many there are."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[0]


def classifier(*more: nn.Module) -> ModelGraph:
    torch.manual_seed(0)
    return graph_of(
        SPEC,
        nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(128, 10),
            *more,
        ),
        {"inputs": torch.zeros(1, 1, 8, 8)},
    )


def test_padded_batches_have_each_samples_own_bits_through_all_stages() -> None:
    graph = classifier()
    sample = {"inputs": torch.rand(1, 8, 8)}
    with compute_threads(1):
        stages = [OneShotModel(graph, 0, 2), OneShotModel(graph, 2, len(graph))]
        batches = probed_batches(sample, graph.inputs, 16)
        first = stages[0].probe(batches)
        second = stages[1].probe(first.behind)
        unit = batch_unit([first, second], 16)
        assert unit
        samples = [{"inputs": torch.rand(1, 8, 8)} for _ in range(11)]

        def answers(chosen: list[dict[str, Tensor]]) -> list[Tensor]:
            passed = stages[0].run(batched(chosen, graph.inputs, unit))
            return [found["output"] for found in stages[1].answers(passed, len(chosen))]

        together = answers(samples)
        for size in (1, 2, 3, 5, 11):
            assert all(map(torch.equal, answers(samples[:size]), together))


def test_samples_that_know_their_number_are_computed_alone_and_the_layer_is_named() -> None:
    graph = classifier(ByCompany())
    model = OneShotModel(graph, 0, len(graph))
    with compute_threads(1):
        probe = model.probe(probed_batches({"inputs": torch.rand(1, 8, 8)}, graph.inputs, 8))
    assert probe.differs[5] == "5"
    assert batch_unit([probe], 8) == 0


def test_a_unit_agrees_at_all_its_multiples() -> None:
    assert batch_unit([BatchProbe({}, {})], 8) == 1
    assert batch_unit([BatchProbe({1: "a", 3: "a", 5: "a"}, {})], 8) == 2
    assert batch_unit([BatchProbe({1: "a", 2: "a"}, {}), BatchProbe({5: "b", 3: "b"}, {})], 16) == 4


def test_bad_samples_and_outputs_are_named() -> None:
    with pytest.raises(BadInput, match="sample 1 has no inputs; the model takes inputs, and it has x"):
        batched([{"inputs": torch.zeros(2)}, {"x": torch.zeros(2)}], ("inputs",), 1)
    with pytest.raises(BadInput, match=r"sample 1: inputs is torch.float32 \(3,\), and the first sample's"):
        batched([{"inputs": torch.zeros(2)}, {"inputs": torch.zeros(3)}], ("inputs",), 1)
    graph = classifier(nn.Flatten(0))
    model = OneShotModel(graph, 0, len(graph))
    with pytest.raises(BadModel, match=r"output output has the shape \(20,\) for 2 samples"):
        model.answers((torch.zeros(2, 1, 8, 8),), 2)


class Branches(nn.Module):
    """Calls of many kinds: own weights, lists, slices, sizes, a view that is not contiguous, a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.first(x)
        turned = found.transpose(1, 3)
        both = torch.cat([turned, turned * self.scale[:, None, None]], dim=3)
        pooled = both[:, 1:].mean((1, 3))
        with torch.autocast("cpu", torch.bfloat16):
            narrow = self.second(pooled)
        flat = nn.functional.layer_norm(pooled, (8,)) + narrow.float()
        return {"flat": flat.view(flat.shape[0], -1), "halves": flat.chunk(2, dim=1)[1], "turned": turned}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_batch_has_the_bits_of_the_layers_one_by_one(dtype: str | None) -> None:
    torch.manual_seed(0)
    model = Branches() if dtype is None else Branches().to(torch.bfloat16)
    spec = ModelSpec.model_validate(
        {"factory": "user:model", "args": {}} | ({"dtype": dtype} if dtype else {})
    )
    graphs = [classifier(), graph_of(spec, model, {"x": torch.zeros(2, 1, 8, 8)})]
    for graph in graphs:
        for cut in range(len(graph)):
            with compute_threads(1), torch.inference_mode():
                batch = torch.rand(5, 1, 8, 8)
                layers = stage_layers(graph, 0, len(graph))
                values = run_layers(layers, layers[0].slice.unpacked((batch,)))
                expected = layers[-1].slice.named_outputs(values)
                rest = (batch,)
                if cut:
                    rest = OneShotModel(graph, 0, cut).run(rest)
                answers = OneShotModel(graph, cut, len(graph)).answers(rest, 5)
            assert answers[0].keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(torch.stack([each[name] for each in answers]), tensor)
