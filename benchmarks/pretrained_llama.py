"""A Llama that plain transformers trained goes in, is fine-tuned, and comes out: whose logits are the files'?

    python -m benchmarks.pretrained_llama [--pretraining 200] [--steps 40] [--stages 2] [--replicas 2]

transformers trains a small Llama from a config and saves it in three shards. A job begins with them, trains
all weights on another text, and ends with a validation of one sample, whose tokens and last logits are its
metrics. `from_pretrained` loads what the job has written, and computes the logits of the same tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.jobs import done
from benchmarks.harness.meshes import new_folder, open_mesh
from bus.logs import configure_logging
from schemas.job import JobSpec

EXAMPLE = Path(__file__).parents[1] / "examples" / "llama-lora" / "make_data.py"
TOKENS, BAR = 32, 1e-5
SEEN = """
def seen(logits, input_ids):
    tokens = {f"token-{place}": (float(token), 1) for place, token in enumerate(input_ids[0])}
    return tokens | {f"logit-{entry}": (float(logit), 1) for entry, logit in enumerate(logits[0, -1])}
"""


@dataclass(frozen=True)
class LlamaFigures:
    """`difference` is the largest of a logit, between the job's last validation and `from_pretrained`."""

    pretraining_steps: int
    shards_in: int
    steps: int
    first_loss: float
    last_loss: float
    shards_out: int
    logits: int
    difference: float


def made() -> ModuleType:
    """The example's own module: a grammar of people who count, and a tokenizer of its words."""
    spec = importlib.util.spec_from_file_location("counting", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job(folder: Path, options: argparse.Namespace) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "fine-tuned",
            "model": {
                "factory": "workers.models.transformers_model:transformers_model",
                "args": {"config": "pretrained"},
            },
            "code": {"folder": str(folder / "code")},
            "initial_weights": str(folder / "code" / "pretrained"),
            "data": {
                "kind": "text",
                "source": str(folder / "downwards.txt"),
                "separator": "\n",
                "tokenizer": str(folder / "code" / "pretrained"),
                "sample_tokens": TOKENS,
                "names": {"inputs": "input_ids"},
            },
            "training": {
                "steps": options.steps,
                "microbatches": 8,
                "microbatch_samples": 1,
                "validation_microbatches": 1,
                "optimizer": {"lr": 0.002},
                "evaluation": {"every": options.steps, "metrics": ["probe:seen"]},
            },
            "parallel": {"stages": options.stages, "replicas": options.replicas},
        }
    )


async def measure(options: argparse.Namespace) -> LlamaFigures:
    configure_logging(level="error")
    with new_folder() as folder:
        code = folder / "code"
        code.mkdir()
        (code / "probe.py").write_text(SEEN)
        counting = made()
        counting.write(folder, code / "pretrained", steps=options.pretraining)
        shards_in = len([*(code / "pretrained").glob("*.safetensors")])
        say(f"pretrained in {options.pretraining} steps, {shards_in} shards")
        async with open_mesh(tell=say, slots=options.stages * options.replicas + 1) as mesh:
            name = (await mesh.client.submit(job(folder, options))).job
            losses = [event.result.loss async for event in mesh.client.events(name) if event.result]
            record = done(await mesh.client.job(name))
            await mesh.client.download_weights(name, folder / "out")
        difference, logits = compared(folder / "out", record.metrics)
        return LlamaFigures(
            pretraining_steps=options.pretraining,
            shards_in=shards_in,
            steps=len(losses),
            first_loss=losses[0],
            last_loss=losses[-1],
            shards_out=len([*(folder / "out").glob("*.safetensors")]),
            logits=logits,
            difference=difference,
        )


def compared(folder: Path, metrics: dict[str, float]) -> tuple[float, int]:
    """The largest difference of a logit, and how many there are."""
    import torch
    import transformers

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    transformers.AutoTokenizer.from_pretrained(folder)
    if wrong := {key: names for key, names in report.items() if names}:
        raise SystemExit(f"from_pretrained: {json.dumps(wrong, default=list)}")
    tokens = [int(metrics[f"token-{place}"]) for place in range(TOKENS)]
    with torch.inference_mode():
        theirs = model.eval()(input_ids=torch.tensor([tokens])).logits[0, -1]
    own = [metrics[f"logit-{entry}"] for entry in range(len(theirs))]
    return max(abs(a - float(b)) for a, b in zip(own, theirs, strict=True)), len(own)


def lines(found: LlamaFigures) -> Iterator[str]:
    yield f"in: {found.shards_in} shards after {found.pretraining_steps} steps of plain transformers"
    yield f"fine-tuned: {found.steps} steps, loss {found.first_loss:.4f} → {found.last_loss:.4f}"
    yield f"out: {found.shards_out} shards; {found.logits} logits differ by at most {found.difference:.1e}"
    if not found.difference <= BAR:
        raise SystemExit(f"the logits differ by more than {BAR:g}")


if __name__ == "__main__":
    bench(command(__doc__, pretraining=200, steps=40, stages=2, replicas=2), measure, lines)
