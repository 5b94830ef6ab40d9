"""How much memory an instance of a stage needs, from the analysis and the job file. Pure (draft §4.5(3)).

Bytes of what training itself keeps. The allocator, the libraries and Python take more; `OVERHEAD` allows for
that where a fitting value is looked for. A job is refused only for what is certain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from schemas.cluster import NodeStatus
from schemas.job import JobSpec
from schemas.plain_text import shown
from schemas.services.serve_spec import ServeSpec
from schemas.task_graph import LayerProfile

SUM_BYTES = {True: 8, False: 4}
"""Bytes per trained parameter of a gradient sum: int64 with exact accumulation, else fp32."""
EXCHANGE_BYTES = {True: 10, False: 4}
"""Bytes per trained parameter of what replicas exchange: packed parts of the sum in, out and at work; else a
copy."""
GRADIENT_BYTES = {False: 4, True: 6}
"""Bytes per trained parameter of its gradient in fp32, and beside it that in half precision."""
INT8_BYTES = 1
"""Bytes of a frozen weight that is kept as int8."""
MOMENT_BYTES = 8
"""Bytes per trained parameter of AdamW's two moments."""
OVERHEAD = 1.1
"""What an allocator needs beyond what was asked of it, at most, in the long run."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one instance by what they are for."""

    weights: int = 0
    optimizer: int = 0
    sums: int = 0
    """The sum of the step's gradients, and the copy that is reduced with other replicas."""
    gradients: int = 0
    """The gradients of the microbatch at hand; after the last one, the mean gradient."""
    activations: int = 0
    """What autograd keeps of the `in_flight` microbatches."""
    boundary: int = 0
    """Tensors from and to other stages, until the step is stable: in host memory."""
    cache: int = 0
    """Keys and values of the sessions of a service."""
    copies: int = 0
    """A state on its way to a checkpoint or peer, and the states kept for other stages: in host memory."""
    in_flight: int = 1

    @property
    def state(self) -> int:
        """What is there whatever the microbatches are."""
        return self.weights + self.optimizer + self.sums + self.gradients + self.cache

    @property
    def least(self) -> int:
        """What is certainly needed on its device: the state, and one microbatch."""
        return self.state + self.activations // self.in_flight

    @property
    def total(self) -> int:
        """All of it, where the device's memory is the host's."""
        return int((self.state + self.activations + self.boundary + self.copies) * OVERHEAD)

    def parts(self) -> str:
        """For people, largest first: `activations 1.2 GiB, sums 800 MiB`."""
        named = [(getattr(self, part.name), part.name) for part in fields(self) if part.name != "in_flight"]
        return ", ".join(f"{name} {shown(size)}" for size, name in sorted(named, reverse=True) if size)


def estimate_stage(
    layers: Sequence[LayerProfile],
    spec: JobSpec,
    *,
    in_flight: int,
    replicas: int = 1,
    optimizer_bytes_per_parameter: float = MOMENT_BYTES,
    copied_state_bytes: int = 0,
) -> MemoryEstimate:
    """The memory of one instance of a stage.

    Args:
        layers: The stage's layers, as analysed: with the activations of one microbatch.
        spec: The job.
        in_flight: Microbatches that it may hold at once (`entities.planner.windows.in_flight`).
        replicas: Of the stage: a single one exchanges nothing of its sum.
        optimizer_bytes_per_parameter: State of the optimizer for each trained parameter: 8 for AdamW, 0 for
            plain SGD, 4 more for an fp32 master.
        copied_state_bytes: State of another stage that it keeps (`parallel.copies`).
    """
    again, again_bytes = _used_again(layers)
    trained = sum(layer.parameters - layer.frozen for layer in layers) - again
    weights = sum(layer.parameter_bytes for layer in layers) - again_bytes
    if spec.serve is not None:
        return _serving(layers, spec.serve, weights)
    optimizer = int(trained * optimizer_bytes_per_parameter)
    exact = spec.training.exact_accumulation
    exchanged = EXCHANGE_BYTES[exact] if replicas > 1 else 0
    return MemoryEstimate(
        weights=weights,
        optimizer=optimizer,
        sums=trained * (SUM_BYTES[exact] + exchanged),
        gradients=(trained + again) * GRADIENT_BYTES[spec.model.dtype in ("bfloat16", "float16")],
        activations=sum(layer.activation_bytes for layer in layers) * in_flight,
        boundary=2 * (layers[-1].output_bytes if layers else 0) * min(in_flight, spec.training.microbatches),
        copies=weights + optimizer + copied_state_bytes,
        in_flight=max(1, in_flight),
    )


WIDEST = 8
"""A layer's widest values in a pass, of its output's bytes: a gated perceptron has three of four widths."""


def _serving(layers: Sequence[LayerProfile], serve: ServeSpec, weights: int) -> MemoryEstimate:
    """No gradients and no optimizer: weights, keys and values, one wave at work, and its boundary rows."""
    output = max((layer.output_bytes for layer in layers), default=0)
    chunks = -(-serve.wave_tokens // serve.chunk_tokens)  # an analysed sample has the tokens of one
    return MemoryEstimate(
        weights=weights,
        cache=serve.cache_mib << 20,
        activations=WIDEST * output * chunks,
        boundary=2 * (layers[-1].output_bytes if layers else 0) * chunks,
    )


def recomputed(layers: Iterable[LayerProfile]) -> tuple[int, int]:
    """Bytes of a microbatch if each layer that can is computed again in the backward pass.

    Returns:
        What stays between the passes, and what the layer at hand has beside it at most.
    """
    kept = largest = 0
    for layer in layers:
        if 0 < layer.input_bytes < layer.activation_bytes:
            kept, largest = kept + layer.input_bytes, max(largest, layer.activation_bytes)
        else:
            kept += layer.activation_bytes
    return kept, largest


def _used_again(layers: Sequence[LayerProfile]) -> tuple[int, int]:
    """Trained parameters that an earlier one of these layers has already (of each use there is a gradient),
    and their bytes."""
    found: set[str] = set()
    again = again_bytes = 0
    for layer in layers:
        own = sum(size for name, size in layer.shared.items() if name in found)
        again += own
        again_bytes += own * layer.parameter_bytes // max(1, layer.parameters)
        found |= layer.shared.keys()
    return again, again_bytes


def largest_room(nodes: Iterable[NodeStatus]) -> int:
    """The memory of these nodes' largest device, with all of its slots; 0: that of some device is unknown."""
    room: dict[tuple[str, str], int] = {}
    for node in nodes:
        for slot in node.slots:
            if not slot.memory_bytes:
                return 0
            room[node.sid, slot.device] = room.get((node.sid, slot.device), 0) + slot.memory_bytes
    return max(room.values(), default=0)


def refusal(
    stage: int, estimate: MemoryEstimate, room_bytes: int, layers: Sequence[LayerProfile], spec: JobSpec
) -> str:
    """One line that says why a stage fits nowhere and what to change; empty: it may fit.

    Args:
        stage: Its number.
        estimate: Of one of its instances.
        room_bytes: See `largest_room`; 0 refuses nothing.
        layers: Its layers: it can't be cut into more stages than that.
        spec: The job.
    """
    if not room_bytes or estimate.least <= room_bytes:
        return ""
    return (
        f"stage {stage} needs at least {shown(estimate.least)} ({estimate.parts()}), but the largest device "
        f"has {shown(room_bytes)}: {'; or '.join(_remedies(estimate, room_bytes, layers, spec))}"
    )


def _remedies(
    estimate: MemoryEstimate, room_bytes: int, layers: Sequence[LayerProfile], spec: JobSpec
) -> list[str]:
    """What would make an instance fit: each is enough by itself, as far as the estimate says so."""
    if spec.serve is not None:
        return _serving_remedies(estimate, room_bytes, layers, spec)
    found: list[str] = []
    samples, stages = spec.training.microbatch_samples, spec.parallel.stages
    free = room_bytes / OVERHEAD - estimate.state
    if free > 0 and (fitting := int(samples * free / max(1, estimate.activations))) >= 1:
        found.append(f"set training.microbatch_samples to {fitting}, with more microbatches")
    factor = -(-estimate.total // room_bytes)
    if factor <= len(layers):
        found.append(f"set parallel.stages to {stages * factor}")
    is_fp32 = spec.training.precision == "fp32" and spec.model.dtype in (None, "float32")
    if free > 0 and is_fp32 and estimate.activations / 2 <= free:
        found.append("set training.precision to bf16, which halves the activations")
    kept, largest = recomputed(layers)
    is_kept = not spec.training.recompute and "recompute" not in spec.training.auto
    if is_kept and kept * estimate.in_flight + largest <= free:
        found.append(
            "set training.recompute to auto, which keeps what layers read instead of all they compute"
        )
    frozen = sum(layer.frozen * layer.parameter_bytes // max(1, layer.parameters) for layer in layers)
    spared = 2 * OVERHEAD * frozen * (4 - INT8_BYTES) // 4  # the weights, and their copy
    if spec.model.quantize is None and is_fp32 and spared and estimate.total - spared <= room_bytes:
        found.append("set model.quantize to int8, which keeps frozen weights of linear layers in a quarter")
    return found or [f"join a node with {shown(estimate.total)}, or make its largest layer several"]


def _serving_remedies(
    estimate: MemoryEstimate, room_bytes: int, layers: Sequence[LayerProfile], spec: JobSpec
) -> list[str]:
    found = []
    if (cache := (room_bytes - estimate.least + estimate.cache) >> 20) >= 1:
        found.append(f"lower serve.cache_mib to {cache}")
    if (factor := -(-(estimate.least - estimate.cache) // room_bytes)) <= len(layers):
        found.append(f"set parallel.stages to {spec.parallel.stages * max(2, factor)}")
    return found or [f"join a node with {shown(estimate.total)}"]
