"""The account of a job's changes: which one is allowed, what it cost, whether it was worth it (ADR-0092).

One change at a time is under judgement, and each is judged by measured step times before the next. So a wrong
forecast costs one change, which is taken back where that brings something, and is not repeated. The account
gets every decided step, and keeps the changes for the job's record. Weights are no part of it: they change
with every sample (`membership.route_account`). Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from schemas.changes import OPEN_CHANGES, ChangeKind, ChangeState, Forecast, JobChange, JobObjective
from schemas.job import StepResult

KEPT = 16
"""Changes remembered in a job's record."""

SINCE_THEN = 2
"""The least number of steps by which a slot is seen to have become faster or slower."""

CHEAP: frozenset[ChangeKind] = frozenset({"window", "rate", "reduction", "algorithm"})
"""Changes that cost nothing to make or to take back: a smaller gain is enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeRules:
    """When a suggested change is allowed. A person's change is allowed wherever it is possible."""

    min_saving: float = 0.1
    """Least part of a step's time, or of what its objective counts, that the forecast must save."""

    min_cheap_saving: float = 0.03
    """The same of a change that costs nothing."""

    min_steps: int = 4
    """Steps that must be measured before a change, to compare with."""

    settle_steps: int = 2
    """First steps in effect that are not compared: links are built, and senders learn speeds."""

    check_steps: int = 8
    """Steps after these by whose median a change is judged."""

    cooldown_steps: int = 8
    """Steps from a verdict until the next change, unless a slot has become much faster or slower since."""

    agreement: float = 1.5
    """Largest ratio between the present time of a step and the one that the forecast assumes."""

    alike: float = 1.5
    """A slot that has become so many times faster or slower since a change makes its verdict void."""

    alike_cut: float = 2.5
    """The same of a re-cut. With other layers a slot seems to be faster or slower, for what they take is
    estimated."""

    worth: float = 0.02
    """A change that saved less than this part of a step counts as no better: less is noise."""


@dataclass(slots=True)
class ChangeAccount:
    """The changes of one job. `history`: those in the job's record."""

    history: list[JobChange] = field(default_factory=list)
    rules: ChangeRules = field(default_factory=ChangeRules)
    speeds: Mapping[str, float] = field(default_factory=dict)
    """What the job's slots show now, by their names: what was found out under other speeds says nothing."""
    _speeds_then: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """The same as each change began, by its step."""
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=6))
    _after: list[float] = field(default_factory=list)
    _lost_s: float = 0.0
    _since: int | None = None  # steps since the last verdict; None: there was none

    @property
    def open(self) -> JobChange | None:
        """The change that is not judged yet, if there is one."""
        last = self.history[-1] if self.history else None
        return last if last is not None and last.state in OPEN_CHANGES else None

    @property
    def recorded(self) -> tuple[JobChange, ...]:
        """The latest changes, for the job's record."""
        return tuple(self.history[-KEPT:])

    @property
    def step_s(self) -> float | None:
        """A step now: the median of the last ones; None: none was measured since the last change.

        Where the latest are others by far, only these count: something has become slow.
        """
        if not self._recent:
            return None
        usual, latest = median(self._recent), median([*self._recent][-3:])
        return latest if not 0.8 < latest / usual < 1.25 else usual

    # --- whether a change is allowed --------------------------------------------------------------------
    def obstacle(self) -> str:
        """Why nothing can be changed now, for a module and a person alike; empty if it can."""
        return f"{self.open.what} is not judged yet" if self.open is not None else ""

    def too_soon(self) -> str:
        """Why nothing that is suggested is allowed now, whatever it is; empty if something may be."""
        known, since = len(self._recent), self._since
        if self.obstacle():
            return self.obstacle()
        if known < self.rules.min_steps:
            return f"only {known} steps by this crew are known: nothing to compare with"
        if since is not None and since < self.rules.cooldown_steps and not self._void(self.history[-1]):
            return f"the last change was judged {since} steps ago; wait for {self.rules.cooldown_steps}"
        return ""

    def unwise(self, kind: ChangeKind, direction: str, reverse: str, forecast: Forecast) -> str:
        """Why a possible change that was suggested is declined; empty if it is allowed."""
        rules = self.rules
        least = rules.min_cheap_saving if kind in CHEAP else rules.min_saving
        timed = forecast.objective is JobObjective.TIME
        if forecast.saving < least:
            what = "a step" if timed else f"the {forecast.objective} of a step"
            return f"would save {forecast.saving:.0%} of {what}, less than {least:.0%}"
        if timed and forecast.gain_s <= forecast.cost_s:
            return f"would gain {forecast.gain_s:.1f} s and cost {forecast.cost_s:.1f} s"
        if why := self.too_soon():
            return why
        now_s = self.step_s
        assert now_s is not None
        if not any(
            1 / rules.agreement <= forecast.step_before_s / each <= rules.agreement
            for each in (now_s, self._recent[-1])
        ):
            return f"forecast for steps of {forecast.step_before_s:.3f} s, but they take {now_s:.3f} s"
        return self._precedent(direction, reverse, now_s)

    def _precedent(self, direction: str, reverse: str, now_s: float) -> str:
        """Why an earlier change speaks against this one; a step takes `now_s` now."""
        for change in reversed(self.history):
            if change.takes_back or self._other_speeds(change):
                continue
            if change.direction == direction and change.state in (ChangeState.NO_BETTER, ChangeState.FAILED):
                figures = (
                    f": {change.before_s:.3f} → {change.after_s:.3f} s a step" if _judged(change) else ""
                )
                return f"was tried at step {change.step} ({change.state.value}{figures})"
            if (
                change.direction == reverse
                and change.state is ChangeState.BETTER
                and change.after_s is not None
            ):
                if now_s >= (1 + self.rules.min_saving) * change.after_s:
                    return ""
                return (
                    f"would take back the change of step {change.step}, and a step still takes {now_s:.3f} s "
                    f"as after it ({change.after_s:.3f} s)"
                )
        return ""

    def _other_speeds(self, change: JobChange) -> bool:
        """Whether a slot has become so much faster or slower that the change may come out otherwise now."""
        return any(not 1 / self.rules.alike < ratio < self.rules.alike for ratio in self._ratios(change))

    def _void(self, change: JobChange) -> bool:
        """Whether slots have become so much faster or slower that a verdict would be about them.

        What the change itself may do to them is a part of its effect: more replicas on a host make its slots
        slower, fewer make them faster, and of other layers it is only estimated what a slot shows.
        """
        most = self.rules.alike_cut if change.kind == "recut" else self.rules.alike
        before, after = change.replicas or (0, 0)
        return any(
            (ratio >= most and after >= before) or (ratio <= 1 / most and after <= before)
            for ratio in self._ratios(change)
        )

    def _ratios(self, change: JobChange) -> Iterator[float]:
        """How many times as fast as when the change began each slot is now."""
        then = self._speeds_then.get(change.step, {})
        return (self.speeds[slot] / then[slot] for slot in then.keys() & self.speeds.keys())

    # --- the course of a change -------------------------------------------------------------------------
    def begin(self, change: JobChange) -> JobChange:
        """Notes that a change begins; returns it with the step time measured before it."""
        self.history = [*self.history[-KEPT + 1 :], change.model_copy(update={"before_s": self.step_s})]
        self._after, self._lost_s = [], 0.0
        kept = {one.step for one in self.history}
        self._speeds_then = {step: each for step, each in self._speeds_then.items() if step in kept}
        self._speeds_then[change.step] = dict(self.speeds)
        return self.history[-1]

    def decided(self, result: StepResult, *, last: bool = False) -> JobChange | None:
        """Counts a decided step; returns the change if it has changed.

        Args:
            result: the step's figures.
            last: there is no further step: the change is judged now.
        """
        news = None
        change = self.open
        self._since = None if self._since is None else self._since + 1
        if change is None:
            self._recent.append(result.step_s)
            return None
        if self._void(change):
            latest = [*self._after, result.step_s][-SINCE_THEN:]
            self._close(ChangeState.UNDONE)
            self._since = None
            self._recent.extend(latest)
            return self.history[-1]
        if change.state is ChangeState.UNDER_WAY:
            if not all(result.shares.get(sid) for sid in change.newcomers):
                self._lost_s += result.step_s - (change.before_s or result.step_s)
                return self._close(ChangeState.UNDONE) if last else None
            news = self._note(state=ChangeState.IN_EFFECT, cost_s=max(0.0, self._lost_s))
        self._after.append(result.step_s)
        compared = self._after[self.rules.settle_steps :]
        if len(compared) >= self.rules.check_steps or last:
            return self._judge(compared)
        return news

    def lost(self, seconds: float) -> None:
        """Training stood still for so long because of the change that is under way."""
        self._lost_s += seconds

    def fail(self) -> JobChange | None:
        """Notes that the change could not be made."""
        return self._close(ChangeState.FAILED) if self.open is not None else None

    def disturbed(self) -> JobChange | None:
        """Closes the change without a verdict: something else changed, so that times can't be compared."""
        return self._close(ChangeState.UNDONE) if self.open is not None else None

    def to_take_back(self, change: JobChange) -> bool:
        """Whether a judged change is taken back.

        What costs nothing to take back, or holds slots for nothing, is; another one only if it made steps
        longer.
        """
        if change.state is not ChangeState.NO_BETTER or change.takes_back or change.forecast is None:
            return False
        if change.kind in CHEAP or change.kind == "scale":
            return True
        if change.before_s is None or change.after_s is None:
            return False
        return change.forecast.measured_saving(change.before_s, change.after_s) < -self.rules.worth

    def _judge(self, compared: Sequence[float]) -> JobChange:
        change = self.history[-1]
        if not compared or change.before_s is None:
            return self._close(ChangeState.UNDONE)
        after_s = median(compared)
        judged = self._close(
            ChangeState.BETTER if self._is_better(change, after_s) else ChangeState.NO_BETTER, after_s=after_s
        )
        self._recent.extend(compared)
        return judged

    def _is_better(self, change: JobChange, after_s: float) -> bool:
        assert change.before_s is not None
        forecast = change.forecast
        if forecast is None:
            return 1 - after_s / change.before_s > self.rules.worth
        return forecast.measured_saving(change.before_s, after_s) > self.rules.worth

    def _close(self, state: ChangeState, after_s: float | None = None) -> JobChange:
        self._recent.clear()
        self._since = 0
        return self._note(state=state, after_s=after_s)

    def _note(self, **figures: object) -> JobChange:
        self.history[-1] = self.history[-1].model_copy(update=figures)
        return self.history[-1]


def in_words(change: JobChange) -> str:
    """The change in one line for people: the forecast and the measurements."""
    forecast = change.forecast
    expected = ""
    if forecast is not None:
        expected = (
            f"; predicted {forecast.step_before_s:.3f} → {forecast.step_after_s:.3f} s a step, cost "
            f"{forecast.cost_s:.1f} s, gain {forecast.gain_s:.1f} s in {forecast.steps_left} steps"
        )
        if forecast.objective is not JobObjective.TIME:
            expected += f", {forecast.saving:.0%} less {forecast.objective}"
    measured = ""
    if change.cost_s is not None:
        measured = f"; measured cost {change.cost_s:.2f} s"
    if _judged(change):
        measured += f", {change.before_s:.3f} → {change.after_s:.3f} s a step"
    back = "taken back: " if change.takes_back else ""
    why = f"; {change.note}" if change.note else ""
    return f"{back}{change.what}, {change.state.value.replace('_', ' ')}{expected}{measured}{why}"


def _judged(change: JobChange) -> bool:
    return change.before_s is not None and change.after_s is not None
