"""What a stage is found to be when it is loaded, and what the registry is told of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor

from bus.connection import Bus
from schemas.cluster import InstanceStart
from schemas.errors import BadModel
from schemas.registry import TensorSchema
from tests.builders.graphs import start, unit
from tests.builders.jobs import gpt, spec
from workers.compute.compute_thread import ComputeThread
from workers.compute.deferred_model import build_layers
from workers.serving.prepacked import PrepackedWeight
from workers.serving.runtime.stage_loading import LoadedStage, load_stage, tried_tokens
from workers.serving.stage_model import StageModel

NO_BUS = cast(Bus, None)
"""Weights that the seed makes come from nowhere."""
TOKENS = TensorSchema(name="inputs", shape=(6,), dtype="int64")


def order(
    stage: int = 0, stages: int = 1, *, model: Any = None, layers: int = 4, **serve: Any
) -> InstanceStart:
    first, last = layers * stage // stages, layers * (stage + 1) // stages
    kept = spec(model=model or gpt(context=80), serve={"service": "s", **serve})
    part = unit(f"j-s{stage}-r0", first_layer=first, last_layer=last)
    return start(part, spec=kept, stages=stages, layer_count=layers, batch=(TOKENS,))


async def loaded(given: InstanceStart) -> LoadedStage:
    assert given.spec.serve is not None
    async with ComputeThread() as thread:
        return await load_stage(NO_BUS, given, given.spec.serve, thread)


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_stage_says_what_it_is(stage: int) -> None:
    given = order(stage, 2, cache_mib=1, sessions=5)
    found = await loaded(given)
    assert given.spec.serve is not None
    tags = dict(tag.removeprefix("serve.").split("=", 1) for tag in found.tags(given.spec.serve))
    fingerprint = tags.pop("fingerprint")
    assert len(fingerprint) == 16
    rows = int(tags.pop("rows"))
    width, layers = 16, 1
    kept = 4 * width * (stage == 0)  # float32, for the stage behind
    assert rows == (1 << 20) // (64 * (4 * 2 * width * layers + kept)) * 64
    assert tags == {
        "kind": "generate",
        "exact": "true",
        "cached": "true",
        "context": "80",
        "vocabulary": "256",
        "sessions": "5",
    }
    assert found.limits(given, given.spec.serve).chunk_rows == 64


async def test_a_model_that_gives_no_logits_answers_with_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "users_scores.py").write_text(
        "from torch import nn\ndef scores(): return nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))\n"
    )
    given = order(model={"factory": "users_scores:scores"}, layers=2)
    example = TensorSchema(name="inputs", shape=(6,), dtype="float32")
    found = await loaded(given.model_copy(update={"batch": (example,)}))
    assert (found.kind, found.exact, found.because) == ("predict", True, "")


async def test_exactness_that_is_required_and_not_had_is_refused_in_one_line() -> None:
    given = order(1, 2, kind="predict", exact="required").model_copy(update={"batch": ()})
    with pytest.raises(BadModel) as raised:
        await loaded(given)
    assert raised.value.text == "serve.exact is required, but no example of its input is known"


async def test_the_stages_of_a_model_of_single_passes_find_the_same_batches() -> None:
    stages = [await loaded(order(stage, 2, kind="predict")) for stage in range(2)]
    assert [stage.exact for stage in stages] == [True, True]
    assert stages[0].unit == stages[1].unit
    serve = order(kind="predict").spec.serve
    assert serve is not None
    assert f"serve.unit={stages[0].unit}" in stages[0].tags(serve)


async def test_samples_of_a_large_model_of_several_stages_are_computed_alone_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "workers.serving.runtime.stage_loading.build_layers", partial(build_layers, whole_bytes=0)
    )
    plain = await loaded(order(1, 2, kind="predict"))
    assert (plain.exact, plain.unit) == (False, 1)
    assert "large model's stages are not probed together" in plain.because
    alone = await loaded(order(1, 2, kind="predict", exact="required"))
    assert (alone.exact, alone.unit) == (True, 0)


async def test_a_context_that_the_model_does_not_take_is_refused() -> None:
    with pytest.raises(BadModel) as raised:
        await loaded(order(context=81))
    assert raised.value.text == "serve.context is 81, but workers.models.gpt:byte_gpt takes 80 tokens"


async def test_plain_arithmetic_says_so() -> None:
    found = await loaded(order(exact="off"))
    assert (found.exact, found.because) == (False, "serve.exact is off")


def wide(**serve: Any) -> InstanceStart:
    """A model whose weights are large enough to be laid out."""
    return order(model=gpt(context=80, width=64), wave_tokens=48, **serve)


@pytest.mark.parametrize("exact", ["required", "off"])
async def test_weights_of_products_are_laid_out_and_the_fingerprint_says_so(
    exact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await loaded(wide(exact=exact))
    assert found.model is not None
    if not found.model.prepacked:
        pytest.skip("torch has no oneDNN here: weights stay as they are")
    assert found.exact == (exact == "required")
    assert (await loaded(wide(exact=exact))).fingerprint == found.fingerprint
    monkeypatch.setattr(StageModel, "prepack", lambda self, sample: None)
    assert (await loaded(wide(exact=exact))).fingerprint != found.fingerprint


async def test_weights_whose_products_go_by_the_count_of_rows_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product, counts = PrepackedWeight.product, set[int]()

    def by_rows(weight: PrepackedWeight, rows: Tensor, bias: Tensor | None) -> Tensor:
        counts.add(rows.numel() // rows.shape[-1])
        return product(weight, rows, bias) * (1 + 1e-6 * rows.numel() / rows.shape[-1])

    with monkeypatch.context() as patch:
        patch.setattr(PrepackedWeight, "product", by_rows)
        found = await loaded(wide(exact="required"))
    if not counts:
        pytest.skip("torch has no oneDNN here: weights stay as they are")
    assert len(counts) > 2
    assert found.model is not None
    assert (found.exact, found.model.prepacked) == (True, ())
    assert not any(type(w) is PrepackedWeight for layer in found.model.layers for w in layer.parameters())
    monkeypatch.setattr(StageModel, "prepack", lambda self, sample: None)
    assert (await loaded(wide(exact="required"))).fingerprint == found.fingerprint


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, 512),
        ({"sliding_window": 1024}, 1088),
        ({"sliding_window": 8192}, 512),
        ({"rope_scaling": {"original_max_position_embeddings": 2000}}, 2048),
    ],
)
def test_a_large_model_is_tried_beyond_the_lengths_at_which_it_computes_otherwise(
    config: dict[str, Any], tokens: int
) -> None:
    graph: Any = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(**config)))
    assert tried_tokens(graph, 2048) == tokens
    assert tried_tokens(graph, 300) == 300
