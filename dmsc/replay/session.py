"""One pass over a record: the policy's suggestions, recorded suggestions and decisions, and their scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bus.recording.run_record import Frame
from bus.subjects import FAULT_ANSWER, POLICY_DECISION, SUGGESTION
from entities.orchestrator.policy.arbitration import arbitrate, lapse, register
from entities.orchestrator.policy.arbitration_state import ArbitrationState
from entities.orchestrator.policy.suggestion_rules import JobFacts
from policies.kit.engine import Engine, EngineConfig, Event, PolicyProblem
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.scoring.replay import PolicyReplay, Replayed
from policies.scoring.scoreboard import NEEDS, Scoreboard
from policies.scoring.scores import Judged
from schemas.errors import BadMessage
from schemas.fault_choices import FaultAnswer
from schemas.policy import ModuleLifecycle, ModuleState, PolicyDecision, PolicyScore, PolicySuggestion

Key = tuple[str, str]
"""(module, version)."""


@dataclass(slots=True)
class RecordedSuggestion:
    """A suggestion of the recorded run, and the orchestrator's decision about it."""

    at: float
    id: str
    suggestion: PolicySuggestion
    decision: PolicyDecision | None = None


@dataclass(slots=True)
class Story:
    """The result of a pass. Times are epoch seconds; `unreadable` counts messages of other versions."""

    began: float = math.nan
    until: float = math.nan
    messages: int = 0
    unreadable: int = 0
    unanswered_reads: int = 0
    replayed: list[Replayed] = field(default_factory=list)
    recorded: list[RecordedSuggestion] = field(default_factory=list)
    scores: dict[Key, list[PolicyScore]] = field(default_factory=dict)
    replayed_scores: list[PolicyScore] = field(default_factory=list)
    fault_answers: list[FaultAnswer] = field(default_factory=list)
    recorded_fault_answers: list[FaultAnswer] = field(default_factory=list)
    problems: list[PolicyProblem] = field(default_factory=list)


class Session:
    """Takes all frames of a record in order through `feed`; then `finish` returns the story.

    Args:
        policy: The policy to try; None: only the recorded suggestions are scored.
        jobs: Only these jobs of a record with several jobs; empty: all.
        settle_every_s: Seconds of the record's time between checks whether suggestions can be scored.
    """

    def __init__(
        self, policy: Policy | None, jobs: Iterable[str] = (), *, settle_every_s: float = 1.0
    ) -> None:
        config = EngineConfig(jobs=tuple(jobs))
        rules = None if policy is None else Rules(policy)
        self.story = Story()
        self._replay = PolicyReplay(
            policy or _Watcher(), config, **({} if rules is None else {"answer": rules})
        )
        self._mine: Scoreboard | None = None
        if policy is not None:
            self._mine = Scoreboard(policy.name, policy.version, self._engine.observations)
        self._boards: dict[Key, Scoreboard] = {}
        self._by_id: dict[str, RecordedSuggestion] = {}
        self._rows = self._replay.rows | {SUGGESTION, FAULT_ANSWER, POLICY_DECISION, *NEEDS}
        self._settled_at = -math.inf
        self._settle_every_s = settle_every_s

    @property
    def _engine(self) -> Engine:
        return self._replay.engine

    def feed(self, frame: Frame) -> None:
        story = self.story
        story.messages += 1
        story.began = frame.at if math.isnan(story.began) else story.began
        story.until = frame.at
        if frame.row not in self._rows:
            return
        try:
            message, envelope = frame.open()
        except BadMessage:
            story.unreadable += 1
            return
        event = Event(row=frame.row, message=message, id=envelope.id, at=frame.at)
        for board in self._all_boards():
            board.take((event,))
        answered = len(self._replay.answers)
        for replayed in self._replay.feed(event):
            if self._mine is not None:
                self._mine.follow(replayed.suggestion, replayed.id, replayed.at)
                if replayed.decision is not None:
                    self._mine.take((self._decision_event(replayed.decision, replayed.at),))
        for answer in self._replay.answers[answered:]:
            if self._mine is not None:
                self._mine.follow_answer(answer, "", frame.at)
        if isinstance(message, FaultAnswer) and message.action is not None:
            story.recorded_fault_answers.append(message)
            self._board(message.module, message.version).follow_answer(message, envelope.id, frame.at)
        elif isinstance(message, PolicySuggestion):
            self._recorded(message, envelope.id, frame.at)
        elif isinstance(message, PolicyDecision) and message.suggestion in self._by_id:
            self._by_id[message.suggestion].decision = message
        if frame.at - self._settled_at >= self._settle_every_s or frame.row.name == "job event":
            self._settle(frame.at)

    def finish(self) -> Story:
        """Return the story. Suggestions that can't be scored yet remain without a score."""
        story = self.story
        self._settle(story.until)
        story.replayed = self._replay.suggestions
        story.fault_answers = self._replay.answers
        story.problems = self._replay.problems
        story.unanswered_reads = self._replay.unanswered_reads
        return story

    def _recorded(self, message: PolicySuggestion, id: str, at: float) -> None:
        board = self._board(message.module, message.version)
        self._by_id[id] = RecordedSuggestion(at=at, id=id, suggestion=message)
        self.story.recorded.append(self._by_id[id])
        board.follow(message, id, at)

    def _board(self, module: str, version: str) -> Scoreboard:
        key = (module, version)
        if key not in self._boards:
            self._boards[key] = Scoreboard(*key, self._engine.observations)
        return self._boards[key]

    def _settle(self, now: float) -> None:
        self._settled_at = now
        for key, board in self._boards.items():
            self.story.scores.setdefault(key, []).extend(board.settle(now))
        if self._mine is not None:
            self.story.replayed_scores += self._mine.settle(now)

    def _all_boards(self) -> list[Scoreboard]:
        return [*self._boards.values(), *(() if self._mine is None else (self._mine,))]

    @staticmethod
    def _decision_event(decision: PolicyDecision, at: float) -> Event:
        return Event(row=POLICY_DECISION, message=decision, id="", at=at)


class _Watcher(Policy):
    """A policy without suggestions; it is used only to collect observations."""

    name = "watcher"
    every_s = 3600.0

    def decide(self, view: JobView, now: float) -> Suggestions:
        return None


def judged(scores: Iterable[PolicyScore]) -> list[Judged]:
    """Convert scores to the form that `policies.scoring.scores.summarise` takes."""
    return [
        Judged(
            score=score.score,
            right=score.right,
            confidence=score.confidence,
            adopted=score.adopted,
            missed=score.action == "missed",
        )
        for score in scores
    ]


class Rules:
    """The orchestrator's decisions about one policy's suggestions, as if it were the only active policy.

    It is called as a `policies.scoring.replay.Answer`.
    """

    def __init__(self, policy: Policy) -> None:
        active = ModuleLifecycle(module=policy.name, version=policy.version, state=ModuleState.ACTIVE)
        self._state = register(ArbitrationState(), active, 0.0)
        self._weights: dict[str, dict[int, Mapping[str, float]]] = {}
        self._revision = 0

    def __call__(
        self, suggestion: PolicySuggestion, id: str, now: float, view: JobView
    ) -> PolicyDecision | None:
        weights = self._weights.setdefault(view.job, {})
        lapsed, self._state = lapse(self._state, {view.job: self._facts(view)}, now)
        weights.update({ended.stage: ended.weights for ended in lapsed if ended.stage is not None})
        outcome, self._state = arbitrate(self._state, suggestion, self._facts(view), now)
        if outcome.adopted and outcome.stage is not None and outcome.weights is not None:
            weights[outcome.stage] = outcome.weights
            self._revision += 1
        if not outcome.answer:
            return None
        return PolicyDecision(
            module=suggestion.module,
            version=suggestion.version,
            job=suggestion.job,
            suggestion=id,
            adopted=outcome.adopted,
            reason=outcome.reason,
        )

    def _facts(self, view: JobView) -> JobFacts:
        return JobFacts(
            active={stage: [instance.sid for instance in view.stage(stage)] for stage in view.stages},
            weights=self._weights.get(view.job, {}),
            revision=self._revision,
            step=view.step,
        )
