"""What a plan makes of a job's graph, who sends which layers to whom, and why a plan is refused. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from entities.orchestrator.membership.best_cut import StageSpeeds
from entities.orchestrator.planning.kept_apart import owners_constraints, unfit_for
from entities.orchestrator.planning.plan_rules import kept_edges, rules_of
from entities.orchestrator.planning.segmentation import cut_edges
from entities.orchestrator.planning.task_graph import stage_memory, tied_stages
from entities.planner.layer_rules import with_rules
from entities.planner.plan_request import LayerRule, NoPlan, PlanLayer, PlanRequest
from schemas.cluster import NodeStatus
from schemas.errors import BadInput, BadJob, Conflict
from schemas.job import JobSpec
from schemas.memory_estimate import GRADIENT_BYTES, MOMENT_BYTES, SUM_BYTES
from schemas.plain_text import shown
from schemas.recut import Cuts, LayerRange, RecutAnswer, RecutJob, cuts_text
from schemas.step import Member
from schemas.task_graph import ModelTopology, PlanForecast, TaskGraph, UnitKind

BY_RECUT = "re-cut of a running job"


def check_cuts(cuts: Cuts, graph: TaskGraph) -> None:
    """Raises `BadInput` in one line if these are no cuts of the job's layers into its stages."""
    count, stages = graph.layer_count, len(graph.cuts)
    ends_at = max(last for _, last in cuts) if cuts else 0
    if ends_at > count:
        raise BadInput(
            f"the plan is of another model: it has layer {ends_at - 1}, and this model's layers are 0 to "
            f"{count - 1}"
        )
    expected = 0
    for stage, (first, last) in enumerate(cuts):
        if first >= last:
            raise BadInput(f"stage {stage} of the plan has no layer: give each stage one at least")
        if first > expected:
            raise BadInput(f"the plan leaves layer {expected} out: stage {stage} begins with layer {first}")
        if first < expected:
            raise BadInput(
                f"the plan has layer {first} twice: stage {stage} begins with it, and the stages before end "
                f"with layer {expected - 1}"
            )
        expected = last
    if expected < count:
        raise BadInput(f"the plan leaves layer {expected} out: the model's layers are 0 to {count - 1}")
    if len(cuts) != stages:
        raise BadInput(
            f"the plan has {len(cuts)} stages, and the job runs in {stages}: give {stages}, or `dmsc park` "
            "it and `dmsc resume --stages` it"
        )
    if cuts == graph.cuts:
        raise BadInput(f"the job is cut so already: {cuts_text(cuts)} (plan {graph.revision})")


@dataclass(frozen=True)
class LayerCosts:
    """A job's layers as the planner sees them: work at speed 1, edges, and what its owner says of them."""

    work_ms: tuple[float, ...]
    edges: tuple[int, ...]
    rules: tuple[LayerRule, ...]


def layer_costs(spec: JobSpec, topology: ModelTopology, stages: int) -> LayerCosts:
    """What is known of the layers.

    Raises:
        BadInput: the job says how it is cut.
    """
    try:
        edges = cut_edges(topology.layers, stages, tied=topology.tied)
        edges = kept_edges(spec, topology, edges, stages)
        rules = rules_of(spec, topology)
        bare = PlanRequest(
            layers=tuple(PlanLayer(layer.name, 0.0, 0.0, 0.0, 0.0, 0.0) for layer in topology.layers),
            slots=(),
            clusters=(),
            microbatches=spec.training.microbatches,
            stages=stages,
            edges=edges,
        )
        edges = with_rules(bare, rules).edges
    except (BadJob, NoPlan) as refused:
        raise BadInput(str(refused)) from None
    measured_at = topology.speed.get("stage", 1.0)
    work = tuple((layer.forward_ms + layer.backward_ms) * measured_at for layer in topology.layers)
    return LayerCosts(work, edges or tuple(range(len(work) + 1)), tuple(rules))


def check_edges(cuts: Cuts, spec: JobSpec, topology: ModelTopology, edges: Sequence[int]) -> None:
    """Raises `BadInput` if the job or its model forbids one of the cuts."""
    for stage, (first, _) in enumerate(cuts):
        if first in edges:
            continue
        name = topology.layers[first].name
        if spec.plan.cuts is not None:
            raise BadInput(
                f"the job's section plan keeps its cuts (plan.cuts), so it is not cut before {name}"
            )
        raise BadInput(
            f"stage {stage} can't begin with layer {first} ({name}): it changes in place what another layer "
            "made, or the job's section plan forbids it"
        )


def recut_graph(
    graph: TaskGraph,
    spec: JobSpec,
    topology: ModelTopology,
    cuts: Cuts,
    rules: Iterable[LayerRule],
    revision: int,
) -> TaskGraph:
    """The job's graph with these cuts: the same instances in the same slots, with other layers."""
    rules = tuple(rules)
    pins = [rule for rule in rules if rule.kind == "pin" and rule.hard]
    standbys = [sum(unit.standby for unit in graph.stage(stage)) for stage in range(len(cuts))]
    working = [len(graph.stage(stage)) - standbys[stage] for stage in range(len(cuts))]
    units = []
    for unit in graph.units:
        if unit.kind is not UnitKind.STAGE:
            units.append(unit)
            continue
        first, last = cuts[unit.stage]
        layers = topology.layers[first:last]
        memory = stage_memory(spec, topology, (first, last), unit.stage, working, standbys)
        labels = {rule.label for rule in pins if not set(rule.layers).isdisjoint(range(first, last))}
        needs = unit.requirements.model_copy(
            update={
                "memory_bytes": memory.state + memory.activations,
                "cost_ms": sum(layer.forward_ms + layer.backward_ms for layer in layers),
                "measured_speed": topology.speed.get("stage", 1.0),
                "labels": tuple(sorted(labels)),
            }
        )
        units.append(
            unit.model_copy(
                update={
                    "first_layer": first,
                    "last_layer": last,
                    "input_schema": topology.layers[first - 1].output if first else (),
                    "output_schema": layers[-1].output,
                    "requirements": needs,
                }
            )
        )
    edges = tuple(
        edge
        if edge.downstream < 1
        else edge.model_copy(
            update={"bytes_per_microbatch": topology.layers[cuts[edge.downstream][0] - 1].output_bytes}
        )
        for edge in graph.edges
    )
    kept = [constraint for constraint in graph.constraints if not constraint.stages]
    return graph.model_copy(
        update={
            "revision": revision,
            "units": tuple(units),
            "edges": edges,
            "constraints": (*kept, *owners_constraints(rules, cuts, units)),
            "tied_stages": tied_stages(topology.shared, cuts),
            "reason": f"cut anew: {cuts_text(cuts)}",
        }
    )


def with_forecast(graph: TaskGraph, speeds: StageSpeeds) -> TaskGraph:
    """The graph with what a step of it is expected to take."""
    cuts, before = graph.cuts, graph.forecast
    times, fill = speeds.stage_ms(cuts), speeds.fill_ms(cuts)
    forecast = PlanForecast(
        step_ms=max(times) + fill + speeds.rest_ms,
        bottleneck_ms=max(times),
        fill_ms=fill,
        reduction_ms=0.0 if before is None else before.reduction_ms,
        constant_ms=speeds.rest_ms,
        stage_ms=times,
        memory_bytes=tuple(graph.stage(stage)[0].requirements.memory_bytes for stage in range(len(cuts))),
        planned_by=BY_RECUT,
    )
    return graph.model_copy(update={"forecast": forecast})


@dataclass(slots=True)
class Transfers:
    """What one member takes and gives."""

    takes: list[LayerRange] = field(default_factory=list)
    gives: list[LayerRange] = field(default_factory=list)


def transfers(stages: Sequence[Sequence[Member]], before: Cuts, cuts: Cuts) -> dict[Member, Transfers]:
    """Who sends which layers to whom: each replica of a stage takes from another one of the stage that has
    them, as far as there are so many."""
    found = {member: Transfers() for members in stages for member in members}
    for stage, members in enumerate(stages):
        first, last = cuts[stage]
        for source, (owned_first, owned_last) in enumerate(before):
            begin, end = max(first, owned_first), min(last, owned_last)
            if source == stage or begin >= end:
                continue
            for place, member in enumerate(members):
                giver = stages[source][place % len(stages[source])]
                layers = {"first_layer": begin, "last_layer": end}
                found[member].takes.append(LayerRange(peer=giver, **layers))
                found[giver].gives.append(LayerRange(peer=member, **layers))
    return found


def moved_bytes(topology: ModelTopology, before: Cuts, cuts: Cuts, replicas: Sequence[int]) -> int:
    """Bytes of weights and optimizer state that go over links, as analysed."""
    return sum(
        _state_bytes(topology, layer) * replicas[stage]
        for stage, (first, last) in enumerate(cuts)
        for layer in range(first, last)
        if not before[stage][0] <= layer < before[stage][1]
    )


def _state_bytes(topology: ModelTopology, layer: int) -> int:
    profile = topology.layers[layer]
    return profile.parameter_bytes + int((profile.parameters - profile.frozen) * topology.optimizer_bytes)


def _trained(topology: ModelTopology, layer: int) -> int:
    return topology.layers[layer].parameters - topology.layers[layer].frozen


def check_room(
    graph: TaskGraph,
    recut: TaskGraph,
    spec: JobSpec,
    topology: ModelTopology,
    node_of: Mapping[str, NodeStatus],
) -> None:
    """Raises `Conflict` if an instance lacks the memory for it, or its place a label.

    Until the switch an instance has its present stage and what it takes. The stage that it will be shares the
    weights and AdamW's moments of both, and has sums of its own; with another optimizer, or quantized, it has
    all of its state beside them.

    Args:
        graph: the present graph.
        recut: that of the plan.
        spec: the job.
        topology: its model.
        node_of: the node of each instance, by its SID.
    """
    stages = range(len(graph.cuts))
    standbys = [sum(unit.standby for unit in graph.stage(stage)) for stage in stages]
    working = [len(graph.stage(stage)) - standbys[stage] for stage in stages]
    sum_bytes = SUM_BYTES[spec.training.exact_accumulation]
    # each range that it takes is a stage of its own until the switch: with sums, and gradients of a redo
    work_bytes = sum_bytes + GRADIENT_BYTES[False]
    own_bytes = sum_bytes + max(0, topology.optimizer_bytes - MOMENT_BYTES)  # masters, averages
    optimizer = spec.training.optimizer
    shares = optimizer.is_adamw and not spec.model.quantize
    shares = shares and all(group.name in (None, "adamw") and not group.factory for group in optimizer.groups)
    for unit in recut.units:
        node = node_of.get(unit.sid)
        if unit.kind is not UnitKind.STAGE or node is None:
            continue
        own = graph.unit(unit.sid)
        now, then = (
            stage_memory(spec, topology, (each.first_layer, each.last_layer), each.stage, working, standbys)
            for each in (own, unit)
        )
        taken = sum(
            _state_bytes(topology, layer) + _trained(topology, layer) * work_bytes
            for layer in range(unit.first_layer, unit.last_layer)
            if not own.first_layer <= layer < own.last_layer
        )
        trained = sum(_trained(topology, layer) for layer in range(unit.first_layer, unit.last_layer))
        built = int(trained * own_bytes) if shares else then.state
        needs = max(now.state + taken + built, then.state) + max(now.activations, then.activations)
        where = graph.placement(unit.sid)
        slot = node.slot(where.slot)
        if slot is not None and 0 < slot.memory_bytes < needs:
            raise Conflict(
                f"{unit.sid} on {where.node} lacks {shown(needs - slot.memory_bytes)} of memory: with the "
                f"layers that it takes it needs {shown(needs)}, and its slot has {shown(slot.memory_bytes)}"
            )
        if why := unfit_for(recut, unit.stage, unit.sid, node):
            raise Conflict(f"{unit.sid} can't have these layers: {why}")


@dataclass(frozen=True, slots=True)
class InstancePace:
    """What a microbatch takes an instance now, in milliseconds (0: not measured), and its slot's speed."""

    microbatch_ms: float
    slot_speed: float


@dataclass(frozen=True, kw_only=True)
class RecutQuestion:
    """How a running job would be cut, and what would come of it.

    `cuts`: None: as is best. `plan`: the revision that it would be. `paces`: of the working instances, by
    stage. `step_ms`: what a step takes now; None: not measured. `node_of`: by SID.
    """

    job: str
    graph: TaskGraph
    spec: JobSpec
    topology: ModelTopology
    cuts: Cuts | None
    plan: int
    paces: Sequence[Sequence[InstancePace]]
    step_ms: float | None
    node_of: Mapping[str, NodeStatus]

    def speeds(self, work_ms: Sequence[float]) -> StageSpeeds:
        """The speed that each instance shows; of one that has shown nothing, that of its slot."""
        stages = []
        for (first, last), paces in zip(self.graph.cuts, self.paces, strict=True):
            work = sum(work_ms[first:last])
            stages.append(
                [
                    work / pace.microbatch_ms if pace.microbatch_ms and work else pace.slot_speed
                    for pace in paces
                ]
                or [1.0]
            )
        microbatches = self.spec.training.microbatches
        bare = StageSpeeds(work_ms=work_ms, stages=stages, microbatches=microbatches)
        rest = 0.0 if self.step_ms is None else max(0.0, self.step_ms - bare.step_ms(self.graph.cuts))
        return StageSpeeds(work_ms=work_ms, stages=stages, microbatches=microbatches, rest_ms=rest)


@dataclass(frozen=True, kw_only=True)
class RecutProposal:
    """A plan that could be made of the graph `before`: the graph by it, and the answer to a dry run."""

    before: TaskGraph
    graph: TaskGraph
    answer: RecutAnswer

    def answer_to(self, message: RecutJob) -> RecutAnswer:
        """The answer to this request."""
        if message.dry_run:
            return self.answer
        note = self.answer.note.replace(" would be cut ", " is being cut ", 1)
        return self.answer.model_copy(update={"note": note})


def recut_proposal(question: RecutQuestion) -> RecutProposal:
    """What becomes of the job by these cuts, or by the best ones.

    Raises:
        BadInput: the plan is none for this job; the text says where.
        Conflict: an instance lacks the memory for it, or no cut is better; the text says which.
    """
    graph, spec, topology = question.graph, question.spec, question.topology
    costs = layer_costs(spec, topology, len(graph.cuts))
    speeds, cuts = question.speeds(costs.work_ms), question.cuts
    if cuts is None:
        cuts = speeds.best(costs.edges)
        if cuts is None or speeds.step_ms(cuts) >= speeds.step_ms(graph.cuts):
            raise Conflict(
                f"no cut is better than the present one, {cuts_text(graph.cuts)}: by what stages take now a "
                f"step is {speeds.step_ms(graph.cuts):.0f} ms"
            )
    check_cuts(cuts, graph)
    check_edges(cuts, spec, topology, costs.edges)
    new = with_forecast(recut_graph(graph, spec, topology, cuts, costs.rules, question.plan), speeds)
    check_room(graph, new, spec, topology, question.node_of)
    step_ms = speeds.step_ms(graph.cuts), speeds.step_ms(cuts)
    moved = moved_bytes(topology, graph.cuts, cuts, [len(graph.stage(stage)) for stage in range(len(cuts))])
    answer = RecutAnswer(
        job=question.job,
        plan=new.revision,
        before=graph.cuts,
        cuts=cuts,
        moved_bytes=moved,
        step_ms=step_ms,
        note=f"{cuts_text(graph.cuts)} would be cut into {cuts_text(cuts)} (plan {new.revision}): a step of "
        f"{step_ms[0]:.0f} ms is expected to take {step_ms[1]:.0f} ms; {moved / 1e6:.1f} MB move",
    )
    return RecutProposal(before=graph, graph=new, answer=answer)
