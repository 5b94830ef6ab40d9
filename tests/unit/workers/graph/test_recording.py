"""Any module becomes a graph, and no cut of it changes a bit of loss or gradients."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from schemas.errors import BadModel
from tests.integration.mesh.user_models.forked import Block, Chooses, Dot, Hourglass, towers
from workers.graph.model_graph import ModelGraph
from workers.graph.recording import check_sizes, record
from workers.graph.stage_module import slice_stage

Gradients = dict[str, Tensor | None]


def tokens(samples: int = 3, length: int = 10) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"inputs": torch.randint(0, 256, (samples, length), generator=generator)}


def through(
    graph: ModelGraph,
    cuts: Sequence[int],
    batch: Mapping[str, Tensor],
    *,
    recompute: Sequence[str] = (),
    needed: Sequence[str] | None = None,
) -> tuple[float, Gradients]:
    """Loss and gradients through the stages between `cuts`, as instances compute them."""
    passes = []
    sent: tuple[Tensor, ...] = ()
    for first, last in itertools.pairwise(cuts):
        stage = slice_stage(graph, first, last, job_seed=1, recompute=recompute, needed=needed).train()
        part = stage.slice
        values = (part.unpacked(sent) if first else {}) | {name: batch[name] for name in graph.inputs}
        carried = part.carries_gradient(values, part.incoming)
        for tensor in carried:
            tensor.requires_grad_()
        found = stage.run(values, step=3, microbatch=2)
        passes.append((stage, carried, part.carries_gradient(found, part.outgoing)))
        sent = tuple(tensor.detach().contiguous() for tensor in part.packed(found))
        outputs = part.named_outputs(found)
    loss = sum(output.float().square().mean() for output in outputs.values())
    assert isinstance(loss, Tensor)
    gradients: Gradients = {}
    incoming: list[Tensor] | None = None
    for stage, carried, ends in reversed(passes):
        named = stage.trainable()
        pairs = [(loss, None)] if incoming is None else list(zip(ends, incoming, strict=True))
        pairs = [pair for pair in pairs if pair[0].requires_grad]
        wanted = [*(weight for _, weight in named), *carried]
        results = torch.autograd.grad(
            [end for end, _ in pairs], wanted, [given for _, given in pairs], allow_unused=True
        )
        gradients |= {name: gradient for (name, _), gradient in zip(named, results, strict=False)}
        incoming = [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(carried, results[len(named) :], strict=True)
        ]
    return loss.item(), gradients


def made(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return factory()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Embedding(256, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 8))


class Recurrent(nn.Module):
    """An LSTM, whose second result is a tuple; and a parameter that a function uses."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 8)
        self.cell = nn.LSTM(8, 8, batch_first=True)
        self.table = nn.Parameter(torch.randn(5, 8))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        states, (last, _) = self.cell(self.token(inputs))
        return functional.linear(states, self.table), last[0]


@pytest.mark.parametrize("factory", [Hourglass, encoder, Recurrent])
def test_no_cut_changes_a_bit(factory: Callable[[], nn.Module]) -> None:
    graph = record(made(factory), tokens())
    layers = len(graph)
    loss, whole = through(graph, [0, layers], tokens())
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(6):
        inner = draw.sample(range(1, layers), min(layers - 1, draw.randint(1, 4)))
        other, parts = through(graph, [0, *sorted(inner), layers], tokens())
        assert other == loss
        assert parts.keys() == whole.keys()
        for name, gradient in whole.items():
            assert gradient is None or torch.equal(gradient, parts[name]), (inner, name)


def test_recomputing_layers_changes_no_bit() -> None:
    graph = record(made(Hourglass), tokens())
    loss, kept = through(graph, [0, len(graph)], tokens())
    for cuts in ([0, len(graph)], [0, 3, len(graph)]):
        other, again = through(graph, cuts, tokens(), recompute=["down.*", "up.1"])
        assert other == loss
        assert all(gradient is None or torch.equal(gradient, again[name]) for name, gradient in kept.items())


def test_names_of_the_batch_are_mapped_and_what_is_frozen_is_left_out() -> None:
    graph = record(
        made(Needs),
        {"tokens": tokens()["inputs"], "weights": torch.ones(3, 10, 8)},
        inputs={"words": "tokens", "mask": "weights"},
    )
    assert graph.inputs == ("tokens", "weights")
    with pytest.raises(BadModel, match="the forward pass has no wrods, but mask, words"):
        record(made(Needs), {"tokens": tokens()["inputs"]}, inputs={"wrods": "tokens"})
    with pytest.raises(BadModel, match="the data has no x, but tokens"):
        record(made(Needs), {"tokens": tokens()["inputs"]}, inputs={"words": "x"})


def test_a_graph_computes_what_its_model_computes_at_any_size() -> None:
    model = made(Hourglass).eval()
    graph = record(model, tokens())
    other = tokens(samples=5, length=7)
    plain = model(**other)
    stages = [slice_stage(graph, first, last).eval() for first, last in ((0, 3), (3, 6), (6, len(graph)))]
    sent: tuple[Tensor, ...] = ()
    for stage in stages:
        found = stage.run((stage.slice.unpacked(sent) if sent else {}) | other)
        sent = stage.slice.packed(found)
    outputs = stages[-1].slice.named_outputs(found)
    assert outputs.keys() == plain.keys() == {"logits", "helper"}
    assert all(torch.equal(outputs[name], plain[name]) for name in plain)


def test_a_declared_graph_is_cut_like_any_other() -> None:
    torch.manual_seed(0)
    graph = towers().graph(tokens())
    assert graph.crossing(2) == ("left", "right")
    loss, whole = through(graph, [0, 5], tokens())
    for cuts in ([0, 1, 5], [0, 2, 4, 5], [0, 1, 2, 3, 4, 5]):
        other, parts = through(graph, cuts, tokens())
        assert other == loss
        assert all(gradient is None or torch.equal(gradient, parts[name]) for name, gradient in whole.items())


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 8)
        self.extra = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.token(inputs)
        return self.extra(x) if self.training else x


class Needs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 8)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        return self.token(words) * mask


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (Chooses, r"Chooses reads the values of a tensor \(__bool__\) at forked.py:\d+"),
        (Moody, "other layers in evaluation than in training, from extra on"),
        (Needs, "forward takes words, mask, which the data does not have: it has inputs"),
    ],
)
def test_what_cannot_be_recorded_is_one_line(factory: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(BadModel, match=text) as caught:
        record(made(factory), tokens())
    assert "\n" not in caught.value.text


def test_a_block_that_cannot_be_recorded_is_a_layer_as_a_whole() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Block(8)
            self.chooses = Inner()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.chooses(self.first(inputs))

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            shifted = Dot()(self.linear(x), x)
            return shifted if float(x.shape[0]) > 0 else x

    graph = record(made(Outer), {"inputs": torch.randn(2, 4, 8)})
    assert "first.up" in [layer.name for layer in graph.layers]


class Loops(nn.Module):
    """Goes over the positions one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        x, states = self.token(inputs), []
        state = x[:, 0]
        for position in range(inputs.shape[1]):
            state = self.mix(state + x[:, position])
            states.append(state)
        return torch.stack(states, 1)


class Drops(nn.Module):
    """Leaves out a layer at random, as transformers' layer drop does, or as Python draws."""

    def __init__(self, rate: float, python: bool = False) -> None:
        super().__init__()
        self.rate, self.python = rate, python
        self.token, self.extra = nn.Embedding(256, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.token(inputs)
        drawn = random.random() if self.python else torch.rand([])
        return x if self.training and drawn < self.rate else self.extra(x)


def test_a_loop_over_a_size_is_noticed_when_the_size_changes() -> None:
    graph = record(made(Loops), tokens())
    check_sizes(graph, tokens(samples=5))
    with pytest.raises(BadModel, match=r"Loops computes something else for inputs \[3, 7\]"):
        check_sizes(graph, tokens(length=7))
    hourglass = record(made(Hourglass), tokens())
    check_sizes(hourglass, tokens(samples=5, length=7))


def test_random_control_flow_is_refused_unless_it_can_only_go_one_way() -> None:
    assert len(record(made(lambda: Drops(0.0)), tokens())) == 2
    with pytest.raises(BadModel, match="reads the values of a tensor"):
        record(made(lambda: Drops(0.5)), tokens())
    with pytest.raises(BadModel, match="draws numbers from Python's random"):
        record(made(lambda: Drops(0.8, python=True)), tokens())
