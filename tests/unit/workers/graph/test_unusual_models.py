"""What researchers write: a recorded model computes what the plain one does, however it is cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schemas.errors import BadModel
from tests.unit.workers.graph.test_recording import through
from workers.graph.recording import record
from workers.graph.stage_module import autocast, laid_out, slice_stage

GENERATOR = torch.Generator().manual_seed(1)
BATCH = {
    "x": torch.randn(3, 6, 8, generator=GENERATOR),
    "ids": torch.randint(0, 20, (3, 6), generator=GENERATOR),
}


class Three(nn.Module):
    """Three layers, so that it may be cut in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class AddsInPlace(Three):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x) * 1.0
        hidden += self.b(hidden * 2)
        return torch.as_tensor(self.c(hidden) + hidden)


class FillsWhatItMade(Three):
    """The zeros need no gradient before something is written into them."""

    def forward(self, x: Tensor) -> Tensor:
        filled = torch.zeros_like(x)
        filled[:, :3] = self.a(x)[:, :3]
        filled.transpose(1, 2)[:, :, 3:] = self.b(x).transpose(1, 2)[:, :, 3:]
        return torch.as_tensor(self.c(filled) + filled)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradients[0], None


class ReversesGradients(Three):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        adverse = Reversed.apply(hidden, 2.0)  # type: ignore[no-untyped-call]  # torch: unannotated
        return torch.as_tensor(self.b(adverse) + self.c(hidden))


class CrossesAsFrequencies(Three):
    """Complex numbers are on a wire between two layers."""

    def forward(self, x: Tensor) -> Tensor:
        low, high = torch.fft.rfft(self.a(x), dim=1), torch.fft.rfft(self.b(x), dim=1)
        return torch.as_tensor(self.c(torch.fft.irfft(low * high, n=x.size(1), dim=1)))


class ReturnsItsBatch(Three):
    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        return {"score": self.c(self.b(self.a(x))), "who": ids}


class UsesAWeightFirst(Three):
    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.c(self.b(functional.linear(self.a(x), self.b.weight))))


class Tabled(nn.Module):
    """Makes tables when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", None, persistent=False)
        self.positions: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(x.size(1), 8, device=x.device).tril()
        if self.positions is None:
            self.positions = torch.arange(x.size(1), device=x.device)[:, None]
        return torch.as_tensor(self.linear(x) * self.mask + self.positions)


class MakesTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Tabled(), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class SavesMemory(Three):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        for part in (self.b, self.c):
            hidden = checkpoint(part, hidden, use_reentrant=True)
        return torch.as_tensor(hidden)


class KeepsTensors(Three):
    """As attributes, in a list, and made without a device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shifts = torch.full((8,), 1.5), [torch.ones(8)]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x) * self.scale + torch.arange(x.size(1))[:, None]
        return torch.as_tensor(self.c(self.b(hidden)) + self.shifts[0] * torch.tensor([1.0, 2.0] * 4))


class TakesADictionary(Three):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.as_tensor(self.c(self.b(self.a(batch["x"])) + batch["ids"][..., None]))


class TakesAllNames(Three):
    def forward(self, **batch: Tensor) -> Tensor:
        return torch.as_tensor(self.c(self.b(self.a(batch["x"])) + batch["ids"][..., None]))


class TakesSomething(Three):
    def forward(self, batch):  # type: ignore[no-untyped-def]
        return self.c(self.b(self.a(batch["x"])) + batch["ids"][..., None])


class LooksAtItsMask(Three):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(4)
        mask[1:][0] = 0.0
        hidden = self.b(self.a(x))
        return torch.as_tensor(hidden if mask.all() else self.c(hidden))


class LooksAtASize(Three):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(self.a(x))
        past = torch.zeros(1) + (x.size(1) - 6)
        return torch.as_tensor(hidden if past.any() else self.c(hidden))


class ScalesGradients(Three):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        hidden.register_hook(lambda gradient: gradient * 3)
        return torch.as_tensor(self.b(hidden))


class NormsItsWeight(Three):
    def forward(self, x: Tensor) -> Tensor:
        self.b.weight.data = functional.normalize(self.b.weight.data)
        return torch.as_tensor(self.b(self.a(x)))


class MapsItsRows(Three):
    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.b(torch.func.vmap(lambda row: row * 2)(self.a(x))))


class KeepsAMetaTensor(Three):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(8, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.b(self.a(x) * self.scale))


class Scripted(Three):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.jit.script(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.b(self.a(x)))


class Counts(Three):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return torch.as_tensor(self.b(self.a(x) * self.seen))


class AveragesInABuffer(Three):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        self.average = 0.9 * self.average + hidden.detach().mean((0, 1))
        return torch.as_tensor(self.b(hidden) + self.average)


class ChoosesPrecision(Three):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            hidden = self.a(x) @ self.b.weight
        with torch.autocast("cuda", dtype=torch.float16):  # of no other device
            wide = hidden.float()
            return torch.as_tensor(self.c(hidden) * wide.square() + hidden)


class Decorated(Three):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def mixed(self, x: Tensor) -> Tensor:
        return x @ self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.c(self.mixed(self.a(x)).float()))


class WidensItself(Three):
    """At the job's precision `wide` is another tensor than `hidden`; recorded in float32 it is the same."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        wide = hidden.float()
        return torch.as_tensor(self.b(wide.square()) + hidden)


class Experts(nn.Module):
    """Each row goes to one of two, by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 8)
        weight, chosen = self.gate(rows).softmax(-1).max(-1)
        found = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = torch.where(chosen == number)[0]
            found[mine] = weight[mine, None] * expert(rows[mine])
        return found.view_as(x)


class HasExperts(Three):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.b(self.mixed(self.a(x))))


class CompiledPart(Three):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.compile(self.b, backend="eager")


class CountsItsPasses(Three):
    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return torch.as_tensor(self.b(self.a(x)) * (0.5 if self.passes < 3 else 1.0))


class KeepsANormAsItIs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(6)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def train(self, mode: bool = True) -> KeepsANormAsItIs:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.norm(self.first(x))))


def trained(
    model: nn.Module, batch: Mapping[str, Tensor], *, whole: bool = False
) -> tuple[float, dict[str, Tensor | None]]:
    outputs = model(batch) if whole else model(**batch)
    named = outputs if isinstance(outputs, dict) else {"output": outputs}
    loss = torch.stack([output.float().square().mean() for output in named.values()]).sum()
    weights = dict(model.named_parameters())
    loss.backward()  # type: ignore[no-untyped-call]  # torch: unannotated
    return loss.item(), {name: weight.grad for name, weight in weights.items()}


def batch_of(model: nn.Module) -> dict[str, Tensor]:
    names = model.forward.__code__.co_varnames[1 : model.forward.__code__.co_argcount]
    return {name: tensor.clone() for name, tensor in BATCH.items() if name in names or "x" not in names}


@pytest.mark.parametrize(
    "factory",
    [
        AddsInPlace,
        FillsWhatItMade,
        ReversesGradients,
        CrossesAsFrequencies,
        ReturnsItsBatch,
        UsesAWeightFirst,
        MakesTables,
        SavesMemory,
        KeepsTensors,
        TakesADictionary,
        TakesAllNames,
        LooksAtASize,
        KeepsANormAsItIs,
        HasExperts,
    ],
)
def test_it_is_the_plain_model_wherever_it_is_cut(factory: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = factory()
    plain = copy.deepcopy(model).train()
    graph = record(model, batch_of(model))
    loss, gradients = trained(plain, batch_of(model), whole=factory is TakesADictionary)
    layers = len(graph)
    uncut: dict[str, Tensor | None] = {}
    shared = {name for name, layers in graph.users.items() if len(layers) > 1}  # a gradient for each layer
    whole: float | None = None
    for cuts in ([0, layers], *([0, cut, layers] for cut in range(1, layers))):
        for recompute in ((), ("*",)):
            other, parts = through(graph, cuts, batch_of(model), recompute=recompute)
            whole = other if whole is None else whole
            assert other == whole
            assert other == pytest.approx(loss, rel=1e-6)  # tensors between layers are contiguous
            uncut = uncut or parts
            for name, gradient in parts.items():
                if gradient is not None and name not in shared:
                    assert torch.equal(gradient, uncut[name]), (cuts, name)
    for name, gradient in gradients.items():
        if gradient is not None and name in uncut:
            torch.testing.assert_close(uncut[name], gradient)


@pytest.mark.parametrize("factory", [ChoosesPrecision, Decorated, WidensItself])
def test_half_precision_is_where_the_model_has_it(factory: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = factory().eval()
    graph = record(model, batch_of(model))
    with torch.no_grad():
        with autocast("cpu", "bf16"):
            plain = model(**batch_of(model))
        stage = slice_stage(graph, 0, len(graph), precision="bf16").eval()
        found = stage.slice.named_outputs(stage.run(batch_of(model)))["output"]
    assert found.dtype == plain.dtype
    assert torch.equal(found, plain)


def test_modes_are_those_that_the_model_sets() -> None:
    model = KeepsANormAsItIs()
    stage = slice_stage(record(model, batch_of(model)), 0, 3)
    stage.untie()
    for mode in (False, True):
        stage.train(mode)
        assert (model.first.training, model.norm.training) == (mode, False)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (LooksAtItsMask, r"reads the values of a tensor \(__bool__\) at test_unusual_models.py:\d+"),
        (ScalesGradients, r"calls register_hook of a tensor at test_unusual_models.py:\d+"),
        (NormsItsWeight, r"sets data of a tensor at test_unusual_models.py:\d+"),
        (
            MapsItsRows,
            r"uses a tensor at \S+ that no call of torch or of a module made, such as within torch.func",
        ),
        (KeepsAMetaTensor, r"uses scale of its KeepsAMetaTensor .* self.register_buffer\('scale', …"),
        (Scripted, "Scripted: b is TorchScript, whose calls aren't recorded; use the module that it was"),
        (
            CompiledPart,
            "CompiledPart: b is compiled, whose calls aren't recorded; use the module that it was",
        ),
        (CountsItsPasses, "its forward pass changes passes each time"),
        (
            Experts,
            r"the size of a result depends on the values of tensors \(test_unusual_models.py:\d+\); "
            "put what depends on the data into a module of its own, which then runs as a whole, "
            r"or declare the graph: a factory that returns a workers.graph.declared.DeclaredGraph, "
            r"with gate, experts.0, experts.1 as layers and that code within a layer$",
        ),
        (Counts, r"changes a tensor in place at test_unusual_models.py:\d+ that is no parameter or buffer"),
        (AveragesInABuffer, "assigns its buffer average in its forward pass"),
    ],
)
def test_what_would_be_lost_is_refused(factory: Callable[[], nn.Module], text: str) -> None:
    model = factory()
    with pytest.raises(BadModel, match=text) as caught:
        record(model, batch_of(model))
    assert "\n" not in caught.value.text


def test_a_dictionary_that_is_not_annotated_is_said_in_the_job_file() -> None:
    model = TakesSomething()
    with pytest.raises(BadModel, match=r'batch is the batch\'s x: .* model.inputs: {batch: "\*"}'):
        record(model, BATCH)
    graph = record(model, BATCH, inputs={"batch": "*"})
    assert set(graph.inputs) == {"x", "ids"}
    assert len(graph) == 3


def test_a_recording_leaves_the_model_as_it_was() -> None:
    model = MakesTables()
    model.blocks[0].eval()
    record(model, batch_of(model))
    tabled = next(part for part in model.modules() if isinstance(part, Tabled))
    assert tabled.mask is None
    assert tabled.positions is None
    assert [block.training for block in model.blocks] == [False, True]


def test_tensors_between_layers_are_laid_out_as_received_ones() -> None:
    odd = torch.randn(2, 1, 1, 5).permute(0, 3, 1, 2)
    assert odd.is_contiguous()
    assert odd.stride() != torch.empty(odd.shape).stride()
    for given in (odd, torch.randn(1, 4).t(), torch.randn(3, 2), torch.tensor(1.0)):
        found = laid_out(given)
        assert torch.equal(found, given)
        assert found.stride() == torch.empty(given.shape).stride()
