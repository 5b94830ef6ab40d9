"""A stage that gets other layers beside those that it trains (ADR-0090): by the memory that it has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch

from schemas.data_plane import MicrobatchNotice
from schemas.recut import LayerRange, RecutFill, RecutPrepare, RecutSwitch
from schemas.step import Member
from tests.builders import graphs
from tests.builders.jobs import gpt, spec
from workers.compute.compute_thread import ComputeThread
from workers.compute.stage_compute import StageCompute
from workers.stage.layer_change import LayerChange
from workers.state.checkpoint import named_tensors
from workers.state.layer_state import snapshot_of

LAYERS = 6
CPU = torch.device("cpu")
GIVER = Member(sid="j-s1-r0", incarnation="g")


@pytest.fixture
async def thread() -> AsyncIterator[ComputeThread]:
    async with ComputeThread() as thread:
        yield thread


def stage(first: int, last: int, optimizer: str = "adamw") -> StageCompute:
    unit = graphs.unit("j-s0-r0", first_layer=first, last_layer=last)
    training = {"optimizer": {"name": optimizer}, "steps": 4}
    job = spec(
        model=gpt(layers=LAYERS - 2, width=8, heads=1, context=4),
        data={"source": "stdlib:", "sample_tokens": 4},
        training=training,
    )
    made = StageCompute(graphs.start(unit, spec=job, stages=3, layer_count=LAYERS), CPU)
    made.build()
    return made


def step(made: StageCompute, number: int) -> list[torch.Tensor]:
    """The same gradients for a weight whichever stage it is in."""
    gradients = []
    for name, weight in made.module.trainable():
        generator = torch.Generator().manual_seed(sum(name.encode()) + number)
        gradients.append(torch.randn(weight.shape, generator=generator))
    made.redo(number, gradients, 0.01)
    return gradients


def change(thread: ComputeThread, layers: StageCompute, optimizer: str) -> LayerChange:
    async def between(attempt: int, fenced: Sequence[Member]) -> None:
        pass

    async def send(*_: Any) -> Any:
        raise AssertionError("nothing is given")

    return LayerChange(
        layers._start,
        CPU,
        thread,
        layers,
        lambda: layers.version,
        send,
        lambda: None,
        between,
        lambda start: None,
    )


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
async def test_it_has_one_memory_with_what_it_keeps_and_takes(thread: ComputeThread, optimizer: str) -> None:
    layers, giver = stage(0, 3, optimizer), stage(2, 6, optimizer)
    whole = stage(0, 6, optimizer)
    changing = change(thread, layers, optimizer)
    unit = graphs.unit("j-s0-r0", first_layer=1, last_layer=5)
    takes = (LayerRange(peer=GIVER, first_layer=3, last_layer=5),)
    await changing.prepare(RecutPrepare(job="j", epoch=1, plan=1, unit=unit, takes=takes))
    built = changing.built
    assert built is not None
    (arriving,) = built.arriving.values()

    def addresses(made: StageCompute) -> dict[str, int]:
        named = named_tensors(made.module, made.optimizer)
        return {name: tensor.data_ptr() for name, tensor in named.items() if tensor.numel() > 1}

    if optimizer == "adamw":
        own = addresses(built.stage)
        assert own.items() <= (addresses(layers) | addresses(arriving.stage)).items()
        assert own
    for each in (layers, giver, whole):
        step(each, 0)
    changing.applied(0, [], 0.01)
    version, tensors = snapshot_of(giver, giver.names_in(3, 5))
    notice = MicrobatchNotice.model_construct(
        transfer=1, sender=GIVER, microbatch=3, direction="layers", step=version, learning_rate=None
    )
    changing.received(notice, tensors)
    await changing.fill(RecutFill(job="j", epoch=1, version=1, plan=1))
    await changing.switch(RecutSwitch(job="j", epoch=1, step=1, attempt=2, plan=1))
    for each in (layers, whole):
        step(each, 1)
    expected = named_tensors(whole.module, whole.optimizer)
    found = named_tensors(layers.module, layers.optimizer)
    assert (layers.module.first_layer, layers.module.last_layer) == (1, 5)
    assert not [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
