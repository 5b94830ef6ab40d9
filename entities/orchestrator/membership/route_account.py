"""The account of a job's routes: weights and avoided instances, as forecast and as measured (ADR-0101).

They stand apart from the other changes, since they follow every sample and must hold none of them back. So
weights are judged only if nothing else changed until eight steps by them were measured; else the account says
why not. What was no better is taken back, and not tried again for a while. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from entities.orchestrator.planning.change_account import ChangeRules
from schemas.changes import OPEN_CHANGES, ROUTES, ChangeState, JobChange

KEPT = 8
"""Routes remembered in a job's record, beside the other changes."""


@dataclass(slots=True)
class RouteAccount:
    """The routes of one job. `history`: those in the job's record."""

    history: list[JobChange] = field(default_factory=list)
    rules: ChangeRules = field(default_factory=ChangeRules)
    retry_steps: int = 40
    """Steps for which a module does not try again what was no better: by then devices may be others."""
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    _after: list[float] = field(default_factory=list)

    @property
    def open(self) -> JobChange | None:
        """The one that is being measured, if there is one."""
        last = self.history[-1] if self.history else None
        return last if last is not None and last.state in OPEN_CHANGES else None

    @property
    def recorded(self) -> tuple[JobChange, ...]:
        """The latest, for the job's record."""
        return tuple(self.history[-KEPT:])

    def unwise(self, direction: str, step: int) -> str:
        """Why this is not tried now; empty if it may be. `step`: the open one."""
        for change in reversed(self.history):
            if change.direction == direction and change.state is ChangeState.NO_BETTER:
                if step - change.step < self.retry_steps:
                    return (
                        f"was tried at step {change.step} (no better: {change.before_s:.3f} → "
                        f"{change.after_s:.3f} s a step); it may be tried again from step "
                        f"{change.step + self.retry_steps}"
                    )
                return ""
        return ""

    def begin(self, change: JobChange, elsewhere: str) -> list[JobChange]:
        """Notes routes that were adopted. `elsewhere`: another change that is not judged yet, in words.

        Returns:
            What has changed in the account.
        """
        news = []
        if self.open is not None:  # the steps under it are what this one is compared with
            steps = self._after[self.rules.settle_steps :]
            news = self.disturbed(f"{change.what} came after it")
            self._recent.extend(steps)
        known = len(self._recent)
        before_s = median(self._recent) if known >= self.rules.min_steps else None
        why = elsewhere or ("" if before_s else f"only {known} steps are known to compare with")
        begun = change.model_copy(
            update={
                "before_s": before_s,
                "state": ChangeState.UNDONE if why else ChangeState.IN_EFFECT,
                "note": why and f"not judged: {why}",
            }
        )
        self.history = [*self.history[-KEPT + 1 :], begun]
        self._after.clear()
        if why:
            self._recent.clear()
        return [*news, begun]

    def decided(self, step_s: float, *, last: bool = False) -> JobChange | None:
        """Counts a decided step; returns the routes that it judges. `last`: there is no further one."""
        change = self.open
        if change is None:
            self._recent.append(step_s)
            return None
        self._after.append(step_s)
        compared = self._after[self.rules.settle_steps :]
        if len(compared) >= self.rules.check_steps:
            return self._judge(change, compared)
        return self._close(f"the job ended {len(self._after)} steps after it") if last else None

    def disturbed(self, why: str) -> list[JobChange]:
        """Something else changed: what is being measured gets no verdict."""
        if self.open is not None:
            return [self._close(f"{why}, {len(self._after)} steps later" if self._after else why)]
        self._recent.clear()
        return []

    def ended(self, direction: str) -> list[JobChange]:
        """What was adopted ends, by its validity or because a module gave way.

        Whichever it was, steps by the routes that are left can't be compared with those before.
        """
        change = self.open
        ours = change is not None and change.direction == direction
        return self.disturbed("it ended" if ours else f"{direction} ended")

    def _judge(self, change: JobChange, compared: Sequence[float]) -> JobChange:
        after_s = median(compared)
        assert change.before_s is not None
        assert change.forecast is not None
        saving = change.forecast.measured_saving(change.before_s, after_s)
        better = saving > self.rules.worth
        self._recent.clear()
        self._recent.extend(compared)
        return self._note(state=ChangeState.BETTER if better else ChangeState.NO_BETTER, after_s=after_s)

    def _close(self, why: str) -> JobChange:
        self._recent.clear()
        return self._note(state=ChangeState.UNDONE, note=f"not judged: {why}")

    def _note(self, **figures: object) -> JobChange:
        self.history[-1] = self.history[-1].model_copy(update=figures)
        return self.history[-1]


def split(changes: Sequence[JobChange]) -> tuple[list[JobChange], list[JobChange]]:
    """A record's changes: those of the account of changes, and routes."""
    return [each for each in changes if each.kind not in ROUTES], [
        each for each in changes if each.kind in ROUTES
    ]
