"""How far the mesh changes jobs by itself, and for what; who holds which knob of a job (ADR-0092)."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_validator

from schemas.base import Message, Part, Seconds, Time, Token
from schemas.changes import JobObjective
from schemas.errors import BadInput

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


Limit = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
_LIMIT: TypeAdapter[float] = TypeAdapter(Limit)


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

    def switched(self, limits: Mapping[JobObjective, float | None]) -> BudgetSpec:
        """The budget with these limits in the place of its own; None lifts one, and the others stay."""
        return BudgetSpec.model_validate({**self.model_dump(), **limits})


_NUMBER = r"[1-9][0-9]{0,14}(\.[0-9]{1,20})?|0\.[0-9]{0,20}[1-9][0-9]{0,20}"
_LIMIT_TEXT = rf"(time|cost|energy|carbon)=(none|{_NUMBER})"
LIMITS = rf"^{_LIMIT_TEXT}(,{_LIMIT_TEXT})*$"
"""The pattern of such a text, without spaces and exponents."""


def limits_of(text: str) -> dict[JobObjective, float | None]:
    """Limits as people write them: `cost=12,energy=none`; `none` lifts one.

    Raises:
        BadInput: the text is none; it says what to give.
    """
    found: dict[JobObjective, float | None] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        try:
            objective = JobObjective(name)
            found[objective] = None if value == "none" else _LIMIT.validate_python(value)
        except ValueError:
            raise BadInput(
                f"budget {part.strip() or 'without a limit'}: give time, cost, energy or carbon with a "
                "number above 0 or with none, as cost=12,energy=none"
            ) from None
    return found


def limits_text(limits: Mapping[JobObjective, float | None]) -> str:
    """The same limits as text, by the pattern `LIMITS`."""
    return ",".join(
        f"{JobObjective(objective)}={'none' if most is None else _plain(most)}"
        for objective, most in limits.items()
    )


def _plain(most: float) -> str:
    return format(Decimal(repr(most)), "f").removesuffix(".0")  # the shortest text that is the same number


class MeshAutomation(Message, wire="policy.mesh-automation"):
    """The mesh's own mode, in the bucket `automation`.

    `started_with` is the mode of the orchestrator's command line that wrote it: an orchestrator that is
    started with another one replaces it.
    """

    mode: Automation
    started_with: Automation
    by: str
    at: Time


class SwitchAutomation(Message, wire="policy.switch-automation", version=(1, 1)):
    """MG → SMO: from now on the mesh, or one job, is automated so far. Repeated, it changes nothing.

    What is not given stays. An objective and a budget are a job's.
    """

    mode: Automation | None = None
    job: Token | None = Field(None, description="none: the mesh")
    objective: JobObjective | None = None
    budget: dict[JobObjective, Limit | None] = Field({}, description="limits to set; null lifts one")
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
