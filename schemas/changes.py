"""Changes of a running job that alter its speed: what was forecast, and what came of it. Times in seconds.

The move of an instance to another stage is one, another number of replicas, another window. A job has one
account of them (`entities.orchestrator.planning.change_account`), in its record and in its events.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from schemas.base import Part, Token


class JobObjective(StrEnum):
    """What is to be as small as possible: the job's time (s), money, energy (J), or carbon (g of CO2)."""

    TIME = "time"
    COST = "cost"
    ENERGY = "energy"
    CARBON = "carbon"

    @property
    def unit(self) -> str:
        return {"time": "s", "cost": "of money", "energy": "J", "carbon": "g of CO2"}[self.value]


Use = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StepUse(Part):
    """What a step uses of one objective: money, J, or g of CO2."""

    before: Use = Field(description="a step now")
    after: Use = Field(description="a step once the change is in effect")


class Forecast(Part):
    """The forecast of a change. The gain covers the remaining steps, before subtracting the cost.

    `objective` names for what it is made; of another one than time, `uses` says what a step uses.
    """

    step_before_s: float = Field(gt=0, allow_inf_nan=False, description="a step now, as measured")
    step_after_s: float = Field(gt=0, allow_inf_nan=False, description="a step once the change is in effect")
    cost_s: float = Field(
        ge=0, allow_inf_nan=False, description="as if training stood still while the change is made"
    )
    gain_s: float = Field(allow_inf_nan=False)
    steps_left: int = Field(ge=0)
    objective: JobObjective = JobObjective.TIME
    uses: dict[JobObjective, StepUse] = Field({}, description="of cost, energy and carbon, as far as known")

    @classmethod
    def of(
        cls,
        step_before_s: float,
        step_after_s: float,
        *,
        cost_s: float,
        steps_left: int,
        objective: JobObjective = JobObjective.TIME,
        uses: Mapping[JobObjective, StepUse] | None = None,
    ) -> Self:
        """A forecast whose gain is what each remaining step saves."""
        return cls(
            step_before_s=step_before_s,
            step_after_s=step_after_s,
            cost_s=cost_s,
            gain_s=(step_before_s - step_after_s) * steps_left,
            steps_left=steps_left,
            objective=objective,
            uses=dict(uses or {}),
        )

    @property
    def improvement(self) -> float:
        """The saved share of a step's time."""
        return 1.0 - self.step_after_s / self.step_before_s

    @property
    def saving(self) -> float:
        """The saved share of what the objective counts; of an objective without figures, 0."""
        return self.measured_saving(self.step_before_s, self.step_after_s)

    def measured_saving(self, before_s: float, after_s: float) -> float:
        """The saved share of what the objective counts, by measured times of a step.

        Of another objective than time, a second uses what the forecast says: prices and watts are its own.
        """
        if self.objective is JobObjective.TIME:
            return 1.0 - after_s / before_s
        use = self.uses.get(self.objective)
        if use is None or use.before <= 0:
            return 0.0
        before, after = use.before * before_s / self.step_before_s, use.after * after_s / self.step_after_s
        return 1.0 - after / before


ChangeKind = Literal[
    "move",
    "migrate",
    "scale",
    "window",
    "rate",
    "reduction",
    "algorithm",
    "recut",
    "weights",
    "avoidance",
]

ROUTES: frozenset[ChangeKind] = frozenset({"weights", "avoidance"})
"""Changes of routes, which follow every sample: they have an account of their own."""


class ChangeState(StrEnum):
    UNDER_WAY = "under_way"  # begun, and not in effect yet
    IN_EFFECT = "in_effect"  # its effect is being measured
    BETTER = "better"  # steps are shorter than before, or use less
    NO_BETTER = "no_better"  # they are not: it is taken back where that can be, and not tried again
    FAILED = "failed"  # it could not be made: it is not tried again
    UNDONE = "undone"  # something else changed before its effect was known

    @classmethod
    def _missing_(cls, value: object) -> ChangeState | None:
        """The states of moves, as records of former versions have them."""
        return {"moving": cls.UNDER_WAY, "joined": cls.IN_EFFECT}.get(str(value))


OPEN_CHANGES = frozenset({ChangeState.UNDER_WAY, ChangeState.IN_EFFECT})
"""States of a change whose effect is not known yet; a job has at most one such change."""


class JobChange(Part):
    """One change of a job, in its record and in its events of kind `change`.

    `direction` and `reverse` say what is not tried again, and what would take it back: both in words, as
    `stage 0 → stage 1`.
    """

    kind: ChangeKind = "move"
    what: str = Field("", description="the change in words")
    direction: str = ""
    reverse: str = ""
    sid: Token | None = Field(
        None, description="of a move or migration: the instance that left; of an avoidance: the one avoided"
    )
    newcomers: tuple[Token, ...] = Field((), description="instances that work once it is in effect")
    replicas: tuple[int, int] | None = Field(None, description="of each stage, before and after it")
    from_stage: int | None = None
    to_stage: int | None = None
    step: int = Field(description="the first step that it concerns")
    by: str = Field(description="module or user who wanted it; `orchestrator`: its own loop")
    forecast: Forecast | None = Field(None, description="None: ordered by hand, or it takes another back")
    takes_back: bool = Field(False, description="it undoes the change before, which was no better")
    state: ChangeState = ChangeState.UNDER_WAY
    before_s: float | None = Field(None, description="a step before it, median of the last ones")
    cost_s: float | None = Field(None, description="time lost until it was in effect, as measured")
    after_s: float | None = Field(None, description="a step after it, median")
    note: str = Field("", description="why it was not judged")

    @model_validator(mode="before")
    @classmethod
    def _moves_of_former_versions(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or "newcomer" not in value:
            return value
        given = dict(value)
        newcomer = given.pop("newcomer")
        here, there = f"stage {given.get('from_stage')}", f"stage {given.get('to_stage')}"
        return {
            "what": f"{given.get('sid')} ({here}) → {newcomer} ({there})",
            "direction": f"{here} → {there}",
            "reverse": f"{there} → {here}",
            "newcomers": (newcomer,),
            **given,
        }
