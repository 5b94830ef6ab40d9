"""An alert: a problem of a running job that a user should look at, reported at its start and end."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from schemas.base import Part


class AlertKind(StrEnum):
    LOSS_SPIKE = "loss_spike"
    GRADIENT_NORM = "gradient_norm"
    STRAGGLER = "straggler"
    TEMPERATURE = "temperature"
    UNDERPERFORMING = "underperforming"
    """Slower than the plan expects, by the agent of its node; a straggler became slower than it was."""


class Alert(Part):
    """An alert on `subject`: an instance's SID, a cluster, or empty for the whole job.

    `value` has the unit of its kind, None if it is not a finite number; `usual` is the value before.
    """

    kind: AlertKind
    subject: str = ""
    raised: bool = Field(description="false: it is over")
    step: int
    value: float | None = None
    usual: float | None = None
    text: str
