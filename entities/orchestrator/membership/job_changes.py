"""The changes of one job under way (ADR-0092): begun, judged by measured steps, taken back, told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bus.logs import get_logger
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.membership.route_account import RouteAccount, split
from entities.orchestrator.planning.change_account import ChangeAccount, in_words
from schemas.actions import RouteAction, SetWeights, knob_of, value_of
from schemas.automation import Automation, lower
from schemas.changes import ChangeState, Forecast, JobChange
from schemas.errors import DmscError
from schemas.job import StepResult

log = get_logger("orchestrator")

STAGES = " stages"
"""The end of the direction of a change of their number."""

TakeBack = Callable[[JobChange], None]
"""Makes a change undone that was no better; raises `Conflict` where that can't be now."""


@dataclass(frozen=True, kw_only=True)
class AskedRecut:
    """A re-cut that is being prepared, by whom, and what was forecast.

    `takes_back`: it undoes the one before. `pins`: a person wants this very cut.
    """

    by: str
    forecast: Forecast | None
    takes_back: bool = False
    pins: bool = False


class JobChanges:
    """The account of one job's changes, and what it does with each verdict."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        changes, routes = split(job.store.record.changes)
        self.account, self.routes = ChangeAccount(changes), RouteAccount(routes)
        self._take_back: TakeBack | None = None
        self.on_routes_worse: Callable[[JobChange], None] = lambda change: None
        """Called with routes that were no better: their validity is to end."""

        self.on_free: Callable[[], None] = lambda: None
        """Called when another change may begin."""

    def begin(self, change: JobChange, take_back: TakeBack | None = None) -> JobChange:
        """Notes that a change begins, and tells it. `take_back` is called if it is judged as no better."""
        self.disturb_routes(f"{change.what} came after it")
        self.disturbed()  # what is under judgement can't be told from this one
        self._take_back = take_back
        begun = self.account.begin(change)
        self._tell(begun)
        return begun

    def begin_routes(self, action: RouteAction, by: str, step: int) -> None:
        """Notes weights, or an avoided instance: with a forecast they are measured, and hold nothing back."""
        knob, forecast = knob_of(action), action.forecast
        if forecast is None:
            self.disturb_routes(f"{knob} by {by} came after it")
            return
        change = JobChange(
            kind="weights" if isinstance(action, SetWeights) else "avoidance",
            what=f"{knob}: {value_of(action)}",
            direction=routes_of(action, by),
            sid=None if isinstance(action, SetWeights) else action.sid,
            to_stage=action.stage if isinstance(action, SetWeights) else None,
            step=step,
            by=by,
            forecast=forecast,
        )
        for routes in self.routes.begin(change, self.account.obstacle()):
            self._tell(routes)

    def end_routes(self, direction: str) -> None:
        """Routes ended, by their validity or otherwise."""
        for routes in self.routes.ended(direction):
            self._tell(routes)

    def disturb_routes(self, why: str) -> None:
        """Other routes came: what is being measured gets no verdict, nor do steps count for the next."""
        for routes in self.routes.disturbed(why):
            self._tell(routes)

    def decided(self, result: StepResult, *, last: bool) -> None:
        """A step was decided: its figures count for the change under judgement."""
        routes = self.routes.decided(result.step_s, last=last)
        if routes is not None:
            self._tell(routes)
            if routes.state is ChangeState.NO_BETTER and not last:
                self.on_routes_worse(routes)
        waited = self.account.too_soon()
        change = self.account.decided(result, last=last)
        if waited and not self.account.too_soon():  # slots that joined meanwhile may be of use now
            self.on_free()
        if change is None:
            return
        self._tell(change)
        if not last and self.account.to_take_back(change) and self._take_back is not None:
            take_back, self._take_back = self._take_back, None
            if self._automation is not Automation.ACT:
                log.info("not taken back", job=self._job.name, change=change.what, reason=self._automation)
                return
            self.disturb_routes(f"{change.what} was taken back")
            try:
                take_back(change)
            except DmscError as error:
                log.info("not taken back", job=self._job.name, change=change.what, reason=error.text)

    def deployed(self) -> None:
        """All instances are new. A change of the number of stages is made so; it is under judgement."""
        change = self.account.open
        if change is None or not change.direction.endswith(STAGES):
            self.disturbed()

    def fail(self) -> None:
        """The change could not be made."""
        self._told(self.account.fail())

    def disturbed(self) -> None:
        """Something else changed: the time of steps no longer says anything about the change."""
        self._told(self.account.disturbed())
        self.disturb_routes("the job's members or their speed changed")

    def rolled_back(self, stage: int | None) -> None:
        """All went back to a checkpoint. A stage's only instance that migrates has that by intention."""
        change = self.account.open
        if change is None or change.kind != "migrate" or change.from_stage != stage:
            self.disturbed()

    @property
    def _automation(self) -> Automation:
        """How far the job may be changed without a person now."""
        return lower(self._job.mesh.automation, self._job.store.record.automated)

    def _told(self, change: JobChange | None) -> None:
        if change is not None:
            self._tell(change)

    def _tell(self, change: JobChange) -> None:
        log.info("change", job=self._job.name, change=in_words(change))
        recorded = sorted((*self.account.recorded, *self.routes.recorded), key=lambda each: each.step)
        self._job.events.changing(change, tuple(recorded))


def routes_of(action: RouteAction, by: str) -> str:
    """What the account of routes knows an action by: its knob and its module."""
    return f"{knob_of(action)} by {by}"
