"""Trains the network of `policies/numerics/allocation/path_scoring.py` and writes its weights.

    python benchmarks/train_path_scoring.py --data ../shared/data [--minutes 3] [--seed 0] [--out FILE]

Training sees only topologies that are not held out (`is_held_out`), with gravity matrices drawn anew for
each step; no optimum is needed: the loss is the logarithm of the maximum utilisation over the rounds, later
ones weighing more. Every sixth of the training topologies is kept for the line printed now and then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.harness.command import command
from benchmarks.policy_data.topology_zoo import FILE, is_held_out, load_topologies
from policies.contrib.topology_file import gravity
from policies.numerics.allocation.path_scoring import FEATURES, SCORE_SPAN, WEIGHTS, from_tensors
from policies.numerics.allocation.path_split import Paths

HIDDEN = 16
BATCH, PER_TOPOLOGY = 4, 2
MOST_NODES = 30
"""Of topologies to train on: larger ones cost more and teach the same."""
LEARNING_RATE = 4e-3


@dataclass(frozen=True, slots=True)
class Graph:
    """`Paths` as tensors; B matrices at a time, D demands, K paths, E links."""

    nodes: int
    path: Tensor
    link: Tensor
    present: Tensor
    capacity: Tensor
    hops: Tensor
    narrowest: Tensor

    def used(self, flow: Tensor) -> Tensor:
        """`(B, D, K)` → `(B, E)`."""
        along = flow.flatten(1)[:, self.path]
        return torch.zeros(len(flow), len(self.capacity)).index_add(1, self.link, along) / self.capacity

    def total(self, values: Tensor) -> Tensor:
        """`(B, E)` → `(B, D, K)`."""
        found = torch.zeros(len(values), self.present.numel()).index_add(1, self.path, values[:, self.link])
        return found.view(-1, *self.present.shape)

    def greatest(self, values: Tensor) -> Tensor:
        """`(B, E)` → `(B, D, K)`."""
        found = torch.zeros(len(values), self.present.numel())
        index = self.path.expand(len(values), -1)
        return found.scatter_reduce(1, index, values[:, self.link], "amax").view(-1, *self.present.shape)


def graph_of(nodes: int, paths: Paths) -> Graph:
    real = paths.link < len(paths.capacity)
    return Graph(
        nodes,
        torch.tensor(paths.path[real]),
        torch.tensor(paths.link[real]),
        torch.tensor(paths.present),
        torch.tensor(paths.capacity, dtype=torch.float32),
        torch.tensor(paths.hops, dtype=torch.float32),
        torch.tensor(paths.narrowest, dtype=torch.float32),
    )


class Network(nn.Module):
    """The forward pass of `policies.numerics.allocation.path_scoring.PathScoring`, with gradients."""

    def __init__(self) -> None:
        super().__init__()
        last = nn.Linear(HIDDEN, 2)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.ModuleList([nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN), last])
        self.dynamics = nn.Parameter(torch.tensor([2.5, 1.0, 0.5]))

    def forward(self, graph: Graph, demand: Tensor, rounds: int) -> Tensor:
        """Maximum utilisation after each round, `(B, rounds + 1)`, for demands `(B, D)`."""
        present, hidden = graph.present, torch.full((), -1e9)
        count = present.sum(1, keepdim=True)
        sharpness, step = self.dynamics[0].exp(), self.dynamics[1].exp()
        kept = torch.sigmoid(self.dynamics[2])
        scores = torch.zeros(len(demand), *present.shape).masked_fill(~present, -1e9)
        memory, prices = torch.zeros_like(scores), torch.zeros(len(demand), len(graph.capacity))
        size = demand[:, :, None] / graph.narrowest
        worsts = []
        for _ in range(rounds + 1):
            split = torch.softmax(scores, -1)
            used = graph.used(demand[:, :, None] * split)
            worst = used.amax(1)
            worsts.append(worst)
            used = used / worst[:, None]
            prices = kept * prices + (1 - kept) * torch.exp(sharpness * (used - 1))
            full, price = graph.greatest(used), graph.total(prices / graph.capacity)
            mean_price = (price * present).sum(-1, keepdim=True) / count
            behind = full - (split * full).sum(-1, keepdim=True)
            dearer = price - (split * price).sum(-1, keepdim=True)
            features = torch.stack(
                [
                    full,
                    full - full.masked_fill(~present, 9.0).amin(-1, keepdim=True),
                    behind,
                    split,
                    0.3 * torch.log((price + 1e-9) / (mean_price + 1e-9)).clamp(-6, 2),
                    dearer / (price.amax((1, 2), keepdim=True) + 1e-9),
                    0.3 * torch.log1p(100 / worst[:, None, None] * size),
                    (0.1 * graph.hops).expand_as(full),
                    memory,
                ],
                -1,
            )
            told = self.layers[2](torch.relu(self.layers[1](torch.relu(self.layers[0](features)))))
            move = told[..., 0] - step * behind
            memory = torch.tanh(told[..., 1] + 0.3 * move)
            scores = torch.where(present, scores + move, hidden)
            scores = (
                (scores - scores.amax(-1, keepdim=True)).clamp(-SCORE_SPAN, 0).masked_fill(~present, -1e9)
            )
        return torch.stack(worsts, 1)


def main() -> None:
    parser = command(__doc__, as_json=False, minutes=3.0, seed=0, out=WEIGHTS)
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    everything = load_topologies(args.data / FILE)
    training = [one for one in everything if not is_held_out(one) and one.nodes <= MOST_NODES]
    checked, learned = training[::6], [one for at, one in enumerate(training) if at % 6]
    print(f"{len(learned)} topologies to train on, {len(checked)} to look at, seed {args.seed}", flush=True)
    graphs = [graph_of(one.nodes, one.paths()) for one in learned]
    shown = [(one.paths(), gravity(np.random.default_rng(at), one.nodes)) for at, one in enumerate(checked)]
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    began, steps = time.monotonic(), 0
    while (done := (time.monotonic() - began) / (60 * args.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - done) + 1e-4
        for _ in range(BATCH):
            graph = graphs[rng.integers(len(graphs))]
            drawn = np.stack([gravity(rng, graph.nodes) for _ in range(PER_TOPOLOGY)])
            rounds = int(rng.integers(7, 15))
            worst = network(graph, torch.tensor(drawn, dtype=torch.float32), rounds)
            weight = torch.linspace(0, 1, rounds + 1) ** 2
            loss = ((worst.log() - worst[:, :1].log()) * weight).sum(1) / weight.sum()
            loss.mean().backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 100 == 0:
            _show(network, shown, steps)
    tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.out)
    _show(network, shown, steps)
    print(f"{args.out}: {args.out.stat().st_size} bytes after {steps} steps")


def _show(network: Network, shown: list[tuple[Paths, np.ndarray]], steps: int) -> None:
    scoring = from_tensors({name: tensor.numpy() for name, tensor in network.state_dict().items()})
    parts = [
        paths.worst(demand, scoring.split(paths, demand))
        / paths.worst(demand, scoring.split(paths, demand, 60))
        for paths, demand in shown
    ]
    ecmp = [
        paths.worst(demand, scoring.split(paths, demand)) / paths.worst(demand, paths.equal_cost())
        for paths, demand in shown
    ]
    print(
        f"step {steps}: {np.mean(parts):.4f} of what 60 rounds reach (worst {max(parts):.3f}), "
        f"{np.mean(ecmp):.3f} of ECMP",
        flush=True,
    )


if __name__ == "__main__":
    main()
