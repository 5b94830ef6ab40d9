"""Something about a running job that a person should look at; told when it begins and when it is over."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from schemas.base import Part


class AlertKind(StrEnum):
    LOSS_SPIKE = "loss_spike"
    GRADIENT_NORM = "gradient_norm"
    STRAGGLER = "straggler"
    TEMPERATURE = "temperature"


class Alert(Part):
    """`subject`: an instance's SID, a cluster, or empty where it is the whole job's.

    `value` in the figure's own unit, None where it is not a finite number; `usual` is what it was before.
    """

    kind: AlertKind
    subject: str = ""
    raised: bool = Field(description="false: it is over")
    step: int
    value: float | None = None
    usual: float | None = None
    text: str
