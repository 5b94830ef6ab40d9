"""The analysis of a job: a topology with plausible costs, or one line that names what is wrong."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from schemas.job import JobSpec
from schemas.job_file.initial_weights import InitialWeights
from schemas.task_graph import ModelTopology
from tests.builders.jobs import gpt, spec
from workers.compute import deferred_model
from workers.tasks import served
from workers.tasks.analysis import main

EXAMPLE = Path(__file__).parents[4] / "examples" / "stdlib-gpt.yaml"


def asked(folder: Path, spec: JobSpec) -> dict[str, Any]:
    result = folder / "result.json"
    payload = {"job": "j", "spec": spec.model_dump(mode="json"), "cluster": "a", "node": "n", "device": "cpu"}
    assert main(payload, result) == 0
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def test_the_example_is_analysed_within_seconds(tmp_path: Path) -> None:
    spec = JobSpec.model_validate(yaml.safe_load(EXAMPLE.read_text()))
    began = time.monotonic()
    topology = ModelTopology.model_validate(asked(tmp_path, spec)["topology"])
    assert time.monotonic() - began < 20  # about 1 s on an idle core
    assert [layer.name for layer in topology.layers] == ["embed", *(f"block_{i}" for i in range(6)), "head"]
    assert topology.parameters == sum(layer.parameters for layer in topology.layers)
    assert 2_000_000 < topology.parameters < 5_000_000
    block = topology.layers[1]
    assert block.output[0].shape == (128, 192)
    assert block.output[0].dtype == "float32"
    assert block.output_bytes == 4 * 128 * 192 * 4
    assert block.activation_bytes > 5 * block.output_bytes
    assert block.forward_ms > 0
    assert block.backward_ms > 0
    assert topology.input_bytes == 2 * 4 * 128 * 8
    assert topology.data_tokens > 4_000_000
    assert len(topology.code_digest) == 64
    assert topology.tied == ()


def test_types_of_parameters_are_counted(tmp_path: Path) -> None:
    data = {"source": f"file://{__file__}", "sample_tokens": 8}
    typed = spec(model=gpt() | {"dtype": "bfloat16", "freeze": ["block_*"], "quantize": "int8"}, data=data)
    topology = ModelTopology.model_validate(asked(tmp_path, typed)["topology"])
    assert topology.optimizer_bytes == 12, "two moments and a master"
    embed, block = topology.layers[:2]
    assert embed.parameter_bytes == 2 * embed.parameters
    assert block.output[0].dtype == "bfloat16"
    assert block.frozen == block.parameters
    assert block.parameter_bytes < 1.5 * block.parameters
    refused = asked(tmp_path, spec(model=gpt() | {"quantize": "int8"}, data=data))["failed"]
    assert refused["text"].startswith("model.quantize: int8 is for frozen weights of linear layers")


@pytest.fixture
def users_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "data.txt").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "users_layers.py").write_text(
        """
import torch
from torch import nn

def chain(*layers):
    return nn.Sequential(nn.Embedding(256, 8), *layers)

def branching():
    from workers.graph.declared import DeclaredGraph
    graph = DeclaredGraph(inputs=("inputs",))
    graph.layer("token", lambda: nn.Embedding(256, 8), "inputs")
    graph.layer("deeper", lambda: nn.Linear(8, 8), "token")
    graph.layer("mixed", Sum, "deeper", "token")
    graph.layer("head", lambda: nn.Linear(8, 256), "mixed")
    return graph.returns(logits="head")

class Sum(nn.Module):
    def forward(self, left, right): return left + right

def good(): return chain(nn.Linear(8, 256))
def misfit(): return chain(nn.Linear(8, 16), nn.Linear(8, 256))
def few_logits(): return chain(nn.Linear(8, 100))
def pooled(): return chain(nn.Flatten(), nn.Linear(64, 256))
def in_place(): return chain(nn.ReLU(inplace=True), nn.Linear(8, 256))
def floats_first(): return nn.Sequential(nn.Linear(8, 256))

class Pair(nn.Module):
    def forward(self, x): return x, x.sum()

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 256)
    def forward(self, x, total): return self.out(x + total)

class Dictionary(nn.Module):
    def forward(self, x): return {"hidden": x}

def two_tensors(): return chain(Pair(), Both())
def ends_in_two(): return chain(nn.Linear(8, 256), Pair())
def dictionary(): return chain(Dictionary(), nn.Linear(8, 256))
def tied():
    model = chain(nn.Linear(8, 8), nn.Linear(8, 256, bias=False))
    model[2].weight = model[0].weight
    return model
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
    def forward(self, x): return self.norm(x)
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.seen += 1
        return x

class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
    def forward(self, x):
        self.seen += 1
        return x

def hidden(): return chain(Hidden(), nn.Linear(8, 256))
def renormed(): return nn.Sequential(nn.Embedding(256, 8, max_norm=0.1), nn.Linear(8, 256))
def shared_norm():
    norm = nn.BatchNorm1d(8)
    return chain(norm, nn.Linear(8, 8), norm, nn.Linear(8, 256))
class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.mix, self.out = nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, 256)
    def forward(self, inputs):
        x = self.token(inputs) * 1.0
        x += self.mix(x * 2)
        return self.out(x)

def batch_norm(): return chain(Normed(), nn.Linear(8, 256))
def average_norm(): return chain(nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 256))
def counting(): return chain(Counting(), nn.Linear(8, 256))
def still_buffers():
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    norm.register_buffer("scale", torch.ones(8))
    return chain(norm, nn.Linear(8, 256))
def double(): return chain(nn.Linear(8, 8).to(torch.float64), nn.Linear(8, 256))
def vector_loss(output, targets): return output.mean(dim=(0, 1))
def constant_loss(output, targets): return torch.zeros(())
def failing_loss(output, targets): raise ValueError("no targets like these")
def falling(step, total): return 1 - step / total
"""
    )
    sys.modules.pop("users_layers", None)
    yield tmp_path
    sys.modules.pop("users_layers", None)


def job(factory: str, loss: str = "cross_entropy", **data: Any) -> JobSpec:
    return spec(
        model={"factory": f"users_layers:{factory}", "loss": loss},
        data={"source": "data.txt", "sample_tokens": 8, **data},
        training={"steps": 1, "microbatch_samples": 2},
    )


@pytest.mark.parametrize(
    ("spec", "code", "text"),
    [
        (job("absent"), "bad_model", "has no 'absent'"),
        (
            job("misfit"),
            "bad_model",
            "layer 2 (2: Linear) does not fit behind layer 1 (1: Linear), which gives [2,8,16] float32",
        ),
        (job("floats_first"), "bad_model", "layer 0 (0: Linear) does not accept inputs [2,8] int64"),
        (job("few_logits"), "bad_model", "100 logits per token, but bytes need 256"),
        (job("pooled"), "bad_model", "needs logits [2,8,vocabulary]"),
        (job("in_place"), "bad_model", "changes its input in place"),
        (job("ends_in_two"), "bad_model", "a loss takes one tensor"),
        (job("dictionary"), "bad_model", "layer 1 (1: Dictionary) returned a dict"),
        (
            job("counting"),
            "bad_model",
            "layer 1 (1: Counting) changes its buffer seen in its forward pass, which would depend on who "
            "computes what; use torch's batch normalisation with a momentum, LayerNorm or GroupNorm",
        ),
        (job("average_norm"), "bad_model", "layer 1 (1: BatchNorm1d) changes its buffer"),
        (job("hidden"), "bad_model", "layer 1 (1: Hidden) changes its buffer seen in its forward pass"),
        (
            job("renormed"),
            "bad_model",
            "layer 0 (0: Embedding) changes its parameter weight in its forward pass, which would depend on "
            "who computes what; leave its changes to the optimizer",
        ),
        (job("shared_norm"), "bad_model", "layer 3 (3: BatchNorm1d) is called 2 times in a pass"),
        (
            job("double"),
            "bad_model",
            "parameter 1.weight is float64; trained parameters must be float32, bfloat16 or float16: "
            "set model.dtype, or freeze it",
        ),
        (job("good", "users_layers:vector_loss"), "bad_model", "must return a scalar mean"),
        (job("good", "users_layers:constant_loss"), "bad_model", "does not depend on the model's parameters"),
        (job("good", "users_layers:failing_loss"), "bad_model", "ValueError: no targets like these"),
        (job("good", "users_layers:none"), "bad_model", "has no 'none'"),
        (job("good", source="absent.txt"), "bad_data", "absent.txt does not exist"),
        (job("good", sample_tokens=5000), "bad_data", "less than one sample of 5000 tokens"),
        (job("good", source="bus://datasets/x"), "internal", "the worker failed: KeyError"),
    ],
)
def test_what_cannot_be_trained_is_one_line(users_layers: Path, spec: JobSpec, code: str, text: str) -> None:
    failed = asked(users_layers, spec)["failed"]
    assert failed["code"] == code
    assert text in failed["text"]
    assert "\n" not in failed["text"]


def test_what_initial_weights_and_the_model_do_not_share_is_in_the_answer(users_layers: Path) -> None:
    def asked_with(content: dict[str, Tensor], **more: Any) -> dict[str, Any]:
        save_file(content, users_layers / "model.safetensors")
        source = InitialWeights(url=str(users_layers), **more)
        return asked(users_layers, job("tied").model_copy(update={"initial_weights": source}))

    own = {"2.weight": torch.ones(256, 8), "1.weight": torch.ones(8, 8), "1.bias": torch.ones(8)}
    topology = ModelTopology.model_validate(asked_with(own)["topology"])
    assert topology.unmatched_weights == "", "2 and 0 are one weight, under whichever name it was saved"
    topology = ModelTopology.model_validate(asked_with(own | {"extra.bias": torch.ones(1)})["topology"])
    assert topology.unmatched_weights.endswith("1 in the files that the model lacks: extra.bias")
    del own["1.bias"]
    failed = asked_with(own)["failed"]
    assert failed["code"] == "bad_model"
    assert "lacks 1 of the 3 tensors of the model: 1.bias" in failed["text"]
    assert "\n" not in failed["text"]
    topology = ModelTopology.model_validate(asked_with(own, strict=False)["topology"])
    assert "1 missing, which begin as the factory makes them: 1.bias" in topology.unmatched_weights


def test_a_model_that_is_never_whole_is_analysed_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = spec(model=gpt(width=128, heads=4), data={"sample_tokens": 8})
    whole = ModelTopology.model_validate(asked(tmp_path, asks)["topology"])
    monkeypatch.setattr(deferred_model, "WHOLE_BYTES", 0)
    parts = ModelTopology.model_validate(asked(tmp_path, asks)["topology"])
    same = {"forward_ms": 0.0, "backward_ms": 0.0}
    assert [layer.model_copy(update=same) for layer in parts.layers] == [
        layer.model_copy(update=same) for layer in whole.layers
    ]
    assert parts.model_copy(update={"layers": ()}) == whole.model_copy(update={"layers": ()})


def test_a_schedule_is_tried_with_the_number_of_steps_that_the_data_comes_to(users_layers: Path) -> None:
    for until, found in (({"epochs": 2}, "topology"), ({"metric": "loss"}, "failed")):
        training = {
            "until": until,
            "schedule": {"factory": "users_layers:falling"},
            "microbatch_samples": 2,
            "validate_every": 1,
        }
        asks = job("good").model_copy(update={"training": spec(training=training).training})
        assert found in asked(users_layers, asks)


def test_buffers_that_stay_as_they_are_are_fine(users_layers: Path) -> None:
    assert "topology" in asked(users_layers, job("still_buffers"))


def test_what_one_layer_changes_of_another_s_is_one_layer_with_it(users_layers: Path) -> None:
    topology = ModelTopology.model_validate(asked(users_layers, job("Adds"))["topology"])
    assert [layer.name for layer in topology.layers] == ["token", "out"]


def test_layers_may_pass_several_tensors_and_share_parameters(users_layers: Path) -> None:
    topology = ModelTopology.model_validate(asked(users_layers, job("two_tensors"))["topology"])
    assert [len(layer.output) for layer in topology.layers] == [1, 2, 1]
    edges = [(edge.upstream, edge.downstream) for edge in topology.edges]
    assert edges == [(-1, 0), (0, 1), (1, 2)]
    assert all(
        edge.bytes == topology.layers[edge.upstream].output_bytes
        for edge in topology.edges
        if edge.upstream >= 0
    )
    branches = ModelTopology.model_validate(asked(users_layers, job("branching"))["topology"])
    assert [(edge.upstream, edge.downstream) for edge in branches.edges] == [
        *((-1, 0), (0, 1), (0, 2)),
        *((1, 2), (2, 3)),
    ], "what two layers read counts for each"
    assert len({edge.bytes for edge in branches.edges[1:]}) == 1
    tied = ModelTopology.model_validate(asked(users_layers, job("tied"))["topology"])
    assert tied.shared == ((0, 2),)
    assert tied.parameters == 256 * 8 + 8 * 8 + 8
    assert [layer.shared for layer in tied.layers] == [{"0.weight": 256 * 8}, {}, {"0.weight": 256 * 8}]


def test_what_is_frozen_or_computed_again_is_told(users_layers: Path) -> None:
    asks = job("good")
    asks = asks.model_copy(
        update={
            "model": asks.model.model_copy(update={"freeze": ("0.*",)}),
            "training": asks.training.model_copy(update={"recompute": ("1",)}),
        }
    )
    embed, linear = ModelTopology.model_validate(asked(users_layers, asks)["topology"]).layers
    assert (embed.frozen, linear.frozen) == (256 * 8, 0)
    assert linear.activation_bytes == embed.output_bytes, "what it reads"


@pytest.mark.parametrize(("kind", "counted"), [("auto", False), ("generate", False), ("predict", True)])
def test_what_is_behind_the_last_attention_counts_for_wanted_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, counted: bool
) -> None:
    """A version that generates computes logits of few of a prompt's rows, so that its head costs less."""
    monkeypatch.setattr(served, "WANTED_ROWS", 0.0)
    data = {"source": f"file://{__file__}", "sample_tokens": 8}
    version = spec(model=gpt(), data=data, serve={"service": "s", "kind": kind})
    *blocks, head = ModelTopology.model_validate(asked(tmp_path, version)["topology"]).layers
    assert all(block.forward_ms > 0 for block in blocks)
    assert (head.forward_ms > 0) == counted
