"""Vectors of texts: of encoders and of models of logits, the same bits however the model is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from schemas.errors import BadInput
from schemas.job_file.model import ModelSpec
from schemas.services.prediction import NamedTensor
from tests.builders.served_models import compute_threads, served_graph
from workers.compute.model import build, graph_of
from workers.graph.model_graph import ModelGraph
from workers.serving.embedded_rows import inputs_of, pooled_output, pooled_rows
from workers.serving.one_shot import Batch, OneShotModel, batched
from workers.serving.runtime.named_tensors import token_inputs

BERT = {
    "model_type": "bert",
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
IDS = torch.tensor([5, 7, 11, 13, 17])


def vector(graph: ModelGraph, cuts: list[int], tokens: Tensor, *, of_logits: bool) -> tuple[str, Tensor]:
    """What stages that are cut there make of the tokens."""
    passed: Batch = batched([inputs_of(tokens, graph.inputs)], graph.inputs, 0)
    stages = [OneShotModel(graph, first, last, of_logits=of_logits) for first, last in pairwise(cuts)]
    for stage in stages[:-1]:
        passed = stage.run(passed)
    ((named,),) = (stages[-1].embedded(passed, 1),)
    ((name, value),) = named.items()
    return name, value


@pytest.mark.parametrize("model", ["byte_gpt", "llama", "gpt2"])
def test_of_a_model_of_logits_it_is_the_mean_of_the_rows_before_them(model: str) -> None:
    graph = served_graph(model)
    with compute_threads(1):
        name, whole = vector(graph, [0, len(graph)], IDS, of_logits=True)
        assert name.startswith("mean of the rows in front of layer ")
        assert (whole.dtype, whole.shape) == (torch.float32, (64,))
        for cut in range(1, len(graph)):
            assert torch.equal(vector(graph, [0, cut, len(graph)], IDS, of_logits=True)[1], whole)
        shorter = vector(graph, [0, len(graph)], IDS[:3], of_logits=True)[1]
        assert not torch.equal(shorter, whole)


def test_of_an_encoder_it_is_the_mean_of_its_last_rows() -> None:
    spec = ModelSpec(
        factory="workers.models.transformers_model:transformers_model", args={"config": BERT, "task": "base"}
    )
    batch = {
        "input_ids": torch.ones(1, 6, dtype=torch.int64),
        "attention_mask": torch.ones(1, 6, dtype=torch.int64),
    }
    graph = build(spec, 1, batch)
    with compute_threads(1), torch.inference_mode():
        name, found = vector(graph, [0, len(graph)], IDS, of_logits=False)
        rows = graph.model.eval()(input_ids=IDS[None], attention_mask=torch.ones_like(IDS)[None])
        assert name == "mean of last_hidden_state"
        assert torch.equal(found, rows.last_hidden_state[0].mean(dim=0))


def test_a_model_says_what_its_vectors_are() -> None:
    rows, vectors = torch.ones(2, 3, 4), torch.zeros(2, 4)
    assert (
        pooled_output({"pooler_output": vectors, "last_hidden_state": rows})[0] == "mean of last_hidden_state"
    )
    assert (
        pooled_output({"last_hidden_state": rows, "sentence_embedding": vectors})[0] == "sentence_embedding"
    )
    assert pooled_output({"pooler_output": vectors})[0] == "pooler_output"
    with pytest.raises(BadInput, match=r"it gives logits \(2, 3, 4\)"):
        pooled_output({"logits": rows})
    with pytest.raises(BadInput, match="2 tensors reach its last layer head"):
        pooled_rows({"a": rows, "b": rows}, "head")


def test_tokens_are_the_input_of_models_of_texts_alone() -> None:
    found = inputs_of(IDS, ("input_ids", "attention_mask", "token_type_ids", "position_ids"))
    assert {name: value.tolist() for name, value in found.items()} == {
        "input_ids": IDS.tolist(),
        "attention_mask": [1] * 5,
        "token_type_ids": [0] * 5,
        "position_ids": [0, 1, 2, 3, 4],
    }
    for names in (("input_ids", "decoder_input_ids"), ("attention_mask",)):
        with pytest.raises(BadInput, match="no vectors of texts: it takes"):
            inputs_of(IDS, names)
    data = IDS.numpy().tobytes()
    (given,) = token_inputs([NamedTensor(name="tokens", dtype="int64", shape=(1, 5), data=data)], ("x",))
    assert (given.name, given.data) == ("x", data)
    with pytest.raises(BadInput, match="int64 alone"):
        token_inputs([NamedTensor(name="x", dtype="int64", shape=(1, 5), data=data)], ("x",))


def test_a_classifier_has_none() -> None:
    spec = ModelSpec(factory="user:model", args={})
    graph = graph_of(spec, nn.Sequential(nn.Linear(5, 4), nn.ReLU()), {"inputs": torch.zeros(1, 5)})
    model = OneShotModel(graph, 0, len(graph))
    with pytest.raises(BadInput, match="it has no vectors of texts: it gives output"):
        model.embedded((torch.zeros(1, 5),), 1)
