"""Folders of transformers in and out: the same logits to the bit, under their names, whatever the cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.files.artifacts import open_artifacts
from schemas.errors import BadInput, BadModel
from schemas.job_file.initial_weights import InitialWeights
from schemas.job_file.model import ModelSpec
from schemas.weights_digest import INDEX_NAME, weights_index
from tests.unit.workers.models.test_transformers_model import FAMILIES
from workers.compute.model import build
from workers.graph.stage_module import StageModule, slice_stage
from workers.models.adapter_weights import write_adapted
from workers.models.hugging_face_folder import (
    folder_files,
    is_adapter,
    library_names,
    public_names,
    stand_ins,
    written_names,
)
from workers.models.transformers_model import TASKS
from workers.state.initial_weights import load_initial
from workers.state.weights import export

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
CAUSAL, ANY = "workers.models.hugging_face:causal_lm", "workers.models.transformers_model:transformers_model"
TOKENS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
FOLDERS = FAMILIES | {
    family: ("causal-lm", {k: v for k, v in config.items() if k != "model_type"}, {"input_ids": TOKENS})
    for family, config in (("llama", LLAMA), ("gpt2", GPT2))
}
"""Family → task, config, batch."""


def spec(factory: str, config: Any, **args: Any) -> ModelSpec:
    more = {"task": "causal-lm"} if factory == ANY else {}
    return ModelSpec(factory=factory, args={"config": config, **more, **args})


def stages(model: ModelSpec, seed: int, batch: dict[str, torch.Tensor] | None = None) -> list[StageModule]:
    graph = build(model, seed, {"inputs": TOKENS} if batch is None else batch)
    middle = len(graph) // 2
    return [slice_stage(graph, 0, middle), slice_stage(graph, middle, len(graph))]


async def written(folder: Path, model: ModelSpec, parts: list[StageModule]) -> None:
    """What the instances and the orchestrator write of a finished job."""
    artifacts, called = open_artifacts(str(folder), None), written_names(model)
    shard_of: dict[str, str] = {}
    for index, stage in enumerate(parts):
        shard = f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors"
        _, lines = await export(stage, artifacts, shard, called)
        shard_of |= dict.fromkeys(lines, shard)
    names = {name: called(name) for name in shard_of}
    (folder / INDEX_NAME).write_text(json.dumps(weights_index(shard_of, 1, names)))
    for name, content in folder_files(model).items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("factory", "family", "tied"),
    [
        *((CAUSAL, family, tied) for family in ("llama", "gpt2") for tied in (False, True)),
        *((ANY, family, tied) for family in ("llama", "gpt2", "t5") for tied in (False, True)),
        (ANY, "bert", True),  # untied it has a bias that it does not use, and no stage has that
        (ANY, "vit", False),
    ],
)
async def test_a_pretrained_folder_goes_in_and_comes_out(
    tmp_path: Path, factory: str, family: str, tied: bool
) -> None:
    """BERT uses a buffer that no file has; transformers has renamed ViT's layers, but not its files."""
    task, settings, batch = FOLDERS[family]
    loader = getattr(transformers, TASKS[task])
    parsed = transformers.AutoConfig.for_model(family, **settings, tie_word_embeddings=tied)
    torch.manual_seed(7)
    pretrained = loader.from_config(parsed).eval()
    with torch.no_grad():  # no bias is 0 and no scale 1: what gets lost shows
        for weight in pretrained.parameters():
            weight += 0.05 * torch.randn_like(weight)
    pretrained.save_pretrained(tmp_path / "in", max_shard_size="10KB")
    (tmp_path / "in" / "tokenizer_config.json").write_text("{}")
    if factory == CAUSAL:
        model, given = spec(factory, str(tmp_path / "in"), tie_weights=tied), {"inputs": TOKENS}
    else:
        model, given = ModelSpec(factory=factory, args={"config": str(tmp_path / "in")}), batch
    parts, source = stages(model, 1, given), InitialWeights(url=str(tmp_path / "in"))
    for stage in parts:
        matched = await load_initial(
            stage,
            open_artifacts(source.url, None),
            source,
            public_name=public_names(model),
            own_names_of=library_names(model),
        )
        assert matched.missing == ()
    (tmp_path / "out").mkdir()
    await written(tmp_path / "out", model, parts)
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    back, report = loader.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= report.keys()
    assert not any(report.values()), report
    with torch.inference_mode():
        assert torch.equal(back.eval()(**batch).logits, pretrained(**batch).logits)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
async def test_a_head_of_its_own_begins_as_the_embedding_that_was_the_head(
    tmp_path: Path, family: str
) -> None:
    _, settings, batch = FOLDERS[family]
    parsed = transformers.AutoConfig.for_model(family, **settings, tie_word_embeddings=True)
    pretrained = transformers.AutoModelForCausalLM.from_config(parsed).eval()
    pretrained.save_pretrained(tmp_path / "in")
    model, source = spec(CAUSAL, str(tmp_path / "in")), InitialWeights(url=str(tmp_path / "in"))
    parts = stages(model, 1, {"inputs": TOKENS})
    for stage in parts:
        matched = await load_initial(
            stage,
            open_artifacts(source.url, None),
            source,
            public_name=public_names(model),
            stand_ins=stand_ins(model),
        )
        assert matched.missing == ()
    (tmp_path / "out").mkdir()
    await written(tmp_path / "out", model, parts)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert back.lm_head.weight is not back.get_input_embeddings().weight
    with torch.inference_mode():
        assert torch.equal(back(**batch).logits, pretrained(**batch).logits)


@pytest.mark.parametrize("factory", [CAUSAL, ANY])
async def test_a_pretrained_bf16_folder_comes_out_as_bf16(tmp_path: Path, factory: str) -> None:
    parsed = transformers.AutoConfig.for_model(**{**LLAMA, "tie_word_embeddings": False})
    transformers.AutoModelForCausalLM.from_config(parsed).bfloat16().save_pretrained(tmp_path / "in")
    pretrained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype="auto").eval()
    model = spec(factory, str(tmp_path / "in")).model_copy(update={"dtype": "bfloat16"})
    parts, source = stages(model, seed=1), InitialWeights(url=str(tmp_path / "in"))
    for stage in parts:
        await load_initial(stage, open_artifacts(source.url, None), source, public_name=public_names(model))
    (tmp_path / "out").mkdir()
    await written(tmp_path / "out", model, parts)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert {weight.dtype for weight in back.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        logits = pretrained(input_ids=TOKENS).logits
        assert torch.equal(back(input_ids=TOKENS).logits, logits)
        hidden = parts[1](*parts[0](TOKENS))[0]
    assert torch.equal(hidden, logits)


async def test_adapters_begin_new_on_a_pretrained_base(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra `hf` is not installed")
    settings = {**LLAMA, "tie_word_embeddings": False}
    parsed = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    transformers.AutoModelForCausalLM.from_config(parsed).save_pretrained(tmp_path)
    model = spec(ANY, str(tmp_path), lora={"r": 2, "target_modules": ["q_proj"]})
    source = InitialWeights(url=str(tmp_path))
    for stage in stages(model, seed=1):
        before = {name: weight.clone() for name, weight in stage.named_parameters() if ".lora_" in name}
        matched = await load_initial(
            stage,
            open_artifacts(source.url, None),
            source,
            public_name=public_names(model),
            is_new=is_adapter(model),
        )
        assert matched.missing == ()
        assert before
        assert all(torch.equal(stage.get_parameter(name), weight) for name, weight in before.items())
    assert folder_files(model) == {}, "transformers' loader would take the base alone"


async def test_trained_adapters_are_merged_or_kept_as_peft_loads_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra `hf` is not installed")
    settings = {**LLAMA, "tie_word_embeddings": False}
    parsed = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    transformers.AutoModelForCausalLM.from_config(parsed).save_pretrained(tmp_path / "base")
    lora = {"r": 2, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}
    model = spec(ANY, str(tmp_path / "base"), lora=lora)
    graph, source = build(model, 1), InitialWeights(url=str(tmp_path / "base"))
    parts = [slice_stage(graph, 0, 2), slice_stage(graph, 2, len(graph))]
    generator = torch.Generator().manual_seed(5)
    for stage in parts:
        artifacts, names = open_artifacts(source.url, None), public_names(model)
        await load_initial(stage, artifacts, source, public_name=names, is_new=is_adapter(model))
        for _, weight in stage.trainable():
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    (tmp_path / "job").mkdir()
    await written(tmp_path / "job", model, parts)
    with torch.inference_mode():
        (expected,) = parts[1](*parts[0](TOKENS))
        write_adapted(model, tmp_path / "job", tmp_path / "merged", "merge")
        merged, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", output_loading_info=True
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.allclose(merged.eval()(input_ids=TOKENS).logits, expected, atol=1e-5)
        write_adapted(model, tmp_path / "job", tmp_path / "separate", "separate")
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert not torch.allclose(base(input_ids=TOKENS).logits, expected, atol=1e-2)
        separate = peft.PeftModel.from_pretrained(base, tmp_path / "separate").eval()
        assert torch.equal(separate(input_ids=TOKENS).logits, expected)


def test_adapters_that_cannot_be_merged_or_are_not_there_are_one_line(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra `hf` is not installed")
    lora = {"r": 2, "target_modules": ["embed_tokens"]}
    tied = spec(ANY, LLAMA, lora=lora, tie_word_embeddings=True)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(BadModel, match=r"would change lm_head\.weight, too, .*--adapters separate"):
        write_adapted(tied, tmp_path, tmp_path / "out", "merge")
    with pytest.raises(BadModel, match=r"the job has no adapters \(model\.args\.lora\)"):
        write_adapted(spec(ANY, LLAMA), tmp_path, tmp_path / "out", "merge")
    with pytest.raises(BadInput, match="has no weights of a finished job"):
        write_adapted(tied, tmp_path / "nowhere", tmp_path / "out", "merge")
