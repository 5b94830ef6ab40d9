"""The state that a stage's compute thread owns: the module, the optimizer, the gradient sum.

All methods run on that thread, one at a time. The thread that sums also keeps the set of summed microbatches
(DESIGN §5 rule 5), so that a vote can't name one that is not in the sum.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from schemas.cluster import InstanceStart
from schemas.errors import Conflict, GradientRefused
from schemas.learning_rate import learning_rate
from schemas.step import StepCommit, TiedStage
from workers.compute.batch_schema import empty_batch
from workers.compute.deferred_model import build_layers
from workers.compute.gradient_sum import GradientSum
from workers.compute.measured_loss import MeasuredLoss
from workers.compute.model import build, check_trained
from workers.compute.optimizer import StageOptimizer, load_state_tensors, named_weights, state_tensors
from workers.compute.running_statistics import RunningStatistics
from workers.compute.sum_in_parts import SumInParts
from workers.graph.recording import check_sizes
from workers.graph.stage_module import slice_stage
from workers.precision.loss_scale import LossScale
from workers.recipe.state_layout import State
from workers.recipe.user_schedule import user_schedule
from workers.transaction.microbatch import Hop

Finished = tuple[list[Tensor], str, tuple[float, ...]]
"""Mean gradients, the checksum of the sum, and each parameter's squared norm."""


class StageCompute:
    """Layers `unit.first_layer`..`unit.last_layer` of the job's model, and their training."""

    def __init__(self, start: InstanceStart, device: torch.device) -> None:
        self._start = start
        self._device = device
        self._first = start.unit.stage == 0
        self._last = start.unit.stage == start.stages - 1
        self.version = 0  # steps applied; changes together with the weights, on this thread
        self.state_bytes = 0  # size of the state sent to a newcomer; 0 until it is built

    def build(
        self,
        *,
        given: Callable[[str], bool] | None = None,
        shared: Sequence[StageCompute] = (),
        blank: bool = False,
    ) -> None:
        """Builds the stage's layers as the whole model's build from the job's seed makes them.

        Args:
            given: Of a full name: the caller fills that weight itself, so it is not initialised.
            shared: Stages of this process. The weights that they have, and AdamW's state of these, take no
                memory of their own here: whoever changes them changes them for all. Of several stages that
                have one, the first counts.
            blank: The caller loads all state before it is used.

        Raises:
            BadModel: The user's code fails, or trains parameters of a type that can't be trained.
        """
        unit, spec = self._start.unit, self._start.spec
        batch = empty_batch(self._start.batch, spec.training.microbatch_samples)
        if self._start.stages > 1 or (given is not None and spec.model.quantize):
            graph = build_layers(
                spec.model, spec.training.seed, batch, unit.first_layer, unit.last_layer, given=given
            )
        else:
            graph = build(spec.model, spec.training.seed, batch)
        loss = MeasuredLoss(spec, [*graph.outputs], [*batch], graph.inputs)
        self._graph = graph
        self._sizes = {tuple(tensor.shape for tensor in batch.values())}
        self.module = slice_stage(
            graph,
            unit.first_layer,
            unit.last_layer,
            job_seed=spec.training.seed,
            precision=spec.training.precision,
            needed=loss.outputs,
            recompute=spec.training.recompute,
            compiled=spec.training.compile,
        )
        self._batch_in = graph.batch_crossing(unit.first_layer, [*batch], loss.batch)
        self._batch_out = graph.batch_crossing(unit.last_layer, [*batch], loss.batch)
        self.module.train()
        check_trained(self.module.trainable(), scaled=spec.loss_scale is not None)
        states = self._share(shared)
        self.module.to(self._device)
        self.module.untie()
        self.loss = loss if self._last else None
        self.parameters = [weight for _, weight in self.module.trainable()]
        self._names = [name for name, _ in self.module.trainable()]
        self._users = {name: graph.users[name] for name in self._names}
        index = {id(weight): number for number, weight in enumerate(self.parameters)}
        self._twins = [(index[id(weight)], twin) for weight, twin in self.module.twins]
        training = spec.training
        self.optimizer = StageOptimizer(
            self.module,
            training.optimizer,
            ema=training.ema,
            loss_scale=spec.loss_scale,
            seed=training.seed,
            shared=states,
            blank=blank,
        )
        self.scales_loss = spec.loss_scale is not None
        self._overflowed: set[int] = set()
        self.own_schedule = user_schedule(training)
        self._statistics = RunningStatistics(self.module, spec.training.microbatches)
        self.sum = GradientSum(
            [*self.parameters, *self._statistics.buffers],
            exact=spec.training.exact_accumulation,
            microbatches=spec.training.microbatches,
            uses=max(map(len, graph.users.values()), default=1),
        )
        self._measure_state()

    def _share(self, stages: Sequence[StageCompute]) -> dict[str, State]:
        """Has weights in common with other stages; returns the state of AdamW that goes with them.

        Other optimizers may give a weight other memory at any step, so their weights are not shared.
        """
        states: dict[str, State] = {}
        if self._start.spec.model.quantize:  # its layers keep what they made of their weights
            return states
        own = self.module.by_name()
        for stage in reversed(stages):
            states |= {
                name: state for name, state in stage.optimizer.state.items() if stage.optimizer.is_fused(name)
            }
            for name, weight in stage.module.by_name().items():
                if name in own and (name in states or not weight.requires_grad):
                    own[name].data = weight.data
        return states

    def forward(self, hop: Hop) -> None:
        """Runs the layers. The last stage also computes the loss and, in training, the gradient.

        `hop.inputs` are the activations of the stage before, then what of the batch is needed from here on.
        Sets `outputs`, `carried`, `sent_forward`, `loss`, `weight`, `forward_ms`.

        Raises:
            GradientRefused: The loss of a training microbatch is not finite.
        """
        began = time.perf_counter()
        if self.module.training == hop.evaluate:
            self.module.train(not hop.evaluate)
        part = self.module.slice
        self._check_sizes(hop.inputs)
        tensors = [tensor.to(self._device, non_blocking=True) for tensor in hop.inputs]
        arrived = len(tensors) - len(self._batch_in)
        batch = dict(zip(self._batch_in, tensors[arrived:], strict=True))
        values = ({} if self._first else part.unpacked(tensors[:arrived])) | batch
        if not hop.evaluate:
            hop.carried = tuple(part.carries_gradient(values, part.incoming))
            for tensor in hop.carried:
                tensor.requires_grad_()
        with torch.set_grad_enabled(not hop.evaluate):
            found: list[Tensor] = []
            inside = (
                self.optimizer.averaging() if hop.evaluate else self._statistics.apart(hop.microbatch, found)
            )
            with inside:
                values = self.module.run(values, step=hop.step, microbatch=hop.microbatch)
            hop.statistics = tuple(found)
            outputs = tuple(part.carries_gradient(values, part.outgoing))
            if self.loss is not None:
                scored = self.loss(part.named_outputs(values), batch)
                loss = scored.loss
                hop.loss = float(loss.detach())
                hop.weight = 1.0 if scored.weight is None else scored.weight
                if hop.evaluate:
                    hop.metrics = self.loss.metrics.measure(part.named_outputs(values), batch)
                if not hop.evaluate and not math.isfinite(hop.loss):
                    raise GradientRefused(
                        f"microbatch {hop.microbatch}: the loss is {hop.loss}; "
                        "lower the learning rate, or look at this microbatch's data",
                        microbatch=hop.microbatch,
                    )
                outputs = (loss if self.optimizer.loss_scale is None else loss.float(),)  # fp16 ends at 65504
        hop.outputs = outputs
        hop.forward_ms = (time.perf_counter() - began) * 1e3
        if self._last:
            self.backward(hop, ())
        else:
            sent = (item.detach().contiguous() for item in part.packed(values))
            hop.sent_forward = (*sent, *(batch[name] for name in self._batch_out))

    def _check_sizes(self, tensors: Sequence[Tensor]) -> None:
        """Checks once for each size of a batch that the model computes the same for it."""
        sizes = tuple(tensor.shape for tensor in tensors)
        if self._first and self._graph.recorded and sizes not in self._sizes:
            spec = self._start.spec
            check_sizes(self._graph, dict(zip(self._batch_in, tensors, strict=True)), spec.model.inputs)
            self._sizes.add(sizes)

    def backward(self, hop: Hop, gradients: Sequence[Tensor]) -> None:
        """Computes the gradients of one microbatch separately, then adds them all (DESIGN §5 rule 4).

        Args:
            hop: A hop after `forward`.
            gradients: One per floating-point output; empty at the last stage, whose output is the loss.

        Raises:
            GradientRefused: A gradient can't be summed exactly; the sum is unchanged.
        """
        if hop.evaluate:
            hop.outputs = hop.inputs = hop.carried = hop.statistics = ()
            return
        began = time.perf_counter()
        carried = hop.carried
        scale = self.optimizer.loss_scale
        incoming: list[Tensor | None] = [item.to(self._device) for item in gradients]
        if not gradients:
            factor = None if scale is None else scale.scale
            incoming = [None if factor is None else torch.full_like(loss, factor) for loss in hop.outputs]
        pairs = [pair for pair in zip(hop.outputs, incoming, strict=True) if pair[0].requires_grad]
        inputs = [*self.parameters, *(twin for _, twin in self._twins), *carried]
        results: Sequence[Tensor | None] = [None] * len(inputs)
        if pairs and inputs:
            with self._statistics.apart(hop.microbatch, []):  # layers that recompute run once more
                results = torch.autograd.grad(
                    [output for output, _ in pairs],
                    inputs,
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                )
        results = [found.to_dense() if found is not None and found.is_sparse else found for found in results]
        own, twins = len(self.parameters), len(self.parameters) + len(self._twins)
        found = results[:twins] if scale is None else self._unscaled(hop.microbatch, results[:twins], scale)
        further = [(at, found[own + place]) for place, (at, _) in enumerate(self._twins)]
        self.sum.add(hop.microbatch, [*found[:own], *hop.statistics], further)
        # An unused input gets a zero gradient, since the stage before expects one of its shape.
        hop.sent_backward = tuple(
            torch.zeros_like(item) if gradient is None else gradient.contiguous()
            for item, gradient in zip(carried, results[twins:], strict=True)
        )
        hop.outputs = hop.inputs = hop.carried = hop.statistics = ()
        hop.backward_ms = (time.perf_counter() - began) * 1e3

    def _unscaled(
        self, microbatch: int, gradients: Sequence[Tensor | None], scale: LossScale
    ) -> Sequence[Tensor | None]:
        """The gradients of the loss itself, fp32. Of a microbatch in which some overflow there are none."""
        there = [gradient for gradient in gradients if gradient is not None]
        if not scale.is_least and not all(bool(torch.isfinite(each).all()) for each in there):
            self._overflowed.add(microbatch)
            return [None] * len(gradients)
        return [None if each is None else each.float().mul(1 / scale.scale) for each in gradients]

    def clear(self) -> None:
        """Forgets the open step."""
        self.sum.clear()
        self._overflowed.clear()

    def scaling(self) -> tuple[float | None, tuple[int, ...]]:
        """The scale of the open step's losses (None: they are not scaled), and the microbatches in the sum
        that overflowed."""
        scale = self.optimizer.loss_scale
        return None if scale is None else scale.scale, tuple(sorted(self._overflowed))

    def copy_sum(self) -> tuple[frozenset[int], Tensor]:
        """The set of summed microbatches, and a copy of the sum for the all-reduce, which may spoil it."""
        return self.sum.microbatches, self.sum.copy_for_reduce()

    def finish_alone(self) -> tuple[frozenset[int], Finished]:
        """`copy_sum` and `finish_sum` for a single replica, without the copy: nothing can spoil the sum."""
        return self.sum.microbatches, self.finish_sum(self.sum.total)

    def finish_reduced(self, reduced: Tensor) -> Finished:
        """`finish_sum` of the all-reduced copy, whose memory is then reused."""
        finished = self.finish_sum(reduced)
        self.sum.give_back(reduced)
        return finished

    def begin_parts(self, rank: int, shares: Sequence[float]) -> SumInParts:
        """The set of summed microbatches, and the parts of the sum for the other members of the stage."""
        return self.sum.begin_parts(rank, shares)

    def finish_parts(self, parts: SumInParts) -> Finished:
        """`finish_sum` of parts that all members have exchanged; their memory is then reused."""
        return self._counted(*self.sum.finish_parts(parts))

    def finish_sum(self, reduced: Tensor) -> Finished:
        """Mean gradients, the checksum of the reduced sum, and each parameter's squared norm."""
        return self._counted(*self.sum.finish(reduced))

    def _counted(self, gradients: list[Tensor], checksum: str) -> Finished:
        norms = self.sum.squared_norms(gradients[: len(self.parameters)])
        first = self._start.unit.first_layer
        counted = tuple(  # a shared parameter counts once: in the stage that uses it first
            norm if self._users[name][0] >= first else 0.0
            for name, norm in zip(self._names, norms, strict=True)
        )
        return gradients, checksum, counted

    @property
    def summed_names(self) -> list[str]:
        """Full names of what a step's gradients are of: the trained parameters, then running statistics."""
        names = {id(buffer): name for name, buffer in self.module.named_buffers()}
        return [*self._names, *(names[id(buffer)] for buffer in self._statistics.buffers)]

    def names_in(self, first: int, last: int) -> frozenset[str]:
        """Full names of the weights of this stage that layers `first` … `last`-1 use."""
        graph = self._graph
        own = {name for name, users in graph.users.items() if any(first <= at < last for at in users)}
        for layer in graph.layers[first:last]:
            own.update(layer.weights)
            for prefix in layer.modules:
                buffers = graph.model.get_submodule(prefix).named_buffers()
                own.update(f"{prefix}.{name}" for name, _ in buffers)
        return frozenset(name for name, _ in named_weights(self.module) if name in own)

    def become(self, other: StageCompute) -> None:
        """Takes over all that another one has, which is not used any more: other layers, in the same job."""
        vars(self).update(vars(other))

    @property
    def is_tied(self) -> bool:
        """Whether another stage uses a trained parameter of this one, too."""
        own = range(self._start.unit.first_layer, self._start.unit.last_layer)
        return any(layer not in own for users in self._users.values() for layer in users)

    def shared_with(self, stage: TiedStage) -> list[slice]:
        """The parts of the flat sum whose parameters another stage uses too, in the order of their names."""
        ends = list(itertools.accumulate(weight.numel() for weight in self.parameters))
        parts = {
            name: slice(end - weight.numel(), end)
            for name, weight, end in zip(self._names, self.parameters, ends, strict=True)
            if any(stage.first_layer <= layer < stage.last_layer for layer in self._users[name])
        }
        return [parts[name] for name in sorted(parts)]

    def apply(self, order: StepCommit, gradients: Sequence[Tensor]) -> None:
        """Makes one optimizer step with the recorded clip, or none for a skipped step; clears the sum."""
        if order.action == "apply":
            most = self._start.spec.training.clip_value
            for gradient in gradients[: len(self.parameters)]:
                if order.clip != 1.0:
                    gradient.mul_(order.clip)
                if most is not None:
                    gradient.clamp_(-most, most)
            self._update(order.step, gradients, order.learning_rate)
        else:
            self.optimizer.skip()
        self.clear()
        self.version = order.step + 1

    def skip(self, step: int) -> None:
        """Ends a skipped `step` without an update; its sum was cleared before."""
        self.optimizer.skip()
        self.version = step + 1

    def redo(self, step: int, gradients: Sequence[Tensor], learning_rate: float | None = None) -> None:
        """Applies a step again with its clipped gradients and its decided rate; no gradients: a skipped step.

        Raises:
            Conflict: The gradients are of another stage; nothing was changed.
        """
        if gradients:
            expected = [*self.parameters, *self._statistics.buffers]
            if [gradient.shape for gradient in gradients] != [weight.shape for weight in expected]:
                raise Conflict(f"the gradients of step {step} that came are of another stage")
            self._update(step, [gradient.to(self._device) for gradient in gradients], learning_rate)
        else:
            self.optimizer.skip()
        self.version = step + 1

    def _update(self, step: int, gradients: Sequence[Tensor], rate: float | None) -> None:
        if rate is None:  # decided by an orchestrator of an earlier version
            users, training = self.own_schedule, self._start.spec.training
            rate = learning_rate(step, training) if users is None else users.rate(step)
        own = len(self.parameters)
        self.optimizer.step(gradients[:own], rate, step)
        microbatches = self._start.spec.training.microbatches
        self._statistics.apply([mean * microbatches for mean in gradients[own:]])
        if not self.optimizer.fixed_layout and step.bit_count() < 2:  # 0, 1, 2, 4, 8 …: it takes milliseconds
            self._measure_state()

    def _measure_state(self) -> None:
        """Other optimizers than AdamW make their state when they first need it, and averages begin later."""
        weights = sum(tensor.nbytes for _, tensor in named_weights(self.module))
        self.state_bytes = weights + self.optimizer.bytes

    def load(self, version: int, tensors: Sequence[Tensor]) -> None:
        """Loads the `state_tensors` of another replica at `version`."""
        load_state_tensors(self.module, self.optimizer, tensors)
        self._measure_state()
        self.version = version

    def restored(self, version: int) -> None:
        """Sets the version after a restore of the state, and clears the sum."""
        self._measure_state()
        self.clear()
        self.version = version

    def snapshot(self) -> tuple[int, list[Tensor]]:
        """The version, and `state_tensors` copied to host memory."""
        host = torch.device("cpu")
        state = state_tensors(self.module, self.optimizer)
        return self.version, [tensor.detach().to(host, copy=True) for tensor in state]
