"""Weights: in and out under full names, whatever the segmentation, checked before use."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bus.files.artifacts import LocalArtifacts, open_artifacts
from schemas.errors import BadInput, BadModel, NotFound
from schemas.job_file.initial_weights import InitialWeights
from schemas.job_file.recipe import OptimizerSpec
from schemas.step import ExportOrder, Member
from schemas.weights_digest import INDEX_NAME, tensor_line, weights_index, weights_sha256
from tests.builders.jobs import gpt_model
from workers.compute.model import build
from workers.compute.optimizer import StageOptimizer
from workers.graph.sequence import of_sequence
from workers.graph.stage_module import StageModule, slice_stage
from workers.state import weights
from workers.state.initial_weights import describe_match, load_initial
from workers.state.stage_state import StageState
from workers.state.weight_names import renaming
from workers.state.weights import export

SPEC = gpt_model()
Stage = tuple[StageModule, StageOptimizer]


def stages(cuts: list[int], seed: int = 0) -> list[Stage]:
    layers = build(SPEC, seed)
    built = []
    for first, last in zip(cuts, cuts[1:], strict=False):  # noqa: RUF007  # read as (first, last)
        stage = slice_stage(layers, first, last)
        built.append((stage, StageOptimizer(stage, OptimizerSpec())))
    return built


async def exported(url: str, cuts: list[int]) -> tuple[dict[str, str], dict[str, str]]:
    """Tensor lines and the shard of each tensor, of the model written in stages."""
    artifacts = open_artifacts(url, None)
    lines: dict[str, str] = {}
    shard_of: dict[str, str] = {}
    for index, (stage, _) in enumerate(stages(cuts)):
        shard = f"model-{index + 1:05d}-of-{len(cuts) - 1:05d}.safetensors"
        size, tensors = await export(stage, artifacts, shard)
        assert size == sum(weight.numel() * 4 for weight in stage.parameters())
        lines |= tensors
        shard_of |= dict.fromkeys(tensors, shard)
    return lines, shard_of


async def test_the_hash_does_not_depend_on_the_segmentation(tmp_path: Path) -> None:
    hashes = set()
    for number, cuts in enumerate(([0, 4], [0, 1, 4], [0, 2, 3, 4])):
        lines, _ = await exported(str(tmp_path / str(number)), cuts)
        hashes.add(weights_sha256(lines))
    assert len(hashes) == 1
    assert hashes != {weights_sha256(lines | {"head.norm.bias": tensor_line("float32", [16], "0" * 64)})}


async def test_exported_weights_are_plain_safetensors_and_start_a_run_of_another_segmentation(
    tmp_path: Path,
) -> None:
    url = str(tmp_path / "weights")
    _, shard_of = await exported(url, [0, 2, 4])
    plain = load_file(tmp_path / "weights" / "model-00001-of-00002.safetensors")
    assert "block_0.mlp_up.weight" in plain
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    for with_index in (False, True):
        if with_index:
            (tmp_path / "weights" / INDEX_NAME).write_text(json.dumps(weights_index(shard_of, 1)))
        expected = dict(stages([0, 4])[0][0].named_parameters())
        for stage, _ in stages([0, 1, 3, 4], seed=5):
            await load_initial(stage, open_artifacts(url, None), InitialWeights(url=url))
            for name, weight in stage.named_parameters():
                assert torch.equal(weight, expected[name])


async def test_initial_weights_that_do_not_fit_are_named_and_change_nothing(tmp_path: Path) -> None:
    async def refused(content: dict[str, torch.Tensor] | None, text: str, url: Path = tmp_path) -> None:
        if content is not None:
            save_file(content, tmp_path / "model.safetensors")
        ((stage, _),) = stages([0, 4])
        before = [weight.clone() for weight in stage.parameters()]
        with pytest.raises(BadModel) as caught:
            await load_initial(stage, open_artifacts(str(url), None), InitialWeights(url=str(url)))
        assert text in caught.value.text
        assert all(torch.equal(one, other) for one, other in zip(before, stage.parameters(), strict=True))

    whole = {name: weight.detach().clone() + 1 for name, weight in stages([0, 4])[0][0].named_parameters()}
    await refused(None, "there are no .safetensors files")
    await refused(None, "there are no .safetensors files", tmp_path / "absent")
    await refused(None, "is a file; name the folder", tmp_path / "model.safetensors")
    await refused(
        {"other": torch.ones(2)}, f"lacks {len(whole)} of the {len(whole)} tensors of layers 0 to 3"
    )
    await refused(
        whole | {"head.norm.bias": torch.ones(3)}, "head.norm.bias is torch.float32 (3,), but the model has"
    )
    (tmp_path / INDEX_NAME).write_text("{}")
    await refused(whole, "is not an index")
    (tmp_path / INDEX_NAME).write_text(json.dumps(weights_index(dict.fromkeys(whole, "gone.safetensors"), 1)))
    await refused(whole, "the index names gone.safetensors, which is not there")


async def test_what_was_exported_is_told_in_pages_and_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage,) = stages([0, 4])
    held = SimpleNamespace(module=stage[0], optimizer=stage[1])
    member = Member(sid="s", incarnation="i")
    start = SimpleNamespace(
        unit=SimpleNamespace(stage=0),
        job="j",
        spec=SimpleNamespace(artifacts="bus://artifacts", model=SPEC),
    )
    state = StageState(
        cast(Any, None), cast(Any, start), member, cast(Any, None), cast(Any, held), lambda: None
    )
    order = ExportOrder(job="j", epoch=1, version=0, url=str(tmp_path), shard="model.safetensors")
    with pytest.raises(NotFound, match="was not written"):
        await state.export(order.model_copy(update={"after": "head"}))
    whole = await state.export(order)
    assert not whole.more
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.setattr(weights, "PAGE_BYTES", 400)
    pages = [await state.export(order.model_copy(update={"after": ""}))]
    assert (tmp_path / "model.safetensors").exists()
    (tmp_path / "model.safetensors").unlink()
    while pages[-1].more:
        behind = max(pages[-1].tensors)
        pages.append(await state.export(order.model_copy(update={"after": behind})))
    assert not (tmp_path / "model.safetensors").exists(), "a page more is no reason to write again"
    assert len(pages) > 2
    told = [line for page in pages for line in page.tensors.items()]
    assert len(told) == len(whole.tensors)
    assert dict(told) == whole.tensors
    assert {page.bytes for page in pages} == {whole.bytes}


class CountingFolder(LocalArtifacts):
    """A folder that counts the bytes that were read of it."""

    read = 0

    async def _piece(self, name: str, start: int, count: int) -> bytes:
        piece = await super()._piece(name, start, count)
        self.read += len(piece)
        return piece


async def test_a_stage_reads_its_own_tensors_alone(tmp_path: Path) -> None:
    whole = dict(stages([0, 4], seed=7)[0][0].named_parameters())
    save_file({name: weight.detach() for name, weight in whole.items()}, tmp_path / "model.safetensors")
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    for stage, _ in stages([0, 1, 4]):
        folder = CountingFolder(str(tmp_path), str(tmp_path))
        await load_initial(stage, folder, InitialWeights(url=str(tmp_path)))
        own = sum(weight.nbytes for weight in stage.parameters())
        assert own <= folder.read <= own + 2 * (8 + header) + 3 * (64 << 10)
        assert all(torch.equal(weight, whole[name]) for name, weight in stage.named_parameters())


async def test_a_stage_with_the_second_place_of_a_shared_weight_takes_it_by_its_first_name(
    tmp_path: Path,
) -> None:
    """Files have it once: those of an export, and those of other libraries."""

    def tied(seed: int, *cut: int) -> StageModule:
        torch.manual_seed(seed)
        layers = {"embed": nn.Embedding(8, 4), "middle": nn.Linear(4, 4), "head": nn.Linear(4, 8, bias=False)}
        layers["head"].weight = layers["embed"].weight
        return slice_stage(of_sequence(nn.Sequential(OrderedDict(layers)), layers.items()), *cut)

    artifacts = open_artifacts(str(tmp_path), None)
    _, lines = await export(tied(0, 0, 3), artifacts, "model.safetensors")
    assert [name for name in lines if name in ("embed.weight", "head.weight")] == ["embed.weight"]
    expected = tied(0, 0, 3).get_parameter("embed.weight")
    for strict in (True, False):
        source = InitialWeights(url=str(tmp_path), strict=strict)
        for cut in ((0, 3), (0, 2), (2, 3)):
            stage = tied(1, *cut)
            assert (await load_initial(stage, artifacts, source)).missing == ()
            assert torch.equal(dict(stage.trainable())["embed.weight"], expected)


async def test_names_are_mapped_and_types_converted(tmp_path: Path) -> None:
    ((stage, _),) = stages([0, 4])
    own = {name: weight.detach().to(torch.bfloat16) for name, weight in stage.named_parameters()}
    theirs = {
        re.sub(r"^block_(\d+)\.", r"h.\1.", name).replace("embed.", "wrapped.inner."): weight
        for name, weight in own.items()
    }
    save_file(theirs | {"extra.bias": torch.ones(1)}, tmp_path / "model.safetensors")
    rules = {"wrapped.inner": "embed", r"^h\.(\d+)": r"block_\1"}
    source = InitialWeights(url=str(tmp_path), map=rules)
    ((other, _),) = stages([0, 4], seed=1)
    matched = await load_initial(other, open_artifacts(str(tmp_path), None), source)
    assert (matched.missing, matched.unexpected) == ((), ("extra.bias",))
    assert describe_match(matched, source).endswith("1 in the files that the model lacks: extra.bias")
    assert all(torch.equal(weight, own[name].float()) for name, weight in other.named_parameters())
    unmapped = source.model_copy(update={"map": {}})
    with pytest.raises(BadModel, match=r"it has .*h\.0.*initial_weights\.map"):
        await load_initial(other, open_artifacts(str(tmp_path), None), unmapped)
    lenient = unmapped.model_copy(update={"strict": False})
    ((third, _),) = stages([0, 4], seed=2)
    before = third.get_parameter("block_0.mlp_up.weight").detach().clone()
    matched = await load_initial(third, open_artifacts(str(tmp_path), None), lenient)
    assert "block_0.mlp_up.weight" in matched.missing
    assert torch.equal(third.get_parameter("block_0.mlp_up.weight"), before)


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ({"a": "b"}, {"a": ["b"], "a.w": ["b.w"], "aa.w": ["aa.w"]}),
        ({"m.": ""}, {"m.x.w": ["x.w"], "x.w": ["x.w"]}),
        ({"h.*.c.*": "l.*.*"}, {"h.3.c.q.w": ["l.3.q.w"], "h.3.d": ["h.3.d"]}),
        ({"skip": None, "e.w": ("in.w", "out.w")}, {"skip.w": [], "e.w": ["in.w", "out.w"]}),
        ({"^x(\\d)$": "y.\\1"}, {"x3": ["y.3"], "x33": ["x33"]}),
        ({"a.b": "first", "a": "second"}, {"a.b.w": ["first.w"], "a.c": ["second.c"]}),
    ],
)
def test_rules_of_names(rules: dict[str, Any], names: dict[str, list[str]]) -> None:
    renamed = renaming(InitialWeights(url="u", map=rules))
    assert {name: list(renamed(name)) for name in names} == names


async def test_pickles_and_damaged_files_are_refused_with_the_remedy(tmp_path: Path) -> None:
    async def load(**more: Any) -> None:
        ((stage, _),) = stages([0, 4])
        source = InitialWeights(url=str(tmp_path), **more)
        await load_initial(stage, open_artifacts(str(tmp_path), None), source)

    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(BadModel, match=r"pytorch_model\.bin is a pickle.*save_pretrained"):
        await load()
    whole = {name: weight.detach() for name, weight in stages([0, 4])[0][0].named_parameters()}
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match=r"the map calls both .* and .* same"):
        await load(map={"^.*$": "same"})
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(BadInput, match="it ends before its last tensor"):
        await load()
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(BadInput, match="is not a safetensors file"):
        await load()
