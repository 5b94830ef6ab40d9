"""How far the mesh changes jobs by itself: off, advise or act; who holds which knob of a job (ADR-0092)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from schemas.base import Message, Part, Seconds, Time, Token
from schemas.changes import JobObjective

OPERATOR = "operator"
"""The holder of a knob that a person has set."""
OWN_LOOP = "orchestrator"
"""The module name of the orchestrator's own loop: it suggests like any module, with the lowest rank."""


class Automation(StrEnum):
    """What becomes of suggestions: none is adopted, each is only judged, or good ones are adopted."""

    OFF = "off"
    ADVISE = "advise"
    ACT = "act"


def lower(*modes: Automation) -> Automation:
    """The lowest of these modes: it holds."""
    return min(modes, key=list(Automation).index)


class MeshAutomation(Message, wire="policy.mesh-automation"):
    """The mesh's own mode, in the bucket `automation`.

    `started_with` is the mode of the orchestrator's command line that wrote it: an orchestrator that is
    started with another one replaces it.
    """

    mode: Automation
    started_with: Automation
    by: str
    at: Time


class SwitchAutomation(Message, wire="policy.switch-automation"):
    """MG → SMO: from now on the mesh, or one job, is automated so far. Repeated, it changes nothing."""

    mode: Automation
    job: Token | None = Field(None, description="none: the mesh")
    user: str


class AutomationQuery(Message, wire="policy.automation-query"):
    """MG → SMO: how far is the mesh automated, or this job, and who holds which knob?"""

    job: Token | None = None


class Knob(Part):
    """One thing about a job that can be set, with its one writer."""

    name: str = Field(description="as `weights of stage 0`, `replicas`, `algorithm`")
    value: str = Field(description="what it is set to, in words")
    holder: str = Field(description="a module, `orchestrator` for its own loop, or `operator`")
    confidence: float = Field(ge=0, le=1)
    reason: str
    held_s: Seconds
    left_s: Seconds | None = Field(None, description="until it lapses; none: until it is released")


class PinnedKnob(Part):
    """A knob that a person has set, in the job's record: it holds under the next orchestrator, too."""

    knob: str
    value: str
    by: str = Field(description="who set it")
    at: Time


class AutomationStatus(Message, wire="policy.automation"):
    """The modes, of which the lower one holds; with a job also its objective and who holds its knobs."""

    mesh: Automation
    job: Token | None = None
    asked: Automation | None = Field(None, description="the job's own")
    holds: Automation
    objective: JobObjective = JobObjective.TIME
    budget: dict[JobObjective, float] = {}
    knobs: tuple[Knob, ...] = ()


Limit = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]


class BudgetSpec(Part):
    """The most that a job may use in all. What is left out has no limit."""

    time: Limit | None = Field(None, description="seconds in which it holds slots")
    cost: Limit | None = Field(None, description="money, by the label `price` of its slots")
    energy: Limit | None = Field(None, description="J, as far as its devices measure it")
    carbon: Limit | None = Field(None, description="g of CO2, by the label `carbon` of its slots")

    def limits(self) -> dict[JobObjective, float]:
        """The limits that are given."""
        given = {JobObjective(name): value for name, value in self}
        return {objective: value for objective, value in given.items() if value is not None}


class AutomationSpec(Part):
    """What the mesh may change of a running job by itself. The weights' bits never depend on it.

    Changes are suggested by functional modules and by the orchestrator's own loop, and judged by measured
    steps. Without any module the loop has instances leave slots that have become slow or change their stage,
    cuts the job anew, uses slots that join within `parallel.replicas: {min, want, max}`, and sets windows,
    weights and algorithm, each where a forecast says that it is worth it. The mesh has a mode as well
    (`dmsc policy automation`); the lower of the two holds.
    """

    mode: Literal["off", "advise", "act"] = Field(
        "act",
        description="off: nothing; advise: suggestions are judged and reported; act: good ones are adopted",
    )
    objective: Literal["time", "cost", "energy", "carbon"] = Field(
        "time",
        description="what is to be small: time, cost (money), energy (J) or carbon (g of CO2); a change "
        "whose forecast raises it is declined",
    )
    budget: BudgetSpec = Field(
        BudgetSpec(), description="a change by whose forecast the job would use more is declined"
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _is_off(cls, value: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value
