"""A job's first steps in one process, without a mesh: the stages' own computation, one after the other.

Stages, exact sums, clip and optimizer are those of the instances (`workers.compute.stage_compute`), so that
losses and bits are those of a mesh.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from schemas.cluster import InstanceStart
from schemas.gradient_scale import gradient_scale
from schemas.job import JobSpec
from schemas.registry import TensorSchema
from schemas.step import Member, StepCommit, TiedStage
from schemas.task_graph import TaskUnit, UnitKind
from schemas.weights_digest import weights_sha256
from workers.compute.stage_compute import StageCompute
from workers.data.batches import Batch
from workers.state.safetensors_files import describe_tensor
from workers.state.weights import weight_tensors
from workers.transaction.microbatch import Hop

Cut = Sequence[tuple[int, int]]
"""(first, last) layer of each stage, `last` exclusive."""
BatchOf = Callable[[int, int], Batch]
"""From step and microbatch to the batch."""

AT_ONCE = 2
"""Microbatches in a stage between forward and backward pass, as in a mesh: one must not spoil the other."""

_SELF = Member(sid="check", incarnation="local")


class LocalSteps:
    """A job, cut into stages, all of them here. `travels`: what model and loss take of a batch.

    Raises:
        BadModel: the model can't be built or cut like this.
    """

    def __init__(self, spec: JobSpec, cut: Cut, travels: Sequence[TensorSchema], device: str = "cpu") -> None:
        self._spec = spec
        self._names = [tensor.name for tensor in travels]
        self._stages = [
            StageCompute(_start(spec, stage, cut, travels), torch.device(device)) for stage in range(len(cut))
        ]
        for stage in self._stages:
            stage.build()
        self._ranges = [
            TiedStage(stage=stage, first_layer=first, last_layer=last, receivers=())
            for stage, (first, last) in enumerate(cut)
        ]

    def step(self, number: int, batch_of: BatchOf) -> float:
        """Runs one whole step; returns the mean loss, by the microbatches' weights.

        Raises:
            GradientRefused: loss or gradient is not finite, or can't be summed exactly.
        """
        scored: list[tuple[float, float]] = []
        running: deque[list[Hop]] = deque()
        for microbatch in range(self._spec.training.microbatches):
            running.append(self._forward(number, microbatch, batch_of(number, microbatch)))
            if len(running) == AT_ONCE:
                scored.append(self._backward(running.popleft()))
        scored += map(self._backward, running)
        finished = [
            stage.finish_reduced(total) for stage, total in zip(self._stages, self._sums(), strict=True)
        ]
        squared_norms = (value for _, _, norms in finished for value in norms)
        weight = math.fsum(weight for _, weight in scored)
        norm, clip = gradient_scale(
            squared_norms, len(scored), weight, self._spec.training.clip_norm
        )  # the decision of the step's ledger
        overflowed = any(stage.scaling()[1] for stage in self._stages)
        for stage, (gradients, checksum, _) in zip(self._stages, finished, strict=True):
            order = StepCommit(
                job="check",
                epoch=1,
                step=number,
                attempt=0,
                generation=0,
                checksum=checksum,
                clip=clip,
                action="apply" if math.isfinite(norm) and not overflowed else "skip",
            )
            stage.apply(order, gradients)
        return math.fsum(loss for loss, _ in scored) / (weight or 1.0)

    def _sums(self) -> list[Tensor]:
        """A copy of each stage's sum, to which is added what other stages have of parameters they share."""
        sums = [stage.copy_sum()[1] for stage in self._stages]
        for stage, own in enumerate(self._stages):
            for other, neighbour in enumerate(self._stages):
                if other == stage:
                    continue
                parts = own.shared_with(self._ranges[other]), neighbour.shared_with(self._ranges[stage])
                for part, came in zip(*parts, strict=True):
                    sums[stage][part] += neighbour.sum.total[came]
        return sums

    def weights_sha256(self) -> str:
        """The digest of all weights, as the manifest of a job's weights has it."""
        lines: dict[str, str] = {}
        for stage in self._stages:
            lines |= {name: describe_tensor(tensor) for name, tensor in weight_tensors(stage.module).items()}
        return weights_sha256(lines)

    def _forward(self, step: int, microbatch: int, batch: Batch) -> list[Hop]:
        hops = [
            Hop(step=step, microbatch=microbatch, attempt=0, evaluate=False, upstream=_SELF)
            for _ in self._stages
        ]
        tensors = tuple(batch[name] for name in self._names)
        for stage, hop in zip(self._stages, hops, strict=True):
            hop.inputs = tensors
            stage.forward(hop)
            tensors = hop.sent_forward
        return hops

    def _backward(self, hops: list[Hop]) -> tuple[float, float]:
        """The microbatch's loss and its weight; the last stage's forward pass had its backward pass."""
        loss, weight = hops[-1].loss, hops[-1].weight
        for index in reversed(range(len(hops) - 1)):
            self._stages[index].backward(hops[index], hops[index + 1].sent_backward)
        assert loss is not None
        return loss, weight


def _start(spec: JobSpec, stage: int, cut: Cut, travels: Sequence[TensorSchema]) -> InstanceStart:
    first, last = cut[stage]
    return InstanceStart(
        job="check",
        epoch=1,
        spec=spec,
        unit=TaskUnit(
            sid=f"check-s{stage}-r0",
            kind=UnitKind.STAGE,
            stage=stage,
            replica=0,
            first_layer=first,
            last_layer=last,
        ),
        incarnation="local",
        slot=0,
        stages=len(cut),
        layer_count=cut[-1][1],
        code_digest="",
        batch=tuple(travels),
    )
