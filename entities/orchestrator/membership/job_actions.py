"""What a job does of what modules and the orchestrator's own loop suggest (ADR-0092).

Arbitration has adopted a suggestion before it comes here; the job may still decline it, because it is
impossible now or because its forecast is not worth it. Changes that alter the speed of steps go through the
job's account of changes, which has those taken back that were no better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from bus.logs import get_logger
from entities.orchestrator.checkpointing.checkpoints import Checkpoints
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.membership.job_changes import AskedRecut, JobChanges, routes_of
from entities.orchestrator.membership.membership_changes import MembershipChanges
from entities.orchestrator.membership.rebalancing import Rebalancing
from entities.orchestrator.membership.recut_plan import RecutProposal, RecutQuestion, recut_proposal
from entities.orchestrator.membership.recutting import Recutting
from entities.orchestrator.membership.slot_holding import SlotHolding
from entities.orchestrator.planning.scaling import working_units
from entities.orchestrator.transaction.reduction_layout import EVEN, ReductionLayout
from entities.planner.planning_process import beside_the_loop
from schemas.actions import (
    CUT,
    REPLICAS,
    Action,
    CheckpointNow,
    ExpectFailures,
    Migrate,
    MoveInstance,
    Recut,
    RouteAction,
    Scale,
    SetAlgorithm,
    SetRate,
    SetReduction,
    SetWindow,
    forecast_of,
    knob_of,
    layout_in_words,
    value_of,
)
from schemas.automation import OWN_LOOP, Automation
from schemas.changes import ChangeKind, Forecast, JobChange
from schemas.errors import BadInput, Conflict
from schemas.job import JobState
from schemas.recut import Cuts, RecutJob, RecutRecord, cuts_text
from schemas.task_graph import ModelTopology, TaskGraph, slot_in_words

log = get_logger("orchestrator")

LOOKS_KEPT = 8
"""Suggested re-cuts of which it is known what they would be: each is decided about right after the look."""
NOT_LOOKED_AT = "the job has just changed, or another re-cut is looked at: suggest it again"


class ChangesTraining(Protocol):
    """A job's training, as far as it can be changed while it runs."""

    rebalancing: Rebalancing
    changes: MembershipChanges
    job_changes: JobChanges
    recutting: Recutting

    @property
    def step(self) -> int:
        """The step that is open."""


class JobActions:
    """Carries adopted suggestions out for one job's run.

    Args:
        largest_windows: of each stage: what instances have memory for.
        topology: the job's model as analysed; None: not known to this orchestrator.
        propose: answers a question after a cut, beside the loop: for thousands of layers that takes long.
    """

    def __init__(
        self,
        job: JobContext,
        training: ChangesTraining,
        checkpoints: Checkpoints,
        holding: SlotHolding,
        *,
        largest_windows: Callable[[], dict[int, int]],
        topology: Callable[[], ModelTopology | None] = lambda: None,
        propose: Callable[[RecutQuestion], Awaitable[RecutProposal]] = lambda question: beside_the_loop(
            recut_proposal, question
        ),
    ) -> None:
        self._job = job
        self._rebalancing = training.rebalancing
        self._membership = training.changes
        self._changes = training.job_changes
        self._training = training
        self._checkpoints = checkpoints
        self._holding = holding
        self._largest_windows = largest_windows
        self._topology = topology
        self._propose = propose
        self._former: dict[str, Callable[[], None]] = {}  # knob → what sets it as it was before
        self._leaving: dict[str, tuple[str, Forecast]] = {}  # instance that migrates → by whom
        self._looked: deque[tuple[Recut, RecutProposal | str]] = deque(maxlen=LOOKS_KEPT)
        self._freed: list[tuple[str, str]] = []  # knob, and who had it changed
        self._cutting: dict[int, AskedRecut] = {}  # by the plan's revision
        self.on_set: Callable[[str, str | None, str], None] = lambda knob, value, by: None
        """Called with knob, value and user where what a person has set of the job's cut is in force."""
        training.changes.on_hand_over = self._handed_over
        training.changes.on_stay = self._stays
        training.job_changes.on_routes_worse = self._routes_worse
        training.recutting.on_in_force = self._cut_anew
        training.recutting.on_dropped = self._not_cut
        training.job_changes.on_free = job.queue.again
        holding.on_growth = self._grown
        holding.too_soon = lambda: self.under_way or self._changes.account.too_soon()

    # --- whether ------------------------------------------------------------------------------------
    @property
    def under_way(self) -> str:
        """What was adopted and has not begun, or is being made, in words; empty: nothing."""
        if self._rebalancing.under_way:
            return f"{self._rebalancing.under_way} is changing its stage"
        return self._training.recutting.under_way or self._leaves()

    def _leaves(self) -> str:
        """Who is about to leave its slot for another one, in words."""
        return "" if not self._leaving else f"{', '.join(sorted(self._leaving))} is about to leave its slot"

    async def look(self, action: Action) -> None:
        """Finds what a suggested re-cut would be, for `objection` and `carry_out`, which may not wait."""
        if not isinstance(action, Recut) or self._declined(action):
            return
        message = self._recut_message(action.cuts, action.revision, "", dry_run=True)
        try:
            question = self._training.recutting.question(message, self._known_topology())
            self._looked.append((action, await self._propose(question)))
        except (BadInput, Conflict) as refused:
            self._looked.append((action, refused.text))

    def objection(self, action: Action) -> str:
        """Why the job does not do this now; empty if it does. Nothing is changed. `look` comes first."""
        return self._declined(action) or self._impossible(action)

    def _declined(self, action: Action) -> str:
        """Why the job does not want this now, as far as that is known without a look at what it takes."""
        state = self._job.store.record.state
        if state is not JobState.RUNNING:
            return f"the job is {state}"
        if forecast_of(action) is not None and (why := self._training.recutting.under_way or self._leaves()):
            return why
        match action:
            case MoveInstance(sid=sid, stage=stage, forecast=forecast):
                why = self._rebalancing.objection(sid, stage, forecast)
                return why and f"{sid} does not move to stage {stage}: {why}"
            case ExpectFailures() | CheckpointNow():
                return ""
        promised = forecast_of(action)
        if promised is None:
            return ""
        if why := self.under_way:
            return why
        kind, direction, reverse = self._way(action)
        account = self._changes.account
        return account.obstacle() or account.unwise(kind, direction, reverse, promised)

    def _impossible(self, action: Action) -> str:
        match action:
            case SetWindow(stage=stage, in_flight=in_flight):
                most = self._largest_windows().get(stage, 0)
                if in_flight > most:
                    return (
                        f"{in_flight} microbatches in flight in stage {stage}: its instances may hold "
                        f"{most} of each sender"
                    )
            case Scale(replicas=replicas) if replicas > self._holding.replicas:
                return self._job.queue.no_growth(self._job.name)
            case Recut():
                try:
                    self._begin_recut(action, "", dry_run=True)
                except Conflict as refused:
                    return refused.text
        return ""

    def _begin_recut(self, action: Recut, by: str, *, dry_run: bool) -> int:
        """Has the job cut as was proposed, or tries whether it can be; returns the revision of the plan.

        Raises:
            Conflict: it is impossible now.
        """
        found = next((found for looked, found in self._looked if looked is action), NOT_LOOKED_AT)
        if isinstance(found, str):
            raise Conflict(found)
        message = self._recut_message(action.cuts, action.revision, by, dry_run=dry_run)
        return self._training.recutting.begin(message, found).plan

    def _recut_message(self, cuts: Cuts | None, revision: int | None, by: str, *, dry_run: bool) -> RecutJob:
        return RecutJob(job=self._job.name, user=by, cuts=cuts, revision=revision, dry_run=dry_run)

    def _known_topology(self) -> ModelTopology:
        if (topology := self._topology()) is None:
            raise Conflict("this orchestrator has not seen the model analysed: `dmsc recut` has that done")
        return topology

    def _way(self, action: Action) -> tuple[ChangeKind, str, str]:
        """The kind of a change, its direction, and the one that takes it back."""
        match action:
            case SetWindow(stage=stage, in_flight=in_flight):
                up = in_flight > self._job.policies.windows().get(stage, 0)
                larger, smaller = f"larger window of stage {stage}", f"smaller window of stage {stage}"
                return ("window", larger, smaller) if up else ("window", smaller, larger)
            case SetRate(per_s=per_s):
                admitted_per_s = self._job.policies.admitted_per_s
                up = bool(admitted_per_s) and per_s > admitted_per_s
                higher, lower = "higher admission rate", "lower admission rate"
                return ("rate", higher, lower) if up else ("rate", lower, higher)
            case SetReduction(stage=stage):
                knob = knob_of(action)
                return "reduction", f"{knob}: {value_of(action)}", f"{knob}: {self._laid_out(stage)}"
            case SetAlgorithm(algorithm=algorithm):
                policy = self._job.policies.policy
                return "algorithm", f"algorithm {algorithm}", f"algorithm {policy and policy.algorithm}"
            case Scale(replicas=replicas):
                up = replicas > self._holding.replicas
                return ("scale", "more replicas", "fewer") if up else ("scale", "fewer", "more replicas")
            case Recut(cuts=cuts):
                present = self._job.instances.graph.cuts
                return "recut", f"cut {cuts_text(cuts) if cuts else 'by speeds'}", f"cut {cuts_text(present)}"
            case Migrate(sid=sid):
                here = self._place_of(sid)
                return "migrate", f"{sid} leaves {here}", f"{sid} goes to {here}"
        raise AssertionError(f"{action.action} is no change")

    # --- carrying it out ------------------------------------------------------------------------------
    def carry_out(self, action: Action, by: str, valid_s: float, reason: str = "") -> int | None:
        """Does what was adopted; returns the revision of the policy that says so, if there is one.

        Raises:
            Conflict: the job declines it now; the text says why.
        """
        if why := self.objection(action):
            raise Conflict(why)
        match action:
            case MoveInstance(sid=sid, stage=stage, forecast=forecast):
                self._rebalancing.ask(sid, stage, by, forecast)
            case ExpectFailures(between_s=between_s):
                self._checkpoints.expect(between_s, valid_s, by)
            case CheckpointNow():
                self._checkpoints.ask(by)
            case SetWindow() | SetRate() | SetReduction() | SetAlgorithm():
                return self._set(action, by, reason)
            case Scale(replicas=replicas, forecast=forecast):
                self._scale(replicas, by, forecast, reason)
            case Recut(forecast=forecast):
                plan = self._begin_recut(action, by, dry_run=False)
                self._cutting[plan] = AskedRecut(by=by, forecast=forecast)
            case Migrate(sid=sid, node=node, forecast=forecast):
                if why := self._membership.migrate(sid, node):
                    raise Conflict(f"{sid} does not leave its slot: {why}")
                self._leaving[sid] = by, forecast
        return None

    def release(self, knob: str) -> None:
        """Nobody holds this knob any more: what was set goes back to what it was before."""
        if (former := self._former.pop(knob, None)) is not None:
            self._changes.disturbed()
            former()

    # --- routes ---------------------------------------------------------------------------------------
    def routes_objection(self, action: RouteAction, by: str) -> str:
        """Why weights, or an instance avoided, with a forecast are not tried now; empty if they may be."""
        if action.forecast is None:
            return ""
        return self._changes.routes.unwise(routes_of(action, by), self._training.step)

    def routed(self, action: RouteAction, by: str) -> None:
        """Weights, or an instance avoided, are in force: with a forecast they are measured."""
        self._changes.begin_routes(action, by, self._training.step)

    def unrouted(self, knob: str, by: str) -> None:
        """What was adopted of weights, or of an instance avoided, has lapsed."""
        self._changes.end_routes(f"{knob} by {by}")

    def _routes_worse(self, change: JobChange) -> None:
        self._freed.append((change.direction.removesuffix(f" by {change.by}"), change.by))

    def freed(self) -> list[tuple[str, str]]:
        """The knobs whose change was taken back since this was last asked, and whose change that was."""
        freed, self._freed = self._freed, []
        return freed

    def _laid_out(self, stage: int) -> str:
        layout = self._job.instances.layouts.wanted.get(stage, EVEN)
        return layout_in_words(layout.parts, layout.order)

    def _set(
        self, action: SetWindow | SetRate | SetReduction | SetAlgorithm, by: str, reason: str
    ) -> int | None:
        """Sets a window, the admission rate, the algorithm, or how a stage's sums are reduced.

        Returns the revision of the policy that says so; a reduction is no matter of the policy.
        """
        policies, knob = self._job.policies, knob_of(action)
        kind, direction, reverse = self._way(action)
        text = f"{by}: {reason}"
        was_set = knob in self._former
        revision: int | None = None
        if isinstance(action, SetWindow):
            stage, before = action.stage, policies.windows()[action.stage]
            what = f"{knob}: {before} → {action.in_flight}"
            revision = policies.revise(text, window=(stage, action.in_flight))

            def former_value() -> None:
                policies.revise(f"{knob} is {before} again", window=(stage, before))

        elif isinstance(action, SetRate):
            stage, rate = 0, policies.admitted_per_s
            rate_text = f"{rate:g} microbatches a second" if rate else "no limit"
            what = f"{knob}: {rate_text} → {value_of(action)}"
            revision = policies.revise(text, admitted_per_s=action.per_s)

            def former_value() -> None:
                policies.revise(f"{knob}: {rate_text} again", admitted_per_s=rate)

        elif isinstance(action, SetReduction):
            stage = reduced = action.stage
            layout = self._job.instances.layouts.wanted.get(reduced, EVEN)
            what = f"{knob}: {self._laid_out(reduced)} → {value_of(action)}"
            self._job.instances.layouts.want(reduced, ReductionLayout(parts=action.parts, order=action.order))

            def former_value() -> None:
                self._job.instances.layouts.want(reduced, layout)

        else:
            assert policies.policy is not None
            stage, former = None, policies.policy.algorithm
            what = f"{knob}: {former} → {action.algorithm}"
            revision = policies.revise(text, algorithm=action.algorithm)

            def former_value() -> None:
                policies.revise(f"{knob} is {former} again", algorithm=former)

        self._former.setdefault(knob, former_value)
        change = JobChange(
            kind=kind,
            what=what,
            direction=direction,
            reverse=reverse,
            to_stage=stage,
            step=self._training.step,
            by=by,
            forecast=action.forecast,
        )

        def take_back(_: JobChange) -> None:
            if was_set:  # what was set before was better, and stays until it lapses
                former_value()
            else:
                self._take_back(knob, by)

        self._changes.begin(change, take_back)
        return revision

    def _take_back(self, knob: str, by: str) -> None:
        self._freed.append((knob, by))
        if (former := self._former.pop(knob, None)) is not None:
            former()

    def _scale(self, replicas: int, by: str, forecast: Forecast, reason: str) -> None:
        """Has the job take or leave slots, as the queue does; the queue then gives it no more than these."""
        before, graph = self._holding.replicas, self._job.instances.graph
        if not self._holding.change_size(replicas, f"{by}: {reason}"):
            raise Conflict(f"{replicas} replicas: there is no room for them, or the job can't change now")
        self._holding.prefer(replicas)
        self._former.setdefault(REPLICAS, lambda: self._holding.prefer(None))
        self._begin_scale(before, replicas, graph, by, forecast)

    def _grown(self, before: int, replicas: int, graph: TaskGraph) -> None:
        """The queue has given the job idle slots: whether they bring what was forecast is measured."""
        step_s = self._changes.account.step_s
        if step_s is None or self._holding.automation is not Automation.ACT:
            return
        forecast = self._holding.grown(before, replicas, step_s)
        self._begin_scale(before, replicas, graph, OWN_LOOP, forecast)

    def _begin_scale(self, before: int, replicas: int, graph: TaskGraph, by: str, forecast: Forecast) -> None:
        """Notes the change of size. `graph`: that before it."""
        ways = ("more replicas", "fewer") if replicas > before else ("fewer", "more replicas")
        added = working_units(self._job.instances.graph) - working_units(graph)
        change = JobChange(
            kind="scale",
            what=f"replicas: {before} → {replicas}",
            direction=ways[0],
            reverse=ways[1],
            newcomers=tuple(sorted(added)),
            replicas=(before, replicas),
            step=self._training.step,
            by=by,
            forecast=forecast,
        )

        def take_back(_: JobChange) -> None:
            self._take_back(REPLICAS, by)
            if replicas > before:  # else the queue would have it grow again
                self._holding.prefer(before)
            if not self._holding.change_size(before, f"{OWN_LOOP}: {replicas} replicas were no better"):
                raise Conflict("the job can't change its size now")

        self._changes.begin(change, take_back)

    def asked_by_person(self, plan: int, user: str) -> None:
        """A person has the job cut by this plan: no module changes the cut once it is in force."""
        self._cutting[plan] = AskedRecut(by=user, forecast=None, pins=True)

    def _cut_anew(self, record: RecutRecord) -> None:
        """A plan is in force: it is judged like any change, whoever wanted it."""
        asked = self._cutting.pop(record.plan, AskedRecut(by=record.by, forecast=None))
        if asked.pins:
            self.on_set(CUT, f"plan {record.plan}", asked.by)
        before, after = cuts_text(record.before), cuts_text(record.cuts)
        self._changes.begin(
            JobChange(
                kind="recut",
                what=f"cut: {before} → {after}",
                direction=f"cut {after}",
                reverse=f"cut {before}",
                step=self._training.step,
                by=asked.by,
                forecast=asked.forecast,
                takes_back=asked.takes_back,
            ),
            lambda change: self._cut_back(record, asked.by),
        )

    def _not_cut(self, record: RecutRecord) -> None:
        """A plan was given up before it was in force: nobody holds the cut because of it."""
        asked = self._cutting.pop(record.plan, None)
        if asked is not None and not asked.pins:
            self._freed.append((CUT, asked.by))
        self._job.queue.again()

    def _cut_back(self, record: RecutRecord, by: str) -> None:
        """Has the job cut again as it was: steps have become longer.

        Raises:
            Conflict: it is impossible now.
        """
        self._freed.append((CUT, by))
        message = self._recut_message(record.before, record.plan, OWN_LOOP, dry_run=False)
        question = self._training.recutting.question(message, self._known_topology())
        self._job.tasks.spawn(self._cut_as_before(message, question))

    async def _cut_as_before(self, message: RecutJob, question: RecutQuestion) -> None:
        try:
            proposal = await self._propose(question)
            if why := self.under_way:
                raise Conflict(why)
            plan = self._training.recutting.begin(message, proposal).plan
        except (BadInput, Conflict) as refused:
            log.info("not taken back", job=self._job.name, change="cut", reason=refused.text)
            return
        self._cutting[plan] = AskedRecut(by=OWN_LOOP, forecast=None, takes_back=True)

    def _stays(self, sid: str) -> None:
        """It does not leave after all: if it leaves later, that is another one's doing."""
        if self._leaving.pop(sid, None) is not None:
            self._job.queue.again()  # growth that waited for it need not wait any more

    def _handed_over(self, sid: str) -> None:
        """An instance leaves its slot now, and another incarnation takes its place."""
        if (asked := self._leaving.pop(sid, None)) is None:
            return
        by, forecast = asked
        here = self._place_of(sid)
        self._changes.begin(
            JobChange(
                kind="migrate",
                what=f"{sid} leaves {here}",
                direction=f"{sid} leaves {here}",
                reverse=f"{sid} goes to {here}",
                sid=sid,
                newcomers=(sid,),
                from_stage=self._job.instances.graph.unit(sid).stage,
                step=self._training.step,
                by=by,
                forecast=forecast,
            )
        )

    def _place_of(self, sid: str) -> str:
        place = self._job.instances.graph.placement(sid)
        return slot_in_words(place.cluster, place.node, place.slot)
