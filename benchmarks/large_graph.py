"""A declared graph of any size, for `benchmarks.larger_than_a_node`: two branches of blocks that meet."""

from __future__ import annotations

from torch import Tensor, nn

from workers.graph.declared import DeclaredGraph


class Block(nn.Module):
    """(samples, tokens, width) → the same: a layer norm and two linear layers, beside a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.narrow(nn.functional.gelu(self.wide(self.norm(hidden))))
        return out


class Both(nn.Module):
    """What the two branches have made of the same tokens."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right


def branches(width: int, blocks: int) -> DeclaredGraph:
    """`blocks` blocks in each of two branches. Inputs: (samples, tokens) int64, bytes."""
    graph = DeclaredGraph(inputs=("inputs",))
    graph.layer("embed", lambda: nn.Embedding(256, width), "inputs")
    ends = dict.fromkeys(("left", "right"), "embed")
    for number in range(blocks):
        for side, end in ends.items():
            graph.layer(f"{side}_{number}", lambda: Block(width), end)
            ends[side] = f"{side}_{number}"
    graph.layer("both", Both, *ends.values())
    graph.layer("head", lambda: nn.Linear(width, 256), "both")
    return graph.returns(logits="head")
