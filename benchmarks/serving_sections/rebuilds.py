"""What was lost with an instance, and what was computed anew, as a tap sees both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from torch import nn

from bus.connection import Bus
from bus.tap.live_tap import Tap
from bus.tasks import background
from schemas.job import JobRecord
from schemas.services.generation import BindSession
from schemas.step import Member
from schemas.telemetry import InstanceSample
from workers.compute.model import build


@dataclass(frozen=True)
class LostRows:
    """Rows of one session whose keys and values are gone with the owners of some stages."""

    stages: tuple[int, ...]
    rows: int


@dataclass
class RebuildWatch:
    """What gateways ordered, and what instances say that they computed, of one version's job."""

    lost: list[LostRows] = field(default_factory=list)
    _paths: dict[int, tuple[tuple[int, int], tuple[Member, ...]]] = field(default_factory=dict)
    _recomputed: dict[str, tuple[int, int]] = field(default_factory=dict)

    def take_order(self, order: BindSession) -> None:
        """A path of a session: where it has another owner than before, that one lacks all rows so far.

        Before its first token nothing counts as lost: a prompt may not have been computed.
        """
        key, known = (order.fence, order.attempt), self._paths.get(order.session)
        if known is not None and key <= known[0]:
            return  # it goes to each owner
        self._paths[order.session] = key, order.path
        if known is not None and len(order.tokens) > order.prompt_tokens:
            moved = tuple(
                stage
                for stage, (one, other) in enumerate(zip(known[1], order.path, strict=True))
                if one != other
            )
            if moved:
                self.lost.append(LostRows(moved, len(order.tokens) - 1))

    def take_sample(self, sample: InstanceSample) -> None:
        """Counts grow for as long as an incarnation lives."""
        if sample.serving is not None:
            self._recomputed[sample.incarnation] = sample.stage, sample.serving.recomputed_rows

    def recomputed(self, stages: int) -> list[int]:
        """Rows that the instances of each stage computed anew."""
        found = [0] * stages
        for stage, rows in self._recomputed.values():
            found[stage] += rows
        return found


@asynccontextmanager
async def watched_rebuilds(bus: Bus, job: str) -> AsyncIterator[RebuildWatch]:
    """Watches for the block. `bus`: with a tap's rights."""
    watch = RebuildWatch()

    async def look(tap: Tap) -> None:
        async with aclosing(aiter(tap)) as messages:
            async for tapped in messages:
                if isinstance(tapped.message, BindSession):
                    watch.take_order(tapped.message)
                elif isinstance(tapped.message, InstanceSample):
                    watch.take_sample(tapped.message)

    async with (
        Tap(bus, [f"serve.bind.{job}.>", f"telemetry.instance.{job}.>"]) as tap,
        background(look(tap), name="rebuilds"),
    ):
        yield watch


def share_of_prefill(
    recomputed: Sequence[int], lost: Sequence[LostRows], stage_work: Sequence[float]
) -> tuple[float, float]:
    """What was computed anew, and the lost stages' own part, as shares of a prefill from nothing.

    Args:
        recomputed: Rows that each stage computed anew.
        lost: Of each session that got another owner.
        stage_work: What a row costs each stage, in any unit.
    """
    whole = sum(each.rows for each in lost) * sum(stage_work)
    own = sum(each.rows * stage_work[stage] for each in lost for stage in each.stages)
    done = sum(rows * work for rows, work in zip(recomputed, stage_work, strict=True))
    return done / whole, own / whole


def stage_work(record: JobRecord) -> list[float]:
    """Multiplications and additions of a row in each stage's matrices; attention is alike in all blocks."""
    assert record.graph is not None
    model = build(record.spec.model, record.spec.training.seed)
    work = [
        2.0
        * sum(
            module.weight.numel()
            for name in layer.modules
            for module in model.model.get_submodule(name).modules()
            if isinstance(module, nn.Linear)
        )
        for layer in model.layers
    ]
    units = {unit.stage: unit for unit in record.graph.units if not unit.is_data}
    return [sum(work[unit.first_layer : unit.last_layer]) for _, unit in sorted(units.items())]
