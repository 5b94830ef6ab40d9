"""Each example of examples/ as its author would train it without DMSC: a plain loop over the same samples.

    python -m benchmarks.plain_loops NAME [STEPS] [--backwards]

Model, loss and loop are plain PyTorch, transformers and peft. It shares with DMSC what defines the job: the
samples in their order, the first weights, and the learning rate of a step. Gradients are accumulated over the
microbatches of a step in fp32, on one thread. Prints the losses as one JSON list.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmsc.client.job_file import load_job
from schemas.job import JobSpec
from schemas.learning_rate import learning_rate
from workers.compute.model import build
from workers.data.opening import open_source
from workers.models.gpt import byte_gpt

ROOT = Path(__file__).parents[1]
Batch = Mapping[str, Tensor]
Scored = tuple[Tensor, float]
"""A microbatch's loss as a sum, and the weight that divides it."""


def of_example(module: str, name: str) -> Callable[..., nn.Module]:
    """A class of the example's own file."""
    made: Callable[..., nn.Module] = getattr(importlib.import_module(module), name)
    return made


def from_config(task: str) -> Callable[[JobSpec], nn.Module]:
    def made(spec: JobSpec) -> nn.Module:
        import transformers

        settings = dict(spec.model.args["config"])
        config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        model: nn.Module = getattr(transformers, task).from_config(config)
        return model

    return made


def pretrained_with_adapters(spec: JobSpec) -> nn.Module:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(ROOT / spec.model.args["config"])
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**spec.model.args["lora"]))
    return cast(nn.Module, adapted.base_model.model)


class TwoTowers(nn.Module):
    """The example's declared graph, written as a module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        towers = importlib.import_module("two_tower")
        self.users = towers.Tower(towers.USERS, width)
        self.items = towers.Tower(towers.ITEMS, width)
        self.match = towers.Match()

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        logits: Tensor = self.match(self.users(user), self.items(item))
        return logits


def by_names(model: nn.Module, batch: Batch) -> Tensor:
    """Calls the model with what of the batch its forward pass takes."""
    taken = inspect.signature(model.forward).parameters
    output: Any = model(**{name: value for name, value in batch.items() if name in taken})
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def classes(logits: Tensor, targets: Tensor) -> Scored:
    """Cross entropy over the targets that count."""
    total = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return total, float((targets != -100).sum())


@dataclass(frozen=True)
class PlainExample:
    """How an example's model is made, and what a microbatch scores."""

    model: Callable[[JobSpec], nn.Module]
    score: Callable[[nn.Module, Batch], Scored] = lambda model, batch: classes(
        by_names(model, batch), batch["targets"]
    )


EXAMPLES = {
    "bert": PlainExample(from_config("AutoModelForMaskedLM")),
    "digits": PlainExample(lambda spec: of_example("digits", "Digits")()),
    "llama-lora": PlainExample(pretrained_with_adapters),
    "mixture": PlainExample(
        lambda spec: byte_gpt(**spec.model.args),
        lambda model, batch: classes(model(batch["inputs"]), batch["targets"]),
    ),
    "t5": PlainExample(from_config("AutoModelForSeq2SeqLM")),
    "task-groups": PlainExample(lambda spec: of_example("task_groups", "Branches")()),
    "two-tower": PlainExample(
        lambda spec: TwoTowers(**spec.model.args),
        lambda model, batch: (
            functional.binary_cross_entropy_with_logits(
                model(batch["user"], batch["item"]), batch["clicked"]
            ),
            1.0,
        ),
    ),
    "unet": PlainExample(
        lambda spec: of_example("unet", "UNet")(**spec.model.args),
        lambda model, batch: (functional.mse_loss(model(batch["noisy"]), batch["targets"]), 1.0),
    ),
    "vit": PlainExample(
        from_config("AutoModelForImageClassification"),
        lambda model, batch: classes(model(pixel_values=batch["inputs"]).logits, batch["targets"]),
    ),
}


def make_optimizer(spec: JobSpec, model: nn.Module) -> torch.optim.Optimizer:
    own = spec.training.optimizer
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if own.name == "sgd":  # digits: no decay on biases and norms
        flat: dict[str, Any] = {"params": [w for w in trained if w.dim() == 1], "weight_decay": 0.0}
        wide: dict[str, Any] = {"params": [w for w in trained if w.dim() > 1]}
        return torch.optim.SGD([wide, flat], lr=own.lr, **own.args)
    options: dict[str, Any] = {"betas": own.betas, "eps": own.eps, "weight_decay": own.weight_decay}
    return torch.optim.AdamW(trained, lr=own.lr, **options)


async def losses(name: str, steps: int, *, backwards: bool = False) -> list[float]:
    """The loss of each of the first steps. `backwards`: a step's microbatches in the other order."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples" / name))
    spec, example = load_job(ROOT / "examples" / name / "job.yaml"), EXAMPLES[name]
    training, data = spec.training, await open_source(spec, None)
    model = example.model(spec).train()
    if spec.initial_weights is None or spec.model.args.get("lora"):
        first = build(spec.model, training.seed, data.batch("train", 0, 0)).model
        fresh = {
            name: weight
            for name, weight in first.named_parameters()
            if not spec.weights_url or ".lora_" in name
        }
        model.load_state_dict(fresh, strict=False)
    optimizer = make_optimizer(spec, model)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        total = weight = 0.0
        for microbatch in range(training.microbatches)[:: -1 if backwards else 1]:
            loss, counted = example.score(model, data.batch("train", step, microbatch))
            torch.autograd.backward(loss)
            total, weight = total + loss.item(), weight + counted
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
        if training.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.step()
        found.append(total / weight)
    data.close()
    return found


if __name__ == "__main__":
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 50
    print(json.dumps(asyncio.run(losses(sys.argv[1], count, backwards="--backwards" in sys.argv))))
