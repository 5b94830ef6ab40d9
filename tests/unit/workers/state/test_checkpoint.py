"""Checkpoints of a stage: DCP folders under full names, read by any segmentation, checked before use."""

from __future__ import annotations

import asyncio
import json
import pickle
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from bus.files.artifacts import open_artifacts
from schemas.checkpoint import MANIFEST_NAME
from schemas.errors import BadModel, Conflict, DamagedCheckpoint
from schemas.job_file.recipe import AverageSpec, OptimizerSpec
from tests.builders.jobs import gpt_model
from tests.checkpoint_files import publish
from workers.compute.model import build
from workers.compute.optimizer import StageOptimizer
from workers.graph.sequence import of_sequence
from workers.graph.stage_module import StageModule, slice_stage
from workers.state import checkpoint_files
from workers.state.checkpoint import copy_tensors, named_tensors, restore_checkpoint, write_stage
from workers.state.checkpoint_files import read_folder, write_folder

SPEC = gpt_model()
Stage = tuple[StageModule, StageOptimizer]


def stages(cuts: list[int], seed: int = 0, trained: bool = False) -> list[Stage]:
    layers = build(SPEC, seed)
    built = []
    for first, last in zip(cuts, cuts[1:], strict=False):  # noqa: RUF007  # read as (first, last)
        stage = slice_stage(layers, first, last)
        optimizer = StageOptimizer(stage, OptimizerSpec())
        built.append((stage, optimizer))
        if trained:
            for _ in range(3):
                gradients = [torch.full_like(weight, len(name) / 10) for name, weight in stage.trainable()]
                optimizer.step(gradients, lr=1e-3)
    return built


async def test_it_comes_back_under_another_segmentation(tmp_path: Path) -> None:
    artifacts = open_artifacts(str(tmp_path / "step-3"), None)
    written = stages([0, 2, 4], trained=True)
    manifest = await publish(artifacts, written, version=3)
    before = {key: tensor for stage in written for key, tensor in copy_tensors(*stage).items()}
    assert "block_0.mlp_up.weight" in before
    assert {
        key.removeprefix("optimizer.block_0.mlp_up.weight.")
        for key in before
        if key.startswith("optimizer.block_0.mlp_up.weight")
    } == {"exp_avg", "exp_avg_sq", "step"}
    assert manifest.size_bytes > 3 * sum(tensor.numel() * 4 for tensor in written[0][0].parameters())
    for stage in stages([0, 1, 4], seed=9):
        assert await restore_checkpoint(*stage, artifacts) == 3
        now = named_tensors(*stage)
        assert now
        assert all(torch.equal(tensor, before[key]) for key, tensor in now.items())


async def test_a_stage_reads_only_files_that_hold_its_layers(tmp_path: Path) -> None:
    artifacts = open_artifacts(str(tmp_path), None)
    await publish(artifacts, stages([0, 2, 4], trained=True), version=3)
    (tmp_path / "stage-00000" / "__0_0.distcp").write_bytes(b"damaged")
    assert await restore_checkpoint(*stages([0, 3, 4], seed=9)[1], artifacts) == 3


async def test_a_damaged_file_is_named_and_nothing_changes(tmp_path: Path) -> None:
    artifacts = open_artifacts(str(tmp_path), None)
    ((stage, optimizer),) = stages([0, 4], seed=9)
    before = [weight.clone() for weight in stage.parameters()]

    async def refused(text: str, error: type[Exception] = DamagedCheckpoint) -> None:
        with pytest.raises(error, match=text):
            await restore_checkpoint(stage, optimizer, artifacts, version=3)
        assert all(torch.equal(one, other) for one, other in zip(before, stage.parameters(), strict=True))

    await refused(f"{MANIFEST_NAME}: .*there is no")
    await publish(artifacts, stages([0, 2, 4], trained=True), version=4)
    await refused("is of step 4, not 3", Conflict)
    await publish(artifacts, stages([0, 2], trained=True), version=3)
    await refused("lacks .* tensors of layers 0 to 3, .* it is of another model", Conflict)

    await publish(artifacts, stages([0, 2, 4], trained=True), version=3)
    shard = tmp_path / "stage-00001" / "__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    await refused("stage-00001/__0_0.distcp is damaged: its SHA-256 is not")
    shard.write_bytes(content[:-1])
    await refused(rf"stage-00001/__0_0.distcp is damaged: it has {len(content) - 1} bytes of {len(content)}")
    shard.unlink()
    await refused("stage-00001/__0_0.distcp is missing")

    manifest = tmp_path / MANIFEST_NAME
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**body, "version": 2}))
    await refused(f"{MANIFEST_NAME} is damaged: its SHA-256")
    for text in ("[]", "{}", "", '{"format": 1, "sha256": 2}', "\x00"):
        manifest.write_text(text)
        await refused(MANIFEST_NAME)


class Harmful:
    """What a forged index would bring along."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("harm done",))


class Sneaky:
    """The same by way of what is allowed."""

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return (getattr, (Path, "cwd"))


def test_an_index_that_holds_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path, {"a": torch.ones(2)})
    assert read_folder(tmp_path, {"a", "b"}.__contains__, "it")["a"].tolist() == [1, 1]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(DamagedCheckpoint, match=r"it can.t be read: .*print has no place in an index"):
        read_folder(tmp_path, {"a"}.__contains__, "it")
    (tmp_path / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(DamagedCheckpoint, match="something else than an index"):
        read_folder(tmp_path, {"a"}.__contains__, "it")
    assert "harm done" not in capsys.readouterr().out


def test_an_index_of_an_early_python_3_11_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pickled members of an enumeration as `getattr(kind, name)`."""
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING,
        "__reduce_ex__",
        lambda self, _: (getattr, (type(self), self.name)),
        raising=False,
    )
    write_folder(tmp_path, {"a": torch.ones(2)})
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert read_folder(tmp_path, {"a"}.__contains__, "it")["a"].tolist() == [1, 1]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Sneaky()))
    with pytest.raises(DamagedCheckpoint, match=r"it can.t be read: .*getattr has no place in an index"):
        read_folder(tmp_path, {"a"}.__contains__, "it")


def test_every_kind_of_tensor_survives(tmp_path: Path) -> None:
    tensors = {
        "half": torch.arange(4, dtype=torch.bfloat16),
        "whole": torch.arange(3),
        "yes": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 2),
    }
    write_folder(tmp_path / "some", tensors)
    found = read_folder(tmp_path / "some", tensors.__contains__, "it")
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    assert all(found[key].dtype == tensors[key].dtype for key in tensors)
    write_folder(tmp_path / "none", {})  # a stage without parameters
    assert read_folder(tmp_path / "none", {"half"}.__contains__, "it") == {}


def test_two_tensors_under_one_key_are_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.exp_avg = nn.Parameter(torch.ones(1))

    model = nn.Sequential(nn.Linear(1, 1), Odd())
    names = ("0", "optimizer.0.weight")
    holder = nn.Module()
    holder.add_module("0", model[0])
    holder.add_module("optimizer", nn.ModuleDict({"0": nn.ModuleDict({"weight": model[1]})}))
    stage = slice_stage(of_sequence(holder, list(zip(names, model, strict=True))), 0, 2)
    with pytest.raises(BadModel, match="twice"):
        named_tensors(stage, StageOptimizer(stage, OptimizerSpec()))


async def test_a_layer_called_ema_is_no_average(tmp_path: Path) -> None:
    """As a model's own slow copy of its layers: a checkpoint from before the job's average begins."""

    def made() -> Stage:
        torch.manual_seed(3)
        layers = {"body": nn.Linear(2, 2), "ema": nn.ModuleDict({"body": nn.Linear(2, 2)})}
        holder = nn.ModuleDict(layers)
        named = [("body", layers["body"]), ("ema.body", holder.get_submodule("ema.body"))]
        stage = slice_stage(of_sequence(holder, named), 0, 2)
        return stage, StageOptimizer(stage, OptimizerSpec(), ema=AverageSpec(start_step=9))

    await publish(artifacts := open_artifacts(str(tmp_path), None), [made()], version=0)
    stage, optimizer = made()
    assert await restore_checkpoint(stage, optimizer, artifacts) == 0
    assert optimizer.shadows == {}


async def test_cancelled_while_writing_it_leaves_no_scratch_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    begun, go_on = threading.Event(), threading.Event()

    def slow_write(*args: object) -> object:
        begun.set()
        go_on.wait(10)
        return write_folder(*args)

    monkeypatch.setattr(checkpoint_files, "write_folder", slow_write)
    artifacts = open_artifacts(str(tmp_path / "store"), None)
    ((stage, optimizer),) = stages([0, 4])
    tensors = copy_tensors(stage, optimizer)
    writing = asyncio.create_task(write_stage(artifacts, tensors, stage=0, first_layer=0, last_layer=4))
    await asyncio.to_thread(begun.wait, 10)
    assert list((tmp_path / "scratch").iterdir())
    writing.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert not list((tmp_path / "scratch").iterdir())
    assert not (tmp_path / "store").exists()
