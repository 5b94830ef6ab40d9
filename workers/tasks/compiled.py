"""Whether compiled layers (`training.compile`) give the same bits in another cut, and in another process.

Two neighbours are computed as two stages and as one. A second process does so too, a fresh interpreter with
another seed of its hashes and no cache of compiled code, as it would be on another node:

    python -m workers.tasks.compiled FOLDER

In the folder are `order.json` (spec, device, code) and `sample.pt`; it writes `digests.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from schemas.errors import BadModel
from schemas.job import JobSpec, kept_spec
from workers.build.layer_values import with_values
from workers.compute.deferred_model import outlined_graph
from workers.compute.determinism import compute_exactly
from workers.compute.measured_loss import MeasuredLoss
from workers.data.batches import Batch
from workers.graph.compiled import check_compiler
from workers.graph.model_graph import ModelGraph, Value
from workers.graph.stage_module import StageModule
from workers.user_code import describe, folders, use_only


def check_compiled(spec: JobSpec, graph: ModelGraph, sample: Batch, node: str, device: str) -> str:
    """The digest of the compiler by which this job's layers have the same bits everywhere; empty: none is
    compiled.

    Raises:
        BadModel: A layer can't be compiled, its bits depend on cut or process, or there is no compiler.
    """
    if not spec.training.compile:
        return ""
    compiled_layers(spec, graph)
    compiler = check_compiler(node, device)
    with tempfile.TemporaryDirectory() as folder, _second(spec, sample, Path(folder), device) as second:
        own = checked_digests(spec, graph, sample, device)
        output, _ = second.communicate()
        found = Path(folder, "digests.json")
        if second.returncode or not found.exists():
            lines = output.decode(errors="replace").strip().splitlines()
            raise BadModel(
                f"training.compile: the second process that was to compute the same failed: "
                f"{lines[-1] if lines else f'exit status {second.returncode}'}"
            )
        other = json.loads(found.read_text())
    different = [number for number, (a, b) in enumerate(zip(own, other, strict=True)) if a != b]
    if different:
        raise BadModel(
            f"training.compile: {len(different)} of {len(own)} pairs of layers have other bits in a second "
            "process: leave compile out"
        )
    return compiler


def _second(spec: JobSpec, sample: Batch, folder: Path, device: str) -> subprocess.Popen[bytes]:
    order = {"spec": spec.model_dump(mode="json"), "device": device, "code": [*map(str, folders())]}
    (folder / "order.json").write_text(json.dumps(order))
    torch.save(dict(sample), folder / "sample.pt")
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "20211",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "workers.tasks.compiled", str(folder)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def main(folder: Path) -> None:
    """The second process."""
    order = json.loads((folder / "order.json").read_text())
    spec = kept_spec(order["spec"])
    if spec.code is not None:
        use_only(order["code"][0])
    sample = torch.load(folder / "sample.pt", weights_only=True)
    compute_exactly(spec.training.compute_threads, spec.training.seed)
    graph = outlined_graph(spec.model, spec.training.seed, sample)
    digests = checked_digests(spec, graph, sample, order["device"])
    (folder / "digests.json").write_text(json.dumps(digests))


def compiled_layers(spec: JobSpec, graph: ModelGraph) -> list[int]:
    """The layers that `training.compile` names.

    Raises:
        BadModel: A pattern matches none.
    """
    names = [layer.name for layer in graph.layers]
    for pattern in spec.training.compile:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise BadModel(
                f"training.compile: {pattern!r} matches no layer; there are {', '.join(names[:3])} and "
                f"{max(0, len(names) - 3)} more"
            )
    return [
        at for at, name in enumerate(names) if any(fnmatchcase(name, each) for each in spec.training.compile)
    ]


def checked_digests(spec: JobSpec, graph: ModelGraph, sample: Batch, on: str) -> list[str]:
    """SHA-256 of outputs and gradients of each two neighbours of which one is compiled, in order.

    Two layers at a time are in memory.

    Raises:
        BadModel: A layer can't be compiled, or its bits depend on the cut.
    """
    compiled, device = set(compiled_layers(spec, graph)), torch.device(on)
    needed = MeasuredLoss(spec, [*graph.outputs], [*sample], graph.inputs).outputs
    values: dict[str, Value] = {name: sample[name].to(device) for name in graph.inputs}
    found: list[str] = []
    for index, layer in enumerate(graph.layers):
        cut = [_stage(spec, graph, needed, index, index + 1, device)]
        if index + 1 < len(graph):
            cut.append(_stage(spec, graph, needed, index + 1, index + 2, device))
        if compiled.isdisjoint(range(index, index + len(cut))):
            with _weights(cut[:1], device):
                values = _passed(cut[0], values, graph)
            continue
        with _weights(cut, device):
            apart = _digest(cut, values, graph)
            if len(cut) > 1:
                whole = [_stage(spec, graph, needed, index, index + 2, device)]
                if _digest(whole, values, graph) != apart:
                    raise BadModel(
                        f"training.compile: layers {layer.name} and {graph.layers[index + 1].name} have "
                        "other bits in one stage than in two: leave them out"
                    )
            found.append(apart)
            values = _passed(cut[0], values, graph)
    return found


def _stage(
    spec: JobSpec,
    graph: ModelGraph,
    needed: Sequence[str] | None,
    first: int,
    last: int,
    device: torch.device,
) -> StageModule:
    stage = StageModule(
        graph,
        first,
        last,
        job_seed=spec.training.seed,
        precision=spec.training.precision,
        needed=needed,
        recompute=spec.training.recompute,
        compiled=spec.training.compile,
    )
    stage.train()
    if not any(weight.is_meta for weight in stage.parameters()):
        stage.to(device)
    return stage


def _weights(stages: Sequence[StageModule], device: torch.device) -> ExitStack:
    """Within, layers without memory have cheap values."""
    stack = ExitStack()
    for stage in stages:
        if any(weight.is_meta for weight in stage.parameters()):
            stack.enter_context(with_values(stage, device))
    return stack


def _passed(stage: StageModule, values: Mapping[str, Value], graph: ModelGraph) -> dict[str, Value]:
    """The wires behind a stage."""
    part = stage.slice
    own = {name: _copied(values[name]) for name in {*part.incoming, *graph.inputs}}
    for tensor in part.carries_gradient(own, part.incoming):
        tensor.requires_grad_()  # as in training, so that nothing is compiled once more for this
    made = stage.run(own, step=0, microbatch=0)
    return {name: _copied(made[name]) for name in {*part.outgoing, *graph.inputs}}


def _digest(stages: Sequence[StageModule], values: Mapping[str, Value], graph: ModelGraph) -> str:
    """Of the outputs of these stages, one after the other, and of all gradients of a made-up loss."""
    passes = []
    present = dict(values)
    for stage in stages:
        part = stage.slice
        own = {name: _copied(present[name]) for name in {*part.incoming, *graph.inputs}}
        carried = part.carries_gradient(own, part.incoming)
        for tensor in carried:
            tensor.requires_grad_()
        made = stage.run(own, step=0, microbatch=0)
        passes.append((stage, carried, part.carries_gradient(made, part.outgoing)))
        present = {name: made[name] for name in {*part.outgoing, *graph.inputs}}
        outputs = part.packed(made)
    given = [end.detach().clone() for end in passes[-1][2]]
    hashed = hashlib.sha256()
    for tensor in outputs:
        _add(hashed, tensor)
    weights: dict[str, Tensor] = {}
    for stage, carried, ends in reversed(passes):
        named = stage.trainable()
        pairs = [(end, grad) for end, grad in zip(ends, given, strict=True) if end.requires_grad]
        wanted = [*(weight for _, weight in named), *carried]
        if not pairs or not wanted:
            given = [torch.zeros_like(tensor) for tensor in carried]
            continue
        found = torch.autograd.grad(
            [end for end, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True
        )
        gradients = [
            torch.zeros_like(of) if grad is None else grad for grad, of in zip(found, wanted, strict=True)
        ]
        for (name, _), gradient in zip(named, gradients, strict=False):
            weights[name] = weights[name] + gradient if name in weights else gradient
        given = gradients[len(named) :]
    for tensor in (*(weights[name] for name in sorted(weights)), *given):
        _add(hashed, tensor)
    return hashed.hexdigest()


def _add(hashed: hashlib._Hash, tensor: Tensor) -> None:
    flat = tensor.detach().cpu().contiguous().view(-1)
    hashed.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


def _copied(value: Value) -> Value:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(each.detach().clone() for each in value) if isinstance(value, tuple) else value


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:  # user code may raise anything
        print(error.text if isinstance(error, BadModel) else describe(error))
        sys.exit(1)
