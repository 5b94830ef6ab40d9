"""The account of moves between stages: which one is allowed, what it cost, whether it was worth it. Pure.

There is one move at a time, and each is judged by measured step times before the next. So a wrong forecast
costs one move, and is not repeated. The account gets every decided step, and keeps the moves for the job's
record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from schemas.job import StepResult
from schemas.stage_move import OPEN_MOVES, MoveForecast, MoveState, StageMove

KEPT = 16
"""Moves remembered in a job's record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveRules:
    """When a policy's move is allowed. A person's move is allowed wherever it is possible."""

    min_improvement: float = 0.1
    """Least part of a step's time that the forecast must save."""

    min_steps: int = 4
    """Steps that must be measured before a move, to compare with."""

    settle_steps: int = 2
    """First steps of the newcomer that are not compared: links are built, and senders learn its speed."""

    check_steps: int = 8
    """Steps after these by whose median a move is judged."""

    cooldown_steps: int = 8
    """Steps from a verdict until the next move."""

    agreement: float = 1.5
    """Largest ratio between the present time of a step and the one that the forecast assumes."""

    worth: float = 0.02
    """A move that saved less than this part of a step counts as no better: less is noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMembers:
    """Working replicas by stage, by their SIDs in the job's graph; standbys are not among them."""

    working: Mapping[int, Sequence[str]]
    standbys: frozenset[str] = frozenset()
    coming: tuple[str, ...] = ()

    def stage_of(self, sid: str) -> int | None:
        return next((stage for stage, sids in self.working.items() if sid in sids), None)


@dataclass(slots=True)
class StageMoves:
    """The moves of one job. `history`: those in the job's record."""

    history: list[StageMove] = field(default_factory=list)
    rules: MoveRules = field(default_factory=MoveRules)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    _after: list[float] = field(default_factory=list)
    _lost_s: float = 0.0
    _since: int | None = None  # steps since the last verdict; None: there was none

    @property
    def open(self) -> StageMove | None:
        """The move that is not judged yet, if there is one."""
        last = self.history[-1] if self.history else None
        return last if last is not None and last.state in OPEN_MOVES else None

    @property
    def recorded(self) -> tuple[StageMove, ...]:
        """The latest moves, for the job's record."""
        return tuple(self.history[-KEPT:])

    # --- whether a move is allowed ----------------------------------------------------------------------
    def impossible(self, sid: str, stage: int, crew: StageMembers) -> str:
        """Why this move is impossible now, for a policy and a person alike; empty if it is possible."""
        if stage not in crew.working:
            return f"there is no stage {stage}"
        if sid in crew.standbys:
            return f"{sid} is a standby: it is there for its stage alone"
        here = crew.stage_of(sid)
        if here is None:
            return f"{sid} works in no stage now"
        if here == stage:
            return f"{sid} is in stage {stage} already"
        if len(crew.working[here]) < 2:
            return f"{sid} is the last replica of stage {here}"
        if crew.coming:
            return f"{', '.join(crew.coming)} must have joined first"
        if self.open is not None:
            return f"the move of {self.open.sid} to stage {self.open.to_stage} is not judged yet"
        return ""

    def unwise(self, sid: str, stage: int, forecast: MoveForecast, crew: StageMembers) -> str:
        """Why a possible move of a policy is declined; empty if it is allowed."""
        rules = self.rules
        if forecast.improvement < rules.min_improvement:
            return f"would save {forecast.improvement:.0%} of a step, less than {rules.min_improvement:.0%}"
        if forecast.gain_s <= forecast.cost_s:
            return f"would gain {forecast.gain_s:.1f} s and cost {forecast.cost_s:.1f} s"
        if len(self._recent) < rules.min_steps:
            return f"only {len(self._recent)} steps by this crew are known: nothing to compare with"
        now_s = median(self._recent)
        if not 1 / rules.agreement <= forecast.step_before_s / now_s <= rules.agreement:
            return f"forecast for steps of {forecast.step_before_s:.3f} s, but they take {now_s:.3f} s"
        if self._since is not None and self._since < rules.cooldown_steps:
            return f"the last move was judged {self._since} steps ago; wait for {rules.cooldown_steps}"
        return self._precedent(crew.stage_of(sid), stage, now_s)

    def _precedent(self, here: int | None, stage: int, now_s: float) -> str:
        """Why an earlier move between the same stages speaks against this one; a step takes `now_s` now."""
        for move in reversed(self.history):
            pair = (move.from_stage, move.to_stage)
            if pair == (here, stage) and move.state in (MoveState.NO_BETTER, MoveState.FAILED):
                figures = f": {move.before_s:.3f} → {move.after_s:.3f} s a step" if _judged(move) else ""
                return f"was tried at step {move.step} ({move.state.value}{figures})"
            if pair == (stage, here) and move.state is MoveState.BETTER and move.after_s is not None:
                changed = now_s >= (1 + self.rules.min_improvement) * move.after_s
                if changed:
                    return ""
                return (
                    f"would take back the move of step {move.step}, and a step still takes {now_s:.3f} s "
                    f"as after it ({move.after_s:.3f} s)"
                )
        return ""

    # --- the course of a move ---------------------------------------------------------------------------
    def begin(self, move: StageMove) -> StageMove:
        """Notes that a move begins; returns it with the step time measured before it."""
        before_s = median(self._recent) if self._recent else None
        self.history = [*self.history[-KEPT + 1 :], move.model_copy(update={"before_s": before_s})]
        self._after, self._lost_s = [], 0.0
        return self.history[-1]

    def decided(self, result: StepResult, *, last: bool = False) -> StageMove | None:
        """Counts a decided step; returns the move if it has changed.

        Args:
            result: the step's figures.
            last: there is no further step: the move is judged now.
        """
        news = None
        move = self.open
        self._since = None if self._since is None else self._since + 1
        if move is None:
            self._recent.append(result.step_s)
            return None
        if move.state is MoveState.MOVING:
            if not result.shares.get(move.newcomer):
                self._lost_s += result.step_s - (move.before_s or result.step_s)
                return self._close(MoveState.UNDONE) if last else None
            news = self._change(state=MoveState.JOINED, cost_s=max(0.0, self._lost_s))
        self._after.append(result.step_s)
        compared = self._after[self.rules.settle_steps :]
        if len(compared) >= self.rules.check_steps or last:
            return self._judge(compared)
        return news

    def fail(self) -> StageMove | None:
        """Notes that the newcomer could not be started."""
        return self._close(MoveState.FAILED) if self.open is not None else None

    def undo(self) -> StageMove | None:
        """Closes the move without a verdict: other members changed, so that times can't be compared."""
        return self._close(MoveState.UNDONE) if self.open is not None else None

    def _judge(self, compared: Sequence[float]) -> StageMove:
        move = self.history[-1]
        if not compared or move.before_s is None:
            return self._close(MoveState.UNDONE)
        after_s = median(compared)
        better = after_s < (1 - self.rules.worth) * move.before_s
        judged = self._close(MoveState.BETTER if better else MoveState.NO_BETTER, after_s=after_s)
        self._recent.extend(compared)
        return judged

    def _close(self, state: MoveState, after_s: float | None = None) -> StageMove:
        self._recent.clear()
        self._since = 0
        return self._change(state=state, after_s=after_s)

    def _change(self, **figures: object) -> StageMove:
        self.history[-1] = self.history[-1].model_copy(update=figures)
        return self.history[-1]


def in_words(move: StageMove) -> str:
    """The move in one line for people: the forecast and the measurements."""
    what = f"{move.sid} (stage {move.from_stage}) → {move.newcomer} (stage {move.to_stage})"
    forecast = move.forecast
    expected = ""
    if forecast is not None:
        expected = (
            f"; predicted {forecast.step_before_s:.3f} → {forecast.step_after_s:.3f} s a step, cost "
            f"{forecast.cost_s:.1f} s, gain {forecast.gain_s:.1f} s in {forecast.steps_left} steps"
        )
    measured = ""
    if move.cost_s is not None:
        measured = f"; measured cost {move.cost_s:.2f} s"
    if _judged(move):
        measured += f", {move.before_s:.3f} → {move.after_s:.3f} s a step"
    return f"{what}, {move.state.value.replace('_', ' ')}{expected}{measured}"


def _judged(move: StageMove) -> bool:
    return move.before_s is not None and move.after_s is not None
