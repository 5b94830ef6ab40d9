"""The deferred build: what is needed has the bits of the whole build, the rest no memory (ADR-0050)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrizations as parametrizations
from torch import Tensor, nn

from workers.build.build_trace import BuildTrace
from workers.build.deferred import build_needed, outline_of
from workers.build.generator_advance import advance, draws_of
from workers.build.layer_values import with_values
from workers.models.gpt import byte_gpt

SEED = 3
SMALL_BYTES = 4096
"""So that these small models have large tensors, and small ones."""

INITS: tuple[Callable[[Tensor], Any], ...] = (
    nn.init.normal_,
    nn.init.trunc_normal_,
    nn.init.xavier_uniform_,
    nn.init.kaiming_normal_,
    nn.init.orthogonal_,
    nn.init.eye_,
    lambda weight: nn.init.sparse_(weight, 0.3),
    lambda weight: weight.data.exponential_(),
    lambda weight: weight.data.random_(0, 9),
    lambda weight: weight.data.bernoulli_(0.3),
    lambda weight: weight.data.copy_(torch.randn_like(weight) * 3),
    lambda weight: weight.data.copy_(torch.randperm(weight.numel()).view_as(weight)),
    lambda weight: weight.data.copy_(nn.functional.dropout(torch.ones(weight.shape), 0.5)),
    lambda weight: setattr(weight, "data", torch.randn(weight.shape)),
    lambda weight: weight.data.clamp_(-0.01, 0.01),
)


class Initialised(nn.Module):
    """A layer for each way to fill a weight; types, ties, tables, plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(37, 41) for _ in INITS)
        with torch.no_grad():
            for layer, initialise in zip(self.layers, INITS, strict=True):
                initialise(layer.weight)
        self.tied = self.layers[2].weight
        self.half, self.wide = nn.Linear(50, 51).half(), nn.Linear(50, 51).double()
        self.embedding = nn.Embedding(133, 41, padding_idx=3)
        self.register_buffer("mask", torch.tril(torch.ones(60, 60)), persistent=False)
        self.table = [torch.randn(60, 60)]
        self.last = nn.Linear(50, 50)


class Unet(nn.Module):
    """Initialised by `apply` after its construction."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(*sizes, 3) for sizes in ((4, 16), (16, 32)))
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2), nn.BatchNorm2d(1100)])
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)


class Mixed(nn.Module):
    """Modules of torch that copy, tie or reparametrise what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
        self.lstm = nn.LSTM(30, 32, 2, bidirectional=True)
        self.copied = copy.deepcopy(self.lstm)
        self.spectral = parametrizations.spectral_norm(nn.Linear(40, 41))
        self.normed = parametrizations.weight_norm(nn.Linear(40, 41))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(40, 40))
        self.last = nn.Linear(40, 40)


class Reading(nn.Module):
    """Its build reads values: of a large weight, and of a random draw."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(50, 50), nn.Linear(50, 50)
        with torch.no_grad():
            self.second.weight.mul_(self.first.weight.norm().item())
        self.maybe = nn.Linear(50, 50) if torch.rand(1).item() < 0.5 else nn.Linear(40, 40)
        self.last = nn.Linear(50, 50)
        self.last.weight.data.copy_(torch.from_numpy(self.second.weight.detach().numpy() * 2))


def hugging_face(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
        model: nn.Module = getattr(transformers, kind).from_config(getattr(transformers, config)(**settings))
        return model

    return build


_BERT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "byte_gpt": lambda: byte_gpt(width=32, layers=2, heads=2, context=32),
    "inits": Initialised,
    "unet": Unet,
    "mixed": Mixed,
    "reading": Reading,
    "llama": hugging_face("AutoModelForCausalLM", "LlamaConfig", **_BERT, vocab_size=256),
    "gpt2": hugging_face(
        "AutoModelForCausalLM", "GPT2Config", n_embd=32, n_layer=2, n_head=2, vocab_size=300
    ),
    "bert": hugging_face("AutoModelForMaskedLM", "BertConfig", **_BERT, vocab_size=256),
    "t5": hugging_face("AutoModelForSeq2SeqLM", "T5Config", d_model=32, d_ff=64, num_layers=2, num_heads=2),
    "vit": hugging_face("AutoModelForImageClassification", "ViTConfig", **_BERT, image_size=64),
}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def bits(tensor: Tensor) -> tuple[Any, ...]:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, content.numpy().tobytes()


def seeded(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    torch.manual_seed(SEED)
    return factory


@pytest.mark.parametrize("name", MODELS)
def test_what_is_needed_has_the_bits_of_the_whole_build(name: str) -> None:
    factory = MODELS[name]
    whole = seeded(factory)()
    generator = torch.get_rng_state()
    expected = {tensor: bits(value) for tensor, value in tensors_of(whole).items()}
    outline = outline_of(seeded(factory), small_bytes=SMALL_BYTES)
    assert outline.because == ""
    assert {name: item.shape for name, item in outline.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors_of(whole).items()
    }
    modules = sorted({tensor.rpartition(".")[0] for tensor in expected})
    for needed in (modules[::3], modules[1::3], modules[2::3], [""]):
        built = build_needed(seeded(factory), needed, outline, small_bytes=SMALL_BYTES)
        assert built.because == ""
        assert torch.equal(torch.get_rng_state(), generator), "the generator goes on as after the whole build"
        got, wanted = tensors_of(built.model), outline.names(needed)
        assert {tensor: bits(got[tensor]) for tensor in wanted} == {name: expected[name] for name in wanted}
        storages = outline.storages(needed)
        large = [one for one, item in outline.tensors.items() if item.bytes > SMALL_BYTES and item.parameter]
        assert all(got[one].is_meta for one in large if outline.tensors[one].storage not in storages)


def test_ties_are_kept_and_shown() -> None:
    outline = outline_of(seeded(Initialised), small_bytes=SMALL_BYTES)
    assert outline.ties() == (("tied", "layers.2.weight"),)
    assert outline.model.tied is outline.model.layers[2].weight
    built = build_needed(seeded(Initialised), ["tied"], outline, small_bytes=SMALL_BYTES)
    assert built.model.tied is built.model.layers[2].weight
    assert not built.model.tied.is_meta


def test_plain_attributes_of_what_is_needed_are_real() -> None:
    whole = seeded(Initialised)()
    built = build_needed(seeded(Initialised), [""], small_bytes=SMALL_BYTES).model
    assert torch.equal(built.table[0], whole.table[0])
    assert build_needed(seeded(Unet), ["up"], small_bytes=SMALL_BYTES).model.down[1].weight.is_meta


def test_an_outline_has_no_memory_and_moves_no_generator() -> None:
    before = seeded(Unet)
    state = torch.get_rng_state()
    outline = outline_of(before, small_bytes=SMALL_BYTES)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.is_meta for weight in outline.model.parameters())
    assert outline.bytes == sum(tensor.nbytes for tensor in tensors_of(Unet()).values())


def test_what_can_t_be_deferred_is_built_whole_and_says_why() -> None:
    hidden: list[Tensor] = []

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            hidden.append(torch.zeros(1))
            self.layers = nn.ModuleList(nn.Linear(50, 50) for _ in hidden)

    built = build_needed(seeded(Changing), ["layers.0"], small_bytes=SMALL_BYTES)
    assert built.because == "the factory builds other tensors when it is called again"
    assert not built.model.layers[0].weight.is_meta
    assert built.model.layers[1].weight.is_meta


def test_the_users_error_is_the_users() -> None:
    def wrong() -> nn.Module:
        return nn.Linear(3, 4).no_such_name  # type: ignore[return-value]  # it raises

    with pytest.raises(AttributeError, match="no_such_name"):
        outline_of(wrong)
    with pytest.raises(AttributeError, match="no_such_name"):
        build_needed(wrong, [""])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["normal_", "uniform_"])
@pytest.mark.parametrize("size", [16, 31, 300_001])
def test_a_generator_is_moved_without_the_tensor(name: str, dtype: torch.dtype, size: int) -> None:
    own, moved = (torch.Generator().manual_seed(size) for _ in range(2))
    tensor = torch.empty(size, dtype=dtype)
    draws = draws_of(name, tensor)
    assert draws is not None
    getattr(tensor, name)(generator=own)
    advance(draws, moved)
    assert torch.equal(own.get_state(), moved.get_state())


def test_one_tensor_at_a_time_has_memory() -> None:
    trace = BuildTrace(draw=True, small_bytes=SMALL_BYTES)
    with trace.watching():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    held: Mapping[str, int] = {
        name: tensor.untyped_storage().nbytes() for name, tensor in model.named_parameters()
    }
    assert all(not size for name, size in held.items() if name.endswith("weight"))
    trace.close()


def test_a_layer_gets_values_for_a_while() -> None:
    model = outline_of(seeded(Unet), small_bytes=0).model
    with with_values(model.down[0], "cpu") as layer:
        once = layer.weight.detach().clone()
        assert torch.isfinite(layer(torch.ones(1, 4, 8, 8))).all()
    assert model.down[0].weight.is_meta
    with with_values(model.down[0], "cpu") as layer:
        assert torch.equal(layer.weight, once)


def test_weights_that_the_caller_fills_are_not_drawn() -> None:
    before = seeded(Unet)
    state = torch.get_rng_state()
    outline = outline_of(before, small_bytes=SMALL_BYTES)
    own = outline.names(["up"])
    built = build_needed(before, ["up"], outline, given=own, small_bytes=SMALL_BYTES)
    assert torch.equal(torch.get_rng_state(), state)
    assert built.because == ""
    assert {name for name, tensor in tensors_of(built.model).items() if not tensor.is_meta} >= set(own)
    assert all(item.saved for item in outline.tensors.values())
    assert not outline_of(seeded(Initialised)).tensors["mask"].saved
