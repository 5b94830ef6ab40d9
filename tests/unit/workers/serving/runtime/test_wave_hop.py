"""Rows of sessions on their way: packed, unpacked, received in parts, and named tensors of single passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
import torch

from schemas.errors import BadInput
from schemas.services.prediction import NamedTensor
from workers.serving.runtime.batch_window import BatchWindow
from workers.serving.runtime.named_tensors import named_answers, samples_of
from workers.serving.runtime.received_rows import ReceivedRows
from workers.serving.runtime.session_table import SentRows
from workers.serving.runtime.wave_hop import pack_wave, unpack_wave


def test_what_is_packed_is_unpacked() -> None:
    items = [SentRows((1 << 63) - 1, 2, 3, 40, 2), SentRows(5, 1, 0, 0, 1)]
    rows = [(torch.randn(2, 8), torch.tensor([[7], [8]])), (torch.randn(1, 8), torch.tensor([[9]]))]
    found = unpack_wave(pack_wave(items, rows))
    assert [item for item, _ in found] == items
    for (_, one), other in zip(found, rows, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_a_single_session_may_have_tensors_of_any_shape() -> None:
    item, history = SentRows(5, 1, 0, 0, 3), (torch.randn(1, 3, 8), torch.tensor([3, 1]))
    ((found, tensors),) = unpack_wave(pack_wave([item], [history]))
    assert found == item
    assert all(torch.equal(*pair) for pair in zip(tensors, history, strict=True))


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.zeros(1, 5, dtype=torch.int64)],
        [torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 2)],
        [torch.zeros(1, 5), torch.zeros(1, 2)],
        [torch.tensor([[1, 1, 0, -1, 1]]), torch.zeros(1, 2)],
        [torch.tensor([[1, 1, 0, 0, 1], [2, 1, 0, 0, 1]]), torch.zeros(3, 2)],
    ],
)
def test_a_wave_that_does_not_fit_together_is_refused(tensors: Sequence[torch.Tensor]) -> None:
    with pytest.raises(BadInput):
        unpack_wave(tensors)


def test_received_rows_are_taken_once_and_in_order() -> None:
    rows = ReceivedRows()
    whole = torch.arange(10.0).reshape(10, 1)
    for first, end in ((0, 4), (4, 5), (5, 10)):
        rows.append(7, first, (whole[first:end],))
    assert torch.equal(rows.take(7, 0, 3)[0], whole[:3])
    assert torch.equal(rows.take(7, 3, 8)[0], whole[3:8])
    with pytest.raises(KeyError):
        rows.take(7, 3, 8)
    rows.truncate(7, 9)
    assert torch.equal(rows.take(7, 8, 9)[0], whole[8:9])
    with pytest.raises(KeyError, match="rows 9 to 10 of session 7"):
        rows.take(7, 9, 10)


def named(name: str = "x", **more: object) -> NamedTensor:
    tensor = torch.arange(6, dtype=torch.float32)
    fields = {"dtype": "float32", "shape": (2, 3), "data": tensor.numpy().tobytes()}
    return NamedTensor.model_validate({"name": name} | fields | more)


def test_samples_go_in_and_out_of_a_request() -> None:
    samples = samples_of([named("x"), named("y", shape=(2, 3, 1))], ["x", "y"])
    assert [tuple(sample["y"].shape) for sample in samples] == [(3, 1), (3, 1)]
    assert named_answers([{"x": sample["x"]} for sample in samples]) == (named("x"),)


def test_numbers_become_what_the_model_takes_where_they_fit() -> None:
    whole = torch.tensor([[1, 300]])
    given = named(dtype="int64", shape=(1, 2), data=whole.numpy().tobytes())
    (sample,) = samples_of([given], ["x"], {"x": torch.float32})
    assert torch.equal(sample["x"], torch.tensor([1.0, 300.0]))
    (sample,) = samples_of([given], ["x"], {"x": torch.int16})
    assert sample["x"].dtype is torch.int16
    with pytest.raises(BadInput, match="x: the model takes uint8, and a number of it does not fit"):
        samples_of([given], ["x"], {"x": torch.uint8})
    with pytest.raises(BadInput, match="x: the model takes int64; it was given float32"):
        samples_of([named()], ["x"], {"x": torch.int64})


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([named("z")], "the model takes x; it was given z"),
        ([], "the model takes x; it was given nothing"),
        ([named(data=b"1234")], "x: 4 bytes, but float32 (2, 3) are 24"),
        ([named(dtype="complex64")], "x: dtype complex64 is not known; there are float32, "),
        ([named(shape=())], "x: shape () has no sample"),
    ],
)
def test_inputs_that_are_not_the_models(inputs: Sequence[NamedTensor], text: str) -> None:
    with pytest.raises(BadInput) as raised:
        samples_of(inputs, ["x"])
    assert raised.value.text.startswith(text)


async def test_requests_that_come_together_are_answered_together() -> None:
    batches: list[list[int]] = []
    answered = asyncio.Event()

    async def run(asked: Sequence[int]) -> None:
        batches.append(list(asked))
        answered.set()

    window = BatchWindow[int](0.0, 3, lambda _: 1, run)
    for number in range(4):
        window.ask("a", number)
    window.ask("b", 9)
    while len(batches) < 3:
        answered.clear()
        await answered.wait()
    assert sorted(batches) == [[0, 1, 2], [3], [9]]


async def test_while_a_batch_is_computed_the_next_one_is_collected_and_a_full_one_goes_at_once() -> None:
    begun: asyncio.Queue[list[str]] = asyncio.Queue()
    ends: list[asyncio.Event] = []
    answered: list[list[str]] = []

    async def run(asked: Sequence[str]) -> Callable[[], None]:
        end = asyncio.Event()
        ends.append(end)
        begun.put_nowait(list(asked))
        await end.wait()
        return lambda: answered.append(list(asked))

    window = BatchWindow[str](0.0, 3, lambda _: 1, run)
    window.ask("a", "first")
    assert await begun.get() == ["first"]
    for number in range(2):
        window.ask("b", f"b{number}")
        await until_timers_ran()
    window.ask("c", "c0")
    await until_timers_ran()
    assert begun.empty(), "their time is up, and they wait for the first"
    for number in range(3):
        window.ask("d", f"d{number}")
    assert await begun.get() == ["d0", "d1", "d2"], "it is full"
    ends[0].set()
    assert await begun.get() == ["b0", "b1"], "the oldest, although the full one is still computed"
    window.ask("c", "c1")
    ends[1].set()
    assert await begun.get() == ["c0", "c1"]
    for end in ends:
        end.set()
    await until_timers_ran()
    assert answered == [["first"], ["d0", "d1", "d2"], ["b0", "b1"], ["c0", "c1"]]


async def until_timers_ran() -> None:
    """Timers that are due have run, and what they started has begun."""
    ran = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, ran.set)
    await ran.wait()
    for _ in range(3):
        await asyncio.sleep(0)
