"""Public training scripts beside DMSC: the losses of 50 steps on the same samples from the same weights.

    python -m benchmarks.compare_scripts --scripts DIR [--only nanogpt] [--stages 2] [--replicas 2]

DIR holds checkouts of nanoGPT, transformers and vision, or of each just what `SCRIPTS` names. Each script
runs unmodified under a recorder, on text or pictures that are made here. Then a mesh trains the same model by
the few lines of benchmarks/public_scripts/NAME. Everything is fp32 on one core, with dropout 0.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.command import bench, command, say, some_of
from benchmarks.harness.jobs import done
from benchmarks.harness.meshes import new_folder, open_mesh
from benchmarks.public_scripts.made_data import make_model_folder, make_pictures, make_text
from bus.logs import configure_logging
from dmsc import AsyncClient
from dmsc.client.job_file import load_job, with_code

OWN = Path(__file__).with_name("public_scripts")
TOOLS = ("replayed.py", "operators.py")
BAR, MOST_LINES = 1e-5, 15


@dataclass(frozen=True)
class PublicScript:
    """A script, how it is run, and what its job takes along.

    Attributes:
        checkout: The folder of its repository within DIR.
        file: The script within that.
        arguments: Its command line, in a working directory where `text.txt`, `model` and `pictures` lie.
        sources: What of the checkout the model is made of.
        needs: A module that must be installed beside those of DMSC's extras.
        inside: Whether the script must be run in its own folder.
    """

    checkout: str
    file: str
    arguments: str
    sources: tuple[str, ...] = ()
    needs: str = ""
    inside: bool = False


SCRIPTS = {
    "nanogpt": PublicScript(
        checkout="nanoGPT",
        file="train.py",
        arguments="""
            --dataset=shakespeare_char --device=cpu --dtype=float32 --compile=False
            --n_layer=4 --n_head=4 --n_embd=128 --block_size=64
            --batch_size=12 --gradient_accumulation_steps=4 --max_iters=49
            --warmup_iters=10 --lr_decay_iters=50 --eval_interval=50 --eval_iters=2
        """,
        sources=("model.py",),
        inside=True,
    ),
    "run_clm": PublicScript(
        checkout="transformers",
        file="examples/pytorch/language-modeling/run_clm.py",
        arguments="""
            --config_name model --tokenizer_name model --train_file text.txt --validation_file text.txt
            --do_train --max_steps 50 --per_device_train_batch_size 8 --gradient_accumulation_steps 4
            --block_size 64 --learning_rate 1e-3
            --output_dir out --use_cpu --report_to none --save_strategy no
        """,
        needs="evaluate",
    ),
    "classification": PublicScript(
        checkout="vision",
        file="references/classification/train.py",
        arguments="""
            --data-path pictures --model resnet18 --device cpu --workers 0 --batch-size 8 --epochs 1 --lr 0.01
            --train-crop-size 32 --val-resize-size 36 --val-crop-size 32 --output-dir out
        """,
        sources=("torchvision",),
    ),
}


@dataclass(frozen=True)
class ScriptFigures:
    """What one script showed. `blob` is git's name for the file that ran, `lines` what its user writes."""

    name: str
    blob: str
    steps: int
    lines: int
    first_loss: float
    last_loss: float
    difference: float
    stages: int
    replicas: int


def blob(file: Path) -> str:
    """The name that git has for this content: equal wherever the file is the same."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def own_lines(folder: Path) -> int:
    """Lines of YAML and Python that are neither empty nor only a comment."""
    texts = [file.read_text() for file in sorted(folder.iterdir()) if file.suffix in (".yaml", ".py")]
    return sum(
        bool(line.strip()) and not line.strip().startswith("#")
        for text in texts
        for line in text.splitlines()
    )


def record(script: PublicScript, checkout: Path, work: Path) -> Path:
    """Runs the script under the recorder; returns the folder of what was recorded.

    Raises:
        SystemExit: It failed, with the end of its output.
    """
    work.mkdir(parents=True)
    if script.inside:
        here = work / script.checkout
        shutil.copytree(checkout, here, ignore=shutil.ignore_patterns(".git"))
        make_text(here / "data" / "shakespeare_char" / "input.txt")
        subprocess.run(
            [sys.executable, "data/shakespeare_char/prepare.py"],
            cwd=here,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        file = here / script.file
    else:
        here, file = work, checkout / script.file
        make_text(here / "text.txt")
        make_model_folder(here / "model", here / "text.txt")
        make_pictures(here / "pictures")
    recorded = work / "recorded"
    places = [str(checkout)] * bool(script.sources) + [os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "PYTHONDONTWRITEBYTECODE": "1",  # a checkout stays as it is
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    start = [sys.executable, str(OWN / "recorder.py"), str(recorded), str(file), *script.arguments.split()]
    with (work / "output.txt").open("wb") as output:
        ended = subprocess.run(start, cwd=here, env=environment, stdout=output, stderr=subprocess.STDOUT)
    if ended.returncode:
        text = (work / "output.txt").read_text(errors="replace")
        raise SystemExit(f"{text[-3000:]}\n{file} failed: the end of its output is above")
    return recorded


def code_folder(name: str, script: PublicScript, checkout: Path, work: Path) -> Path:
    """The folder that travels with the job: the user's lines, what was recorded, the script's own model."""
    code = work / "code"
    shutil.copytree(OWN / name, code, ignore=shutil.ignore_patterns("__pycache__"))
    for tool in TOOLS:
        shutil.copy(OWN / tool, code)
    shutil.copy(work / "recorded" / "samples.safetensors", code)
    if (work / "model").exists():
        shutil.copytree(work / "model", code / "model")
    for source in script.sources:
        copy = shutil.copytree if (checkout / source).is_dir() else shutil.copy
        copy(checkout / source, code / source)
    return code


async def compared(client: AsyncClient, name: str, work: Path, options: argparse.Namespace) -> ScriptFigures:
    """One script, recorded and trained again. `work` is a folder that does not exist yet."""
    script = SCRIPTS[name]
    checkout = options.scripts.resolve() / script.checkout
    say(f"{name}: {script.file} runs")
    recorded = await asyncio.to_thread(record, script, checkout, work)
    code = await asyncio.to_thread(code_folder, name, script, checkout, work)
    shape = [f"parallel.stages={options.stages}", f"parallel.replicas={options.replicas}"]
    spec = load_job(code / "job.yaml", [f"initial_weights={recorded / 'first'}", *shape])
    job = (await client.submit(with_code(spec, code))).job
    losses = [event.result.loss async for event in client.events(job) if event.result is not None]
    done(await client.job(job))
    theirs: list[float] = json.loads((recorded / "losses.json").read_text())
    if len(losses) != len(theirs):
        raise SystemExit(f"{name}: {len(theirs)} steps of the script, {len(losses)} of the job")
    return ScriptFigures(
        name=name,
        blob=blob(checkout / script.file),
        steps=len(losses),
        lines=own_lines(OWN / name),
        first_loss=theirs[0],
        last_loss=theirs[-1],
        difference=max(abs(own - their) for own, their in zip(losses, theirs, strict=True)),
        stages=options.stages,
        replicas=options.replicas,
    )


async def measure(options: argparse.Namespace) -> list[ScriptFigures]:
    configure_logging(level="error")
    check(options)
    found = []
    slots = options.stages * options.replicas + 1
    with new_folder() as work:
        async with open_mesh(tell=say, slots=slots) as mesh:
            for name in options.only:
                found.append(await compared(mesh.client, name, work / name, options))
                say(row(found[-1]))
    return found


def check(options: argparse.Namespace) -> None:
    """Raises `SystemExit`, in one line, if a script or what it needs is not there."""
    for name in options.only:
        script = SCRIPTS[name]
        file = options.scripts / script.checkout / script.file
        if not file.exists():
            raise SystemExit(
                f"there is no {file}: SCRIPTS names the folder of a checkout of {script.checkout}"
            )
        if script.needs and importlib.util.find_spec(script.needs) is None:
            raise SystemExit(
                f"{file.name} needs {script.needs}: pip install {script.needs}, or leave it out with --only"
            )


def row(found: ScriptFigures) -> str:
    losses = f"{found.first_loss:7.4f} {found.last_loss:7.4f}"
    shape = f"{found.stages} × {found.replicas}"
    counts = f"{found.lines:5} {found.steps:5}"
    return f"{found.name:15} {found.blob[:10]} {counts} {losses} {shape:>6} {found.difference:10.1e}"


def lines(found: list[ScriptFigures]) -> Iterator[str]:
    columns = f"{'lines':>5} {'steps':>5} {'first':>7} {'last':>7} {'shape':>6} {'difference':>10}"
    yield f"{'script':15} {'git blob':10} {columns}"
    yield from map(row, found)
    if wrong := [each.name for each in found if not each.difference <= BAR or each.lines > MOST_LINES]:
        raise SystemExit(f"losses beyond {BAR:g}, or more than {MOST_LINES} lines: {', '.join(wrong)}")


if __name__ == "__main__":
    parser = command(__doc__, stages=2, replicas=1)
    parser.add_argument("--scripts", type=Path, required=True, help="the folder of the checkouts")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/compare-scripts"), help="what is made goes here"
    )
    parser.add_argument(
        "--only", type=some_of(tuple(SCRIPTS)), default=tuple(SCRIPTS), help="some scripts, with commas"
    )
    bench(parser, measure, lines)
