"""`dmsc check`: a job on this machine, without a mesh, before it is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dmsc.console.command_app import argument, option
from dmsc.console.options import JsonOption, print_json, print_table, print_text

if TYPE_CHECKING:
    from dmsc.authoring.local_check import CheckReport
    from schemas.task_graph import LayerProfile


def check(
    file: Annotated[Path, argument("FILE.yaml", "The job file (YAML or JSON).")],
    set_: Annotated[
        list[str] | None,
        option("--set KEY=VALUE", "Override a key of the job, e.g. data.source=small.txt; repeatable."),
    ] = None,
    code: Annotated[
        Path | None, option("--code DIR", "The modules of this folder, as `dmsc train --code` sends them.")
    ] = None,
    steps: Annotated[int, option("--steps", "How many steps are trained.", min=1)] = 2,
    device: Annotated[str, option("--device", "Where: cpu, cuda:0 …")] = "cpu",
    debug: Annotated[
        bool, option("--debug", "Open pdb where an error is raised; breakpoint() works, too.")
    ] = False,
    timeout: Annotated[
        float, option("--timeout SECONDS", "The longest time without a result.", min=1)
    ] = 600.0,
    json: JsonOption = False,
) -> None:
    """Check a job here, without a mesh: its code, a batch, its layers, memory, and its first steps.

    A process of its own packs and unpacks the code as nodes do, decodes a batch, measures each layer, and
    trains the first steps twice: as one stage, and cut as the job says. The weights must be the same to the
    bit. Of an array all files are checked, and the first job is tried.

    Example: dmsc check examples/stdlib-gpt.yaml
    """
    from dmsc.authoring.local_check import CheckOptions, check_job
    from dmsc.client.job_file import load_job, with_code
    from schemas.arrays import member_specs

    spec, *others = member_specs(load_job(file, set_ or ()))
    if others and not json:
        print_text(f"all {len(others) + 1} jobs of the array are valid; the first one is tried")
    if code is not None:
        spec = with_code(spec, code)
    options = CheckOptions(steps=steps, device=device, debug=debug, silence_s=timeout)
    report = None
    for name, report in check_job(spec, options):
        if not json:
            _print(name, report)
    if report is None:
        return
    if json:
        print_json(report.to_json())
        return
    if len(report.weights) > 1:
        counts = " and ".join(map(str, report.weights))
        print_text(f"the weights have the same bits with {counts} stages")
    print_text(f"{spec.name} can be trained: dmsc train {file}")


def _print(name: str, report: CheckReport) -> None:
    if name == "batch":
        rows = [_batch_row(entry) for entry in report.batch]
        print_table(("batch", "shape", "dtype", "values"), rows, title="one decoded batch")
    elif name == "topology" and report.topology is not None:
        layers = [_layer_row(layer) for layer in report.topology.layers]
        columns = ("layer", "kind", "parameters", "forward", "backward", "kept", "output")
        print_table(columns, layers, title="layers, per microbatch")
        if report.topology.unmatched_weights:
            print_text(report.topology.unmatched_weights)
        if report.topology.inexact:
            print_text(f"not exact: {report.topology.inexact}")
        stages = [
            (
                str(unit.stage),
                f"{unit.first_layer}–{unit.last_layer - 1}",
                _size(unit.requirements.memory_bytes),
                f"{unit.requirements.cost_ms:.1f} ms",
            )
            for unit in report.stages
        ]
        print_table(("stage", "layers", "memory of each replica", "per microbatch"), stages, title="stages")
    elif name == "step":
        step = report.steps[-1]
        print_text(
            f"step {step['step']} with {step['cut']} stage{'s' * (step['cut'] > 1)}: "
            f"loss {step['loss']:.6f} in {step['seconds']:.2f} s"
        )


def _batch_row(entry: dict[str, Any]) -> tuple[str, ...]:
    least, most = entry["least"], entry["most"]
    values = "none" if least is None else f"{least:g} to {most:g}"
    return entry["name"], " × ".join(map(str, entry["shape"])), entry["dtype"], values


def _layer_row(layer: LayerProfile) -> tuple[str, ...]:
    outputs = ", ".join(f"{'×'.join(map(str, schema.shape))} {schema.dtype}" for schema in layer.output)
    return (
        f"{layer.index} {layer.name}",
        layer.kind,
        f"{layer.parameters:,}",
        f"{layer.forward_ms:.2f} ms",
        f"{layer.backward_ms:.2f} ms",
        _size(layer.activation_bytes),
        outputs,
    )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
