"""What is done about a fault at hand: modules are asked, one of three ways is taken, and it is measured.

The orchestrator has located a fault. It asks the modules that answer such questions, waits for them for some
milliseconds, and goes the way of the highest rank, or its own if none says anything (ADR-0099).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from schemas import names
from schemas.automation import OWN_LOOP
from schemas.base import Message, Part, Seconds, Time, Token
from schemas.fault import FaultKind, FaultScope, VerdictKind

MOST_NAMED = 64
"""Nodes, or kinds of devices, that one answer may name."""

Names = Annotated[tuple[Token, ...], Field(max_length=MOST_NAMED)]


class Retry(Part):
    """Ask the same instance again, over a new link; one that has ended starts again where it was."""

    action: Literal["retry"] = "retry"


class Wait(Part):
    """Hold the replacement for at most so long: the instance, or its node, is expected back."""

    action: Literal["wait"] = "wait"
    for_s: Seconds = Field(gt=0)


class Replace(Part):
    """Replace the instance now.

    Nodes (their agents' SIDs) and kinds of devices that are avoided or preferred are wishes: where no slot
    meets them, any slot will do.
    """

    action: Literal["replace"] = "replace"
    avoid: Names = ()
    prefer: Token | None = None
    avoid_kinds: Names = ()


FaultAction = Annotated[Retry | Wait | Replace, Field(discriminator="action")]
FaultWay = Literal["retry", "wait", "replace"]


class FaultCosts(Part):
    """Seconds that training is expected to lose by each way. None: not known."""

    retry_s: Seconds | None = None
    wait_s: Seconds | None = None
    replace_s: Seconds | None = None

    def of(self, way: FaultWay) -> float | None:
        """The seconds of one way."""
        return {"retry": self.retry_s, "wait": self.wait_s, "replace": self.replace_s}[way]

    def over(self, others: FaultCosts) -> FaultCosts:
        """These costs; those of others where these have none."""
        known = {name: value for name, value in self if value is not None}
        return others.model_copy(update=known)


class FaultQuestion(Message, wire="fault.question"):
    """SMO → modules: what would you do about this fault? Whoever is silent or late leaves it to the SMO.

    `lost`: the instance counts no more, and only its replacement is open. `usual` is the way that the SMO
    goes by itself.
    """

    id: Token
    job: Token
    at: Time
    sid: Token
    incarnation: Token
    stage: int
    cluster: Token
    node: Token
    agent: Token | None = Field(None, description="of its node, if that is registered")
    kind: FaultKind
    verdict: VerdictKind
    scope: FaultScope
    evidence: str
    lost: bool
    usual: FaultWay
    spares: int = Field(description="free slots that the job may use")
    replicas: int = Field(description="others of its stage that work")
    may_replace: bool = Field(
        True,
        description="whether one that works may be given up now, while nobody else is on the way",
    )
    past: int = Field(description="faults of this unit before, that anybody was asked about")
    past_of_node: int = Field(description="those of all the job's instances on its node")
    step: int
    costs: FaultCosts = Field(description="by the recoveries that the job has measured")
    most_wait_s: Seconds = Field(description="the longest wait that is granted")
    answer_ms: float = Field(gt=0, description="an answer counts if it comes within this time")


class FaultAnswer(Message, wire="fault.answer"):
    """Module → SMO: the way that it would go. Without an action: it has nothing to say about this fault."""

    module: Token
    version: str
    job: Token
    question: Token
    action: FaultAction | None = None
    confidence: float = Field(0.0, ge=0, le=1)
    reason: str = Field("", max_length=1000)
    costs: FaultCosts = FaultCosts()
    owner: Token = Field(names.MESH, description="as in the module's lifecycle")
    state: str = Field("", description="digest of the learnt state that it was made from; empty: of none")


class FaultRuling(Part):
    """The way that is gone, bounded, and by whom. `asked`: how many modules were waited for."""

    question: Token
    action: FaultAction
    by: Token = OWN_LOOP
    reason: str = ""
    confidence: float = 1.0
    costs: FaultCosts = FaultCosts()
    asked: int = 0

    @property
    def way(self) -> FaultWay:
        return self.action.action

    @classmethod
    def as_usual(cls, question: FaultQuestion, reason: str = "", *, asked: int = 0) -> FaultRuling:
        """What the orchestrator does by itself."""
        usual: dict[FaultWay, FaultAction] = {
            "retry": Retry(),
            "wait": Wait(for_s=max(question.most_wait_s, 1e-3)),
            "replace": Replace(),
        }
        return cls(
            question=question.id,
            action=usual[question.usual],
            reason=reason,
            costs=question.costs,
            asked=asked,
        )


class FaultOutcome(StrEnum):
    OPEN = "open"  # no step was committed since, or the unit is not back
    BETTER = "better"  # training lost no more than the usual way costs by the forecast
    NO_BETTER = "no_better"  # it lost more, or the instance did not come back
    MEASURED = "measured"  # the usual way, or there was no forecast to compare it with
    UNKNOWN = "unknown"  # the job ended, or its orchestrator changed, before that was known


class FaultChoice(Part):
    """One fault that modules were asked about, in its job's record: forecast and outcome side by side."""

    question: Token
    sid: Token
    incarnation: Token
    stage: int
    node: Token
    step: int
    at: Time
    kind: FaultKind
    evidence: str
    usual: FaultWay
    way: FaultWay
    by: Token = Field(description="a module, or `orchestrator` for its own way")
    reason: str
    confidence: float
    costs: FaultCosts = Field(description="seconds that training was to lose by each way")
    limit_s: Seconds | None = Field(None, description="how long a retry or a wait could hold a replacement")
    outcome: FaultOutcome = FaultOutcome.OPEN
    ended: bool = Field(False, description="it had ended already: only its replacement was open")
    lost: bool = Field(False, description="the instance was given up")
    took_s: Seconds | None = Field(None, description="from the fault until a step was committed, as measured")
    back_s: Seconds | None = Field(
        None, description="until the instance, or its next incarnation, was there again"
    )


FAULT_CHOICES_KEPT = 16
"""Choices that a job's record remembers: the latest."""


def choice_text(choice: FaultChoice) -> str:
    """A choice in one line, for people."""
    way = choice.way if choice.limit_s is None else f"{choice.way} for up to {choice.limit_s:.1f} s"
    text = f"{choice.sid}: {way}, by {choice.by}"
    text += f" ({choice.reason})" if choice.reason else ""
    expected, usual = choice.costs.of(choice.way), choice.costs.of(choice.usual)
    if expected is not None:
        text += f"; {expected:.1f} s expected"
    if usual is not None and choice.way != choice.usual:
        text += f", {usual:.1f} s by {choice.usual}"
    if choice.took_s is not None:
        text += f"; training went on after {choice.took_s:.2f} s"
    if choice.outcome is not FaultOutcome.OPEN:
        text += f": {choice.outcome.replace('_', ' ')}"
    return text
