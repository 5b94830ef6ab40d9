"""Trains the graph network of `policies/numerics/allocation/outcome_network.py` and writes its weights.

    python -m benchmarks.train_change_outcomes [--seeds 600] [--epochs 60] [--seed 0] [--examples FILE]

Examples are made by the simulator (`outcome_training/`): in each of the drawn jobs something becomes of a
device, and at some moments a change is made in a second run of the same seed. `--examples` keeps them, so
that a second training takes a minute; each thousand seeds take about ten minutes to simulate. Every fifth
seed is held out: it calibrates the widths, and the printed figures are of it. Seeds from `UNSEEN` on are for
comparisons in a closed loop (`--compare 100`), which training never sees. Same seeds and epochs, same bytes.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.harness.command import command, say
from benchmarks.outcome_training.closed_loop import compare
from benchmarks.outcome_training.examples import examples_of, packed
from policies.numerics.allocation.outcome_network import FORM, ROUNDS, WEIGHTS, from_tensors

HELD_OUT = 5
UNSEEN = 1_000_000
BATCH, LEARNING_RATE, DECAY = 128, 3e-3, 1e-3
LEAST_LOG, MOST_LOG = -5.0, 1.0
CENTRAL, CENTRAL_Z = 0.8, 1.2816
"""The part of the held-out outcomes that calibrated widths have within the interval, and its half width."""


class Network(nn.Module):
    """The forward pass of `OutcomeNetwork`, with gradients."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.tensors = nn.ParameterDict()
        for name, form in FORM.items():
            scale = math.sqrt(2 / form[-1]) if len(form) > 1 else 0.0
            if name.startswith(("out", "rounds")):
                scale *= 0.3
            value = torch.randn(form, generator=draw) * scale
            self.tensors[name.replace(".", "_")] = nn.Parameter(value, requires_grad=name != "widths")

    def of(self, name: str) -> Tensor:
        found: Tensor = self.tensors[name.replace(".", "_")]
        return found

    def forward(self, nodes: Tensor, marks: Tensor, stages: Tensor, job: Tensor) -> tuple[Tensor, Tensor]:
        """Means and logarithms of widths, `(B, 2)` each, of padded graphs."""
        there = (stages >= 0).float()[:, :, None]
        values = torch.relu(torch.cat([nodes, marks], 2) @ self.of("lift.weight").T + self.of("lift.bias"))
        values = values * there
        away = (stages[:, :, None] - stages[:, None, :]).abs()
        pairs = there @ there.transpose(1, 2)
        mates = (away == 0).float() * pairs * (1 - torch.eye(stages.shape[1]))
        beside = (away == 1).float() * pairs
        mates = mates / mates.sum(2, keepdim=True).clamp(min=1)
        beside = beside / beside.sum(2, keepdim=True).clamp(min=1)
        for turn in range(ROUNDS):
            own, stage, others, bias = (
                self.of(f"rounds.{turn}.{part}") for part in ("own", "stage", "beside", "bias")
            )
            heard = values @ own.T + mates @ values @ stage.T + beside @ values @ others.T + bias
            values = (values + torch.relu(heard)) * there
        leaver = (values * marks[:, :, :1]).sum(1)
        mean = values.sum(1) / there.sum(1)
        hidden = torch.relu(
            torch.cat([leaver, mean, job], 1) @ self.of("read.weight").T + self.of("read.bias")
        )
        found = hidden @ self.of("out.weight").T + self.of("out.bias")
        return found[:, :2], found[:, 2:].clamp(LEAST_LOG, MOST_LOG)

    def arrays(self) -> dict[str, Tensor]:
        return {name: self.of(name).detach().clone().contiguous() for name in FORM}


Batch = dict[str, Tensor]


def collected(seeds: int, file: Path | None) -> dict[str, np.ndarray]:
    """The examples of seeds 0 … seeds − 1, from the file as far as it has them."""
    if file is not None and file.exists():
        with np.load(file) as kept:
            return {name: kept[name] for name in kept.files}
    began, examples = time.monotonic(), []
    for seed in range(seeds):
        examples += list(examples_of(seed))
        if (seed + 1) % 100 == 0:
            say(f"{seed + 1} seeds, {len(examples)} examples, {time.monotonic() - began:.0f} s")
    arrays = packed(examples)
    if file is not None:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return arrays


def tensors_of(arrays: dict[str, np.ndarray], chosen: np.ndarray) -> Batch:
    return {name: torch.tensor(array[chosen]) for name, array in arrays.items()}


def targets(batch: Batch) -> Tensor:
    return torch.stack([batch["gain"], batch["step"]], 1)


def loss_of(network: Network, batch: Batch) -> Tensor:
    """Negative logarithm of the likelihood; far outliers count linearly."""
    mean, log_width = network(batch["nodes"], batch["marks"], batch["stages"], batch["job"])
    z = (targets(batch) - mean) / log_width.exp()
    far: Tensor = nn.functional.huber_loss(z, torch.zeros_like(z), delta=3.0, reduction="none")
    loss: Tensor = (far + log_width).mean()
    return loss


def train(learn: Batch, epochs: int, seed: int) -> Network:
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    network = Network(seed)
    optimizer = torch.optim.AdamW(
        [each for each in network.parameters() if each.requires_grad], lr=LEARNING_RATE, weight_decay=DECAY
    )
    count = len(learn["gain"])
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (0.5 + 0.5 * math.cos(math.pi * epoch / epochs)) + 1e-5
        for part in torch.randperm(count, generator=draw).split(BATCH):  # type: ignore[no-untyped-call]
            loss = loss_of(network, {name: values[part] for name, values in learn.items()})
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
    return network


def calibrate(network: Network, held: Batch) -> None:
    """Widths such that the central interval has its part of the held-out outcomes."""
    with torch.no_grad():
        mean, log_width = network(held["nodes"], held["marks"], held["stages"], held["job"])
        z = ((targets(held) - mean) / log_width.exp()).abs()
        network.of("widths").copy_((z.quantile(CENTRAL, dim=0) / CENTRAL_Z).log())


def show(network: Network, held: Batch) -> None:
    """What it says of held-out seeds, beside the formula by present times."""
    with torch.no_grad():
        mean, log_width = network(held["nodes"], held["marks"], held["stages"], held["job"])
        width = log_width.exp() * network.of("widths").exp()
    gain, formula = held["gain"], held["job"][:, 1]
    sure = 0.5 * (1 + torch.erf(mean[:, 0] / (width[:, 0] * math.sqrt(2))))
    paid = (gain > 0).float()
    base = paid.mean()
    say(
        f"held out: {len(gain)} changes, of which {base:.0%} pay\n"
        f"  gain, mean absolute error: {(mean[:, 0] - gain).abs().mean():.3f}; by formula "
        f"{(formula - gain).abs().mean():.3f}; always the mean {(gain - gain.mean()).abs().mean():.3f}\n"
        f"  step afterwards, the same: {(mean[:, 1] - held['step']).abs().mean():.3f}; by formula "
        f"{(-formula - held['step']).abs().mean():.3f}\n"
        f"  whether it pays, Brier score: {((sure - paid) ** 2).mean():.3f}; always {base:.0%}: "
        f"{base * (1 - base):.3f}"
    )
    for low in (0.0, 0.2, 0.4, 0.6, 0.75, 0.9):
        high = {0.0: 0.2, 0.2: 0.4, 0.4: 0.6, 0.6: 0.75, 0.75: 0.9, 0.9: 1.01}[low]
        here = (sure >= low) & (sure < high)
        if here.any():
            say(f"  said {sure[here].mean():.2f}, paid {paid[here].mean():.2f} of {int(here.sum())}")


def main() -> None:
    parser = command(
        __doc__,
        as_json=False,
        seeds=(600, "simulated jobs to learn from"),
        epochs=(60, "of training", 1),
        seed=(0, "of the training"),
        out=(WEIGHTS, "the weights' file"),
        compare=(0, "jobs for the comparison in a closed loop; 0: none", 0),
    )
    parser.add_argument("--examples", type=Path, default=None, help="keep the examples in this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    arrays = collected(options.seeds, options.examples)
    learnt = arrays["seed"] % HELD_OUT != 0
    learn, held = tensors_of(arrays, learnt), tensors_of(arrays, ~learnt)
    network = train(learn, options.epochs, options.seed)
    calibrate(network, held)
    show(network, held)
    found = network.arrays()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(found, options.out)
    say(f"{options.out}: {options.out.stat().st_size} bytes")
    if options.compare:
        compare(
            from_tensors({name: value.numpy() for name, value in found.items()}),
            range(UNSEEN, UNSEEN + options.compare),
        )


if __name__ == "__main__":
    main()
