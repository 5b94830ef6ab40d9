"""`dmsc plan`: what a job would take on which slots, before it is submitted."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dmsc.console.command_app import argument, option
from dmsc.console.option_groups import GatewayQuery
from dmsc.console.options import print_json, print_table, print_text

if TYPE_CHECKING:
    from dmsc.planning.local_plans import PricedPlan, SlotOffer
    from schemas.job import JobSpec
    from schemas.task_graph import ModelTopology


def plan(
    file: Annotated[Path, argument("FILE.yaml", "The job file (YAML or JSON).")],
    set_: Annotated[
        list[str] | None, option("--set KEY=VALUE", "Override a key of the job; repeatable.")
    ] = None,
    code: Annotated[
        Path | None, option("--code DIR", "The modules of this folder, as `dmsc train --code` sends them.")
    ] = None,
    slots: Annotated[
        str | None, option("--slots N|A..B", "Plans of the best shape on so many slots of speed 1.")
    ] = None,
    slot: Annotated[
        list[str] | None,
        option("--slot SPEED[:GIB]", "One slot of this relative speed and memory; repeatable."),
    ] = None,
    deadline: Annotated[
        float | None, option("--deadline HOURS", "The fewest slots on which the job ends in time.", min=0)
    ] = None,
    topology: Annotated[
        Path | None, option("--topology FILE", "The network between nodes: GraphML, or YAML with its kind.")
    ] = None,
    price: Annotated[float | None, option("--price N", "What a slot costs for an hour.", min=0)] = None,
    compare: Annotated[
        bool, option("--compare", "Beside the job's own stages and replicas: the best ones on its slots.")
    ] = False,
    on_mesh: Annotated[
        bool, option("--mesh", "On the mesh's slots: the default where one answers and no slots are named.")
    ] = False,
    best: Annotated[
        bool, option("--best", "On the mesh: the best stages and replicas, not the file's.")
    ] = False,
    free: Annotated[bool, option("--free", "On the mesh: only slots that are free now.")] = False,
    layers: Annotated[
        str | None, option("--layers FIRST..LAST", "On the mesh: only these layers, by name.")
    ] = None,
    out: Annotated[
        Path | None, option("--out FILE", "Write the job file with this plan in it, for `dmsc train`.")
    ] = None,
    mesh: GatewayQuery = GatewayQuery(),
) -> None:
    """Plan a job: stages, instances, the time of a step, why, and the price. Nothing is started.

    Its layers are measured here, by a process of its own. It is planned on the slots of the mesh, or without
    one on slots that you name; their speeds are relative to this machine's.

    Example: dmsc plan examples/stdlib-gpt.yaml --slots 1..16 --price 0.4
    """
    from dmsc.client.job_file import load_job, with_code
    from dmsc.planning.kept_plan import keep
    from dmsc.planning.local_plans import PlanOptions, plans_without_a_mesh
    from dmsc.planning.mesh_plans import answering, ask_plan, lines_of, range_of_layers, row_of
    from dmsc.planning.plan_text import COLUMNS
    from dmsc.planning.topology_file import read_topology_file
    from entities.orchestrator.planning.plan_rules import model_digest
    from schemas.errors import BadInput
    from schemas.plans import MeasuredModel, PlanBody, planned_job

    if sum(given is not None for given in (slots, slot, deadline)) > 1:
        raise BadInput("--slots, --slot and --deadline exclude each other: give one of them")
    if compare and (slots is not None or deadline is not None):
        raise BadInput("--compare is about the job's own slots, or those of --slot: leave one out")
    if deadline is not None and not 0 < deadline < math.inf:
        raise BadInput(f"--deadline {deadline:g}: give hours above 0")
    if price is not None and not math.isfinite(price):
        raise BadInput(f"--price {price:g}: give a number")
    counts = range_of(slots) if slots is not None else None
    offers = [offer_of(text) for text in slot or ()]
    if layers is not None and out is not None:
        raise BadInput("--out keeps the plan of a whole model: leave --layers out")
    network = read_topology_file(topology) if topology is not None else None
    spec = load_job(file, set_ or ())
    if code is not None:
        spec = with_code(spec, code)
    if deadline is not None and spec.training.steps is None:
        raise BadInput(f"{file}: --deadline needs a number of steps: set training.steps")
    offline = any(given for given in (slots, slot, deadline, topology, price, compare))
    if offline and (on_mesh or best or free or layers):
        raise BadInput(
            "--slots, --slot, --deadline, --topology, --price and --compare plan without a mesh: leave them "
            "out, or --mesh, --best, --free and --layers"
        )
    if not offline and (why := answering(mesh)):
        if on_mesh or best or free or layers:
            raise BadInput(f"no mesh answers: {why}; without one, name slots with --slots")
        print_text(f"planned on slots of this machine's speed, as no mesh answers: {why}", error=True)
        offline = True
    asked_for = spec
    spec, model = _analysed(spec)
    if not offline:
        question = PlanBody(
            job=planned_job(asked_for),
            model=MeasuredModel.of(model),
            best=best,
            free=free,
            layers=range_of_layers(layers) if layers is not None else None,
        )
        made = ask_plan(mesh, question)
        if out is not None:
            replicas = [stage.replicas for stage in made.stages]
            keep(file, out, replicas=replicas, cuts=made.cuts, model=made.model, overrides=set_ or ())
        if mesh.json:
            print_json(made)
            return
        print_table(COLUMNS, [row_of(made)])
        for line in lines_of(made):
            print_text(line)
        return
    options = PlanOptions(price=price, steps=spec.training.steps, network=network)
    found = plans_without_a_mesh(
        spec, model, options, counts=counts, deadline=deadline, offers=offers, compare=compare
    )
    if out is not None:
        if len(found) != 1:
            raise BadInput(f"--out keeps one plan, and these are {len(found)}: give one number of slots")
        names = [layer.name for layer in model.layers]
        (only,) = found
        cuts = [names[first] for first, _ in only.answer.cuts[1:]]
        keep(
            file,
            out,
            replicas=only.answer.replicas,
            cuts=cuts,
            model=model_digest(model),
            overrides=set_ or (),
        )
    if mesh.json:
        print_json([_as_json(priced) for priced in found])
        return
    print_plans(found)


FEW = 3
"""So many plans are explained; of more there is the table."""


def print_plans(found: list[PricedPlan]) -> None:
    """Prints plans as a table, and a few of them with why they are so."""
    from dmsc.planning.plan_text import COLUMNS, other_line, row, stage_line

    print_table(
        COLUMNS,
        [
            row(each.slots, each.answer.replicas, each.answer.forecast, each.hours, each.price)
            for each in found
        ],
    )
    for priced in found if len(found) < FEW else ():
        print_text(priced.answer.reason)
        for stage, (first, last) in enumerate(priced.answer.cuts):
            print_text(stage_line(stage, f"layers {first}–{last - 1}", priced.answer.forecast))
        for other in priced.answer.alternatives:
            print_text(other_line(other))


def range_of(text: str) -> tuple[int, int]:
    """`8` or `1..64`.

    Raises:
        BadInput: it is neither.
    """
    from schemas.errors import BadInput

    first, dots, last = text.partition("..")
    try:
        least, most = int(first), int(last if dots else first)
    except ValueError:
        raise BadInput(f"--slots {text}: give a number or a range, e.g. 8 or 1..64") from None
    if not 1 <= least <= most <= 4096:
        raise BadInput(f"--slots {text}: give a range from 1 to at most 4096, the smaller number first")
    return least, most


def offer_of(text: str) -> SlotOffer:
    """`2` or `0.5:16`: a slot's speed and memory in GiB.

    Raises:
        BadInput: it is neither.
    """
    from dmsc.planning.local_plans import SlotOffer
    from schemas.errors import BadInput

    speed, _, memory = text.partition(":")
    try:
        offer = SlotOffer(1, float(speed), int(float(memory or 0) * 2**30))
    except ValueError:
        raise BadInput(f"--slot {text}: give SPEED or SPEED:GIB, e.g. 2 or 0.5:16") from None
    if not (0 < offer.speed < 1e6 and 0 <= offer.memory_bytes < 2**60):
        raise BadInput(f"--slot {text}: give a speed above 0, and GiB of memory")
    return offer


def _analysed(spec: JobSpec) -> tuple[JobSpec, ModelTopology]:
    """The job as its layers were measured, and these."""
    from dmsc.authoring.local_check import check_job, without_auto

    spec = without_auto(spec)
    for name, report in check_job(spec):
        if name == "topology" and report.topology is not None:
            return spec, report.topology
    raise AssertionError("a check that ends has a topology, or raised")


def _as_json(priced: PricedPlan) -> dict[str, Any]:
    answer = asdict(priced.answer)
    answer["forecast"]["bubble"] = priced.answer.forecast.bubble
    return {"slots": priced.slots, "hours": priced.hours, "price": priced.price, **answer}
