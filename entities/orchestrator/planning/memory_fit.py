"""What a job leaves to memory, fixed before step 0: the samples of a microbatch, and what is computed again.

Pure. Both follow from the analysis of one small microbatch, the memory estimate of each stage, and the
smallest slot that the job may get: so an instance may move to any of them later. The values become part of
the job: whoever goes on with it, on whatever nodes, computes the same.
"""

from __future__ import annotations

import glob
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from entities.orchestrator.planning.segmentation import segment
from entities.planner.windows import in_flight
from schemas.cluster import NodeStatus
from schemas.job import JobSpec
from schemas.job_file.training import samples_that_divide
from schemas.memory_estimate import estimate_stage
from schemas.plain_text import shown
from schemas.task_graph import LayerProfile, ModelTopology

UNKNOWN_SAMPLES = 4
"""Of a microbatch, at most, where the memory of some slot is not known; the default of a job file."""
MOST_PATTERNS = 256


@dataclass(frozen=True)
class _Need:
    """Bytes of the stage that needs most."""

    bytes: int
    stage: int


class _Stages:
    """The stages of a job as they will be cut, and their memory."""

    def __init__(self, spec: JobSpec, topology: ModelTopology) -> None:
        self._spec, self._topology = spec, topology
        self._replicas = spec.parallel.replicas_per_stage()
        self._standbys = spec.parallel.standbys_per_stage()
        self.cuts = segment(
            topology.layers, self._replicas, tied=topology.tied, method=spec.parallel.segmentation
        )

    @property
    def busy(self) -> int:
        """Microbatches of a step that keep all instances at work: what the first stage may hold at once."""
        return max(in_flight(self._replicas, stage) * count for stage, count in enumerate(self._replicas))

    def needs(self, samples: int, again: Collection[int] = ()) -> list[int]:
        """Bytes of an instance of each stage, with microbatches of so many samples.

        Args:
            samples: Of a microbatch.
            again: Layers whose activations are computed again: one of them has all of its own at a time.
        """
        training = self._spec.training
        factor = samples / training.microbatch_samples
        count = (training.step_samples or training.microbatches * training.microbatch_samples) // samples
        spec = _with(self._spec, microbatch_samples=samples, microbatches=count)
        found = []
        for stage, (first, last) in enumerate(self.cuts):
            layers = [
                _scaled(layer, factor, layer.index in again) for layer in self._topology.layers[first:last]
            ]
            estimate = estimate_stage(
                layers,
                spec,
                in_flight=min(count, in_flight(self._replicas, stage)),
                replicas=self._replicas[stage] + self._standbys[stage],
                optimizer_bytes_per_parameter=self._topology.optimizer_bytes,
            )
            whole = [
                layer.activation_bytes for layer in self._topology.layers[first:last] if layer.index in again
            ]
            found.append(estimate.total + int(max(whole, default=0) * factor))
        return found

    def most(self, samples: int, again: Collection[int] = ()) -> _Need:
        needs = self.needs(samples, again)
        stage = max(range(len(needs)), key=needs.__getitem__)
        return _Need(needs[stage], stage)


def fixed_by_memory(
    spec: JobSpec, topology: ModelTopology, nodes: Iterable[NodeStatus]
) -> tuple[JobSpec, str]:
    """The job with a value for each `auto` of its training, and why these.

    Args:
        spec: The job; what says `auto` is in `training.auto`.
        topology: Analysed with the least microbatch, and nothing computed again.
        nodes: Of the mesh; those of the job's clusters count.

    Raises:
        BadJob: The model can't be cut as asked.
    """
    stages = _Stages(spec, topology)
    clusters = spec.parallel.clusters
    room = smallest_slot(node for node in nodes if not clusters or node.cluster in clusters)
    training, reasons = spec.training, []
    samples = training.microbatch_samples
    changes: dict[str, Any] = {"auto": ()}
    if "microbatch_samples" in training.auto:
        samples, reason = _samples(training.step_samples or samples, stages, room)
        changes |= {
            "microbatch_samples": samples,
            "microbatches": (training.step_samples or samples) // samples,
        }
        reasons.append(reason)
    if "recompute" in training.auto:
        changes["recompute"], reason = _recomputed(topology.layers, stages, samples, room)
        reasons.append(reason)
    return _with(spec, **changes), "; ".join(reasons)


def smallest_slot(nodes: Iterable[NodeStatus]) -> int:
    """The memory of the smallest slot, bytes; 0: that of some slot is not known."""
    return min((slot.memory_bytes for node in nodes for slot in node.slots), default=0)


def _samples(step_samples: int, stages: _Stages, room: int) -> tuple[int, str]:
    choices = samples_that_divide(step_samples)
    busy = [samples for samples in choices if step_samples // samples >= stages.busy] or choices[:1]
    if not room:
        samples = max([choice for choice in busy if choice <= UNKNOWN_SAMPLES], default=busy[0])
        return samples, _chosen(samples, step_samples, "the memory of some slot is not known")
    fitting = [samples for samples in busy if stages.most(samples).bytes <= room]
    samples = fitting[-1] if fitting else busy[0]
    need = stages.most(samples)
    text = f"stage {need.stage} needs {shown(need.bytes)}, the smallest slot has {shown(room)}"
    if fitting and samples < choices[-1]:
        more = stages.most(2 * samples)
        text += (
            f"; {2 * samples} would need {shown(more.bytes)}"
            if more.bytes > room
            else f"; {2 * samples} would be too few microbatches to keep all instances busy"
        )
    return samples, _chosen(samples, step_samples, text)


def _chosen(samples: int, step_samples: int, because: str) -> str:
    return f"microbatch_samples {samples}, so {step_samples // samples} microbatches: {because}"


def _recomputed(
    layers: Sequence[LayerProfile], stages: _Stages, samples: int, room: int
) -> tuple[tuple[str, ...], str]:
    """Patterns of the layers that are computed again; those first that free most for the time they take."""
    if not room:
        return (), "recompute none: the memory of some slot is not known"
    need = stages.most(samples)
    if need.bytes <= room:
        return (), f"recompute none: stage {need.stage} needs {shown(need.bytes)} of {shown(room)}"
    again: set[int] = set()
    for stage, (first, last) in enumerate(stages.cuts):
        able = [layer for layer in layers[first:last] if 0 < layer.input_bytes < layer.activation_bytes]
        for layer in sorted(able, key=_gain, reverse=True):
            if stages.needs(samples, again)[stage] <= room:
                break
            again.add(layer.index)
    names = tuple(glob.escape(layer.name) for layer in layers if layer.index in again)
    text = f"recompute {len(names)} of {len(layers)} layers: kept, stage {need.stage} would need "
    text += f"{shown(need.bytes)} of {shown(room)}"
    left = stages.most(samples, again)
    text += f", so {shown(left.bytes)}" if left.bytes <= room else f", and so still {shown(left.bytes)}"
    return names if len(names) <= MOST_PATTERNS else ("*",), text


def _gain(layer: LayerProfile) -> float:
    return (layer.activation_bytes - layer.input_bytes) / max(layer.forward_ms, 1e-6)


def _scaled(layer: LayerProfile, factor: float, again: bool) -> LayerProfile:
    kept = layer.input_bytes if again else layer.activation_bytes
    return layer.model_copy(
        update={
            "activation_bytes": int(kept * factor),
            "output_bytes": int(layer.output_bytes * factor),
        }
    )


def _with(spec: JobSpec, **training: Any) -> JobSpec:
    return spec.model_copy(update={"training": spec.training.model_copy(update=training)})


def fewer_slots(nodes: Iterable[NodeStatus], need_bytes: int) -> str:
    """The remedy where a device has the memory that an instance needs, but shares it among too many slots.

    Args:
        nodes: the nodes that a job may use.
        need_bytes: of one instance; 0: there is nothing to remedy.

    Returns:
        One clause that names the node, and the slots with which each of them has enough; empty: no device is
        large enough, or slots have enough already.
    """
    best_bytes, remedy = 0, ""
    for node in sorted(nodes, key=lambda node: node.sid):
        sharing: defaultdict[str, list[int]] = defaultdict(list)
        for slot in node.slots:
            sharing[slot.device].append(slot.memory_bytes)
        memory_bytes, sharers = max(((sum(each), len(each)) for each in sharing.values()), default=(0, 0))
        enough = any(slot.memory_bytes >= need_bytes or slot.emulated for slot in node.slots)
        count = min(memory_bytes // need_bytes, sharers - 1) if need_bytes and not enough else 0
        if count < 1 or memory_bytes <= best_bytes:
            continue
        best_bytes = memory_bytes
        remedy = (
            f"have fewer slots share the memory of {node.sid}: with `dmsc join --slots "
            f"{count * len(sharing)}` there each has {shown(memory_bytes // count)}"
        )
    return remedy
