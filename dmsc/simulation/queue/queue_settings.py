"""The settings of a simulated queue: `--set KEY=VALUE` of `dmsc simulate --queue`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import yaml
from pydantic import Field, ValidationError

from entities.queue.queue_rules import Backfill, QueueOrder, QueueRules
from schemas.base import Part
from schemas.errors import BadInput


class QueueSettings(Part):
    """How a trace is run. Elastic jobs may shrink to one slot, and grow as long as it is worth it."""

    slots: int = Field(64, ge=1, le=1_000_000, description="slots of the mesh")
    slots_per_node: int = Field(8, ge=1, le=1_000_000, description="slots of each node")
    jobs: int | None = Field(None, ge=1, description="the first jobs of the trace; none: all")
    order: QueueOrder = Field(QueueOrder.FCFS, description="who comes first")
    backfill: Backfill = Field(Backfill.EASY, description="who may start before the first without room")
    park: bool = Field(True, description="whether jobs park for others")
    elastic: bool = Field(False, description="whether jobs that do not say so may change their size")
    growth: float = Field(0.8, ge=0, le=1, description="what a slot adds that a job did not ask for")
    estimates: tuple[float, float] = Field(
        (1.0, 1.0), description="predicted ÷ real run times are drawn between these"
    )
    cool_down_s: float = Field(
        600.0, ge=0, allow_inf_nan=False, description="least time between two parks of a job"
    )

    @property
    def rules(self) -> QueueRules:
        return QueueRules(
            order=self.order,
            backfill=self.backfill,
            park=self.park,
            cool_down_s=self.cool_down_s,
        )


def queue_settings(overrides: Sequence[str]) -> QueueSettings:
    """The settings from items `KEY=VALUE`.

    Raises:
        BadInput: a key is unknown or a value wrong; one line says which, and what is possible.
    """
    body = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or key not in QueueSettings.model_fields:
            known = ", ".join(QueueSettings.model_fields)
            raise BadInput(f"--set {override}: give KEY=VALUE with one of {known}")
        try:
            body[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise BadInput(f"--set {override}: the value is no YAML") from None
    try:
        settings = QueueSettings.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"--set {first['loc'][0]}: {first['msg']}; given {first['input']!r}") from None
    low, high = settings.estimates
    if not 0 < low <= high < math.inf:
        raise BadInput(f"--set estimates=[{low}, {high}]: give two numbers above 0, the lower first")
    return settings
