"""Models that are no sequence: with skips, several outputs, and losses that take them by name."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from workers.graph.declared import DeclaredGraph


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Hourglass(nn.Module):
    """A U-Net over tokens: each level's output is read again on the way up, the first one three times."""

    def __init__(self, width: int = 16, levels: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(64, width))
        self.down = nn.ModuleList(Block(width) for _ in range(levels))
        self.up = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(levels))
        self.head = nn.Linear(width, 256)
        self.helper = nn.Linear(width, 256)
        self.dropout = dropout

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        samples, length = inputs.shape
        x = self.token(inputs) + self.position[:length]
        start, skips = x, []
        for block in self.down:
            x = block(x)
            skips.append(x)
        helper = self.helper(x)
        for mix in self.up:
            x = functional.relu(mix(torch.cat([x, skips.pop()], dim=-1))) + start
            x = functional.dropout(x, self.dropout, self.training)
        assert x.shape == (samples, length, x.shape[-1])
        return {"logits": self.head(x), "helper": helper}


def with_helper(logits: Tensor, helper: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, and a little of that of an auxiliary head."""
    own = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return own + 0.3 * functional.cross_entropy(helper.flatten(0, 1), targets.flatten())


def over_even_targets(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over some targets only, and their number."""
    counted = targets % 2 == 0
    every = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(
        targets
    )
    return (every * counted).sum(), counted.sum()


class Dot(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right.transpose(1, 2).softmax(-1) @ right


def towers(width: int = 16) -> DeclaredGraph:
    """Two towers over the same tokens, declared."""
    graph = DeclaredGraph(inputs=("inputs",))
    graph.layer("left", lambda: nn.Embedding(256, width), "inputs")
    graph.layer("right", lambda: nn.Embedding(256, width), "inputs")
    graph.layer("deeper", lambda: Block(width), "left")
    graph.layer("mixed", Dot, "deeper", "right")
    graph.layer("head", lambda: nn.Linear(width, 256), "mixed")
    return graph.returns(logits="head")


class Heads(nn.Module):
    """Two tasks over one trunk: the next byte, and whether it is even."""

    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.trunk = Block(width)
        self.byte = nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout), nn.Linear(width, 256))
        self.even = nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout), nn.Linear(width, 2))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        x = self.trunk(self.token(inputs))
        return {"logits": self.byte(x), "even": self.even(x)}


def of_both_heads(logits: Tensor, even: Tensor, targets: Tensor) -> Tensor:
    """The sum of both tasks' cross entropies."""
    own = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return own + functional.cross_entropy(even.flatten(0, 1), targets.flatten() % 2)


class Chooses(nn.Module):
    """Its layers depend on the data, so it can't be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.token(inputs)
        if x.mean() > 0:
            x = -x
        return self.head(x)


def wants_more(logits: Tensor, colour: Tensor, targets: Tensor) -> Tensor:
    """Takes what there is not."""
    return logits.mean() + colour.mean() + targets.mean()


class Tied(nn.Module):
    """A small GPT as people write it: the head is the embedding's weight, and the model returns its loss."""

    def __init__(self, width: int = 16, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(inputs.size(1), device=inputs.device)
        x = self.dropout(self.token(inputs) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
