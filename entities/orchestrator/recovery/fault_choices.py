"""A fault at hand: modules are asked, their way is gone and measured (ADR-0099).

Whatever they say costs time at most. A retry or a wait puts off that an instance is given up, as if the fault
had been reported later; the time is bounded by what the job's losses have cost. Giving an instance up is what
the step transaction survives at any time. A wish about a node is dropped where it leaves no room.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from weakref import WeakValueDictionary

from bus.logs import get_logger
from bus.subjects import FAULT_VERDICT
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.recovery.joining import JoiningMembers
from entities.orchestrator.step.step_owner import StepOwner
from entities.orchestrator.transaction.step_events import Stalled
from schemas.automation import OWN_LOOP
from schemas.errors import DmscError
from schemas.fault import FaultKind, FaultReport, FaultVerdict
from schemas.fault_choices import (
    FAULT_CHOICES_KEPT,
    FaultChoice,
    FaultCosts,
    FaultOutcome,
    FaultQuestion,
    FaultRuling,
    FaultWay,
    Replace,
    Wait,
)
from schemas.step import Member, Phase

log = get_logger("orchestrator")

VAIN = 3
"""Retries and waits of a module in a row that were no better, after which this job takes no more of them."""
LOSSES = 16
"""Losses whose median cost is what the next one is expected to cost."""
REMEMBERED = 1024
"""Instances of which it is known that modules were asked about them."""


@dataclass(slots=True)
class _OpenChoice:
    """A choice whose outcome is not known yet.

    `first_step`: committed, it shows that training goes on. `tried_at`: since when the instance is asked once
    more, so that another report of its fault ends it.
    """

    choice: FaultChoice
    began: float
    first_step: int
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    tried_at: float | None = None
    again: bool = False
    in_vain: bool = False


class FaultChoices:
    """Asks modules about one job's faults, and carries out what is ruled.

    `lose(member, why, event_text)` gives an instance up.
    """

    def __init__(
        self,
        job: JobContext,
        step_owner: StepOwner,
        joining: JoiningMembers,
        lose: Callable[[Member, str, str], None],
    ) -> None:
        self._job = job
        self._times = job.times.recovery
        self._step_owner = step_owner
        self._joining = joining
        self._lose = lose
        former = job.store.record.fault_choices
        self._recorded = deque(map(_unknown_if_open, former), FAULT_CHOICES_KEPT)
        self._losses = deque(
            (one.took_s for one in former if one.lost and one.way == "replace" and one.took_s is not None),
            LOSSES,
        )
        self._open: dict[Member, _OpenChoice] = {}
        self._asked: dict[tuple[Member, FaultWay], float] = {}
        self._weighing: WeakValueDictionary[Member, asyncio.Lock] = WeakValueDictionary()
        self._gave_up_at = float("-inf")

    # --- before an instance is given up ---------------------------------------------------------------
    async def weigh(self, member: Member, report: FaultReport, verdict: FaultVerdict) -> FaultVerdict:
        """The verdict on an instance after modules have had their say; that on one that has ended stands.

        A verdict that they change is published as well. Several neighbours may report the same fault at once:
        modules are asked about it once.
        """
        lock = self._weighing.setdefault(member, asyncio.Lock())
        async with lock:
            return await self._weigh(member, report, verdict)

    async def _weigh(self, member: Member, report: FaultReport, verdict: FaultVerdict) -> FaultVerdict:
        instances, held = self._job.instances, self._open.get(member)
        if verdict.verdict == "unfounded" or verdict.ended or not self._step_owner.running:
            return verdict
        if instances.is_before_entry(member) or not instances.is_present(member):
            return verdict
        if held is not None:
            return await self._still_held(held, verdict)
        usual: FaultWay = "replace"
        if verdict.verdict == "transient":
            usual = "retry" if report.kind == "link" else "wait"
        if self._was_asked(member, usual):
            return verdict
        ruling = await self._ask(member, report.kind, verdict, usual, lost=False)
        if ruling is None or not instances.is_present(member):
            return verdict
        if usual == "replace":
            opened = self._begin(member, report.kind, verdict, usual, ruling)
            if ruling.way == "replace":
                return verdict
            self._job.tasks.spawn(self._hold(member, opened, verdict))
            action = f"replaced unless it goes on within {opened.choice.limit_s:.1f} s, as {ruling.by} says"
            return await self._revised(verdict, "transient", action)
        if ruling.way != "replace" or not self._may_give_up(member):
            return verdict
        self._gave_up_at = time.monotonic()
        self._begin(member, report.kind, verdict, usual, ruling)
        return await self._revised(verdict, "structural", f"replaced, as {ruling.by} says: {ruling.reason}")

    async def _still_held(self, held: _OpenChoice, verdict: FaultVerdict) -> FaultVerdict:
        """A fault is reported again while its instance is waited for: a retry has failed, a wait goes on."""
        if held.choice.way == "replace" or verdict.verdict != "structural":
            return verdict
        tried_at = held.tried_at
        if tried_at is not None and time.monotonic() - tried_at >= self._times.asked_again_s / 2:
            held.again = True
            held.ends.set()
        return verdict.model_copy(
            update={"verdict": "transient", "scope": "none", "action": "it is waited for"}
        )

    def _may_give_up(self, member: Member) -> bool:
        """Whether a working instance may be given up now because a module says so."""
        late_enough = time.monotonic() - self._gave_up_at >= self._times.given_up_again_s
        return late_enough and not self._joining.coming and self._others(member) > 0

    async def _hold(self, member: Member, opened: _OpenChoice, verdict: FaultVerdict) -> None:
        """Gives the instance up unless a step is committed with it in time.

        Whoever could not reach an instance does not offer its tensors again while the attempt lasts. So the
        open step begins again: at once for a retry, after half the time of a wait.
        """
        limit_s, way = opened.choice.limit_s or 0.0, opened.choice.way
        try:
            async with asyncio.timeout(limit_s):
                if opened.choice.kind == "unreachable":
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(limit_s / 2 if way == "wait" else 0.0):
                            await opened.ends.wait()
                    self._begin_again(opened)
                opened.tried_at = time.monotonic() if way == "retry" else opened.tried_at
                await opened.ends.wait()
        except TimeoutError:
            pass
        if self._open.get(member) is not opened:  # it went on
            return
        if self._job.instances.is_present(member):
            opened.in_vain = True
            in_vain = "reported again" if opened.again else f"{limit_s:.1f} s in vain"
            text = f"{verdict.reason}; {opened.choice.way} of {opened.choice.by}: {in_vain}"
            self._lose(member, text, f"structural ({text}); {verdict.action}")

    def _begin_again(self, opened: _OpenChoice) -> None:
        """Has all instances try once more to reach each other, in a new attempt of the open step."""
        owner, choice = self._step_owner, opened.choice
        if opened.ends.is_set() or not owner.running or owner.step != choice.step:
            return
        if owner.loop.machine.phase is Phase.GATHERING:
            opened.tried_at = time.monotonic()
            owner.loop.post(Stalled(f"{choice.sid} is asked once more, as {choice.by} says"))

    async def _revised(self, verdict: FaultVerdict, kind: str, action: str) -> FaultVerdict:
        scope = "none" if kind == "transient" else "instance"
        revised = verdict.model_copy(update={"verdict": kind, "scope": scope, "action": action})
        try:
            await self._job.bus.publish(FAULT_VERDICT, revised, sid=verdict.sid)
        except DmscError as error:
            log.warning("a verdict was not told", sid=verdict.sid, reason=error.text)
        return revised

    # --- before a lost instance is replaced -----------------------------------------------------------
    async def replacing(self, lost: Member, why: str) -> None:
        """Returns once the replacement may begin: at once, or when its slot is back, if modules say so."""
        opened = self._open.get(lost)
        if opened is None and not self._was_asked(lost, "replace") and self._step_owner.running:
            verdict = FaultVerdict(
                job=self._job.name,
                sid=lost.sid,
                incarnation=lost.incarnation,
                verdict="structural",
                scope="instance",
                action="replace",
                reason=why,
                ended=True,
            )
            ruling = await self._ask(lost, "instance", verdict, "replace", lost=True)
            if ruling is not None:
                opened = self._begin(lost, "instance", verdict, "replace", ruling)
                if isinstance(ruling.action, Wait):
                    back = self._joining.replacement.until_back(lost.sid, opened.choice.limit_s or 0.0)
                    opened.in_vain = not await back
        if opened is not None:
            opened.choice = opened.choice.model_copy(update={"lost": True})

    # --- asking ---------------------------------------------------------------------------------------
    def _was_asked(self, member: Member, usual: FaultWay) -> bool:
        """Whether modules were asked so lately that they would say the same."""
        return time.monotonic() - self._asked.get((member, usual), float("-inf")) < self._times.asked_again_s

    async def _ask(
        self, member: Member, kind: FaultKind, verdict: FaultVerdict, usual: FaultWay, *, lost: bool
    ) -> FaultRuling | None:
        ruling = await self._job.ask_modules(
            self._job.name,
            lambda: self._question(member, kind, verdict, usual, lost=lost),
            self._distrusted(),
        )
        if ruling is not None:
            self._asked[member, usual] = time.monotonic()
            while len(self._asked) > REMEMBERED:
                self._asked.pop(next(iter(self._asked)))
        return ruling

    def _question(
        self, member: Member, kind: FaultKind, verdict: FaultVerdict, usual: FaultWay, *, lost: bool
    ) -> FaultQuestion:
        instances = self._job.instances
        place, unit = instances.graph.placement(member.sid), instances.graph.unit(member.sid)
        loss_s = median(self._losses) if self._losses else None
        return FaultQuestion(
            id=secrets.token_hex(6),
            job=self._job.name,
            at=time.time(),
            sid=member.sid,
            incarnation=member.incarnation,
            stage=unit.stage,
            cluster=place.cluster,
            node=place.node,
            agent=instances.agent_of(member.sid),
            kind=kind,
            verdict=verdict.verdict,
            scope=verdict.scope,
            evidence=verdict.reason,
            lost=lost,
            usual=usual,
            spares=self._spares(),
            replicas=self._others(member),
            may_replace=lost or self._may_give_up(member),
            past=sum(one.sid == member.sid for one in self._recorded),
            past_of_node=sum(one.node == place.node for one in self._recorded),
            step=self._step_owner.step,
            costs=FaultCosts(replace_s=loss_s),
            most_wait_s=min(self._times.wait_most_s, self._times.loss_s if loss_s is None else loss_s),
            answer_ms=1.0,
        )

    def _spares(self) -> int:
        """Free slots that the job may use."""
        taken = {
            (agent, place.slot)
            for agent, places in self._job.queue.occupied(self._job.name).items()
            for place in places
        }
        free = self._job.mesh.open_places() - taken
        return sum(
            slot.busy_with is None and (node.sid, slot.index) in free
            for node in self._job.eligible_nodes()
            for slot in node.slots
        )

    def _others(self, member: Member) -> int:
        """Members of its stage that work, besides it."""
        instances = self._job.instances
        stage = instances.graph.unit(member.sid).stage
        others = (instances.members.get(unit.sid) for unit in instances.graph.stage(stage))
        coming = self._joining.coming
        return sum(
            other is not None and other != member and instances.is_present(other) and other.sid not in coming
            for other in others
        )

    def _distrusted(self) -> dict[str, str]:
        """Modules whose last retries and waits were all in vain."""
        in_a_row: dict[str, int] = {}
        for one in self._recorded:
            if one.by != OWN_LOOP and one.way != "replace" and one.usual == "replace":
                if one.outcome is FaultOutcome.NO_BETTER:
                    in_a_row[one.by] = in_a_row.get(one.by, 0) + 1
                elif one.outcome is FaultOutcome.BETTER:
                    in_a_row[one.by] = 0
        text = f"its last {VAIN} retries and waits in this job were no better"
        return {module: text for module, count in in_a_row.items() if count >= VAIN}

    # --- forecast and outcome -------------------------------------------------------------------------
    def _begin(
        self, member: Member, kind: FaultKind, verdict: FaultVerdict, usual: FaultWay, ruling: FaultRuling
    ) -> _OpenChoice:
        """Notes which way is gone, and what it is expected to cost."""
        place = self._job.instances.graph.placement(member.sid)
        limit_s: float | None = None
        if usual == "replace" and ruling.way != "replace":
            loss_s = median(self._losses) if self._losses else self._times.loss_s
            limit_s = min(self._times.wait_most_s, loss_s)
            if isinstance(ruling.action, Wait):
                limit_s = min(limit_s, ruling.action.for_s)
        if isinstance(ruling.action, Replace) and ruling.by != OWN_LOOP:
            self._joining.replacement.wish(member.sid, ruling.action)
        choice = FaultChoice(
            question=ruling.question,
            sid=member.sid,
            incarnation=member.incarnation,
            stage=self._job.instances.graph.unit(member.sid).stage,
            node=place.node,
            step=self._step_owner.step,
            at=time.time(),
            kind=kind,
            evidence=verdict.reason,
            usual=usual,
            way=ruling.way,
            by=ruling.by,
            reason=ruling.reason,
            confidence=ruling.confidence,
            costs=ruling.costs,
            limit_s=limit_s,
            ended=verdict.ended,
        )
        opened = _OpenChoice(choice, time.monotonic(), self._first_step())
        self._open[member] = opened
        self._recorded.append(choice)
        self._tell(choice)
        return opened

    def _first_step(self) -> int:
        """The first step whose commit shows that all members work: the open one, unless it is decided."""
        step = self._step_owner.step
        if not self._step_owner.running:
            return step
        return step if self._step_owner.loop.machine.phase is Phase.GATHERING else step + 1

    def recovered(self, lost: Member, took_s: float) -> None:
        """A loss was overcome: training went on after this time. One that was held says nothing of others."""
        opened = self._open.get(lost)
        if opened is None or opened.choice.way == "replace":
            self._losses.append(took_s)

    def committed(self, step: int) -> None:
        """All members have applied a step: what came of the choices that are open?"""
        for member, opened in list(self._open.items()):
            if step < opened.first_step:
                continue
            elapsed_s, choice = time.monotonic() - opened.began, opened.choice
            lost = not self._job.instances.is_present(member)
            took_s = elapsed_s if choice.took_s is None else choice.took_s
            choice = choice.model_copy(update={"lost": lost, "took_s": round(took_s, 3)})
            opened.choice = choice
            if lost and not self._is_back(member):
                continue
            del self._open[member]
            opened.ends.set()
            done = choice.model_copy(
                update={"back_s": round(elapsed_s, 3), "outcome": outcome_of(choice, in_vain=opened.in_vain)}
            )
            self._replace(done)
            self._tell(done)

    def _is_back(self, lost: Member) -> bool:
        """Whether the unit's next incarnation is there, or the job has no such unit any more."""
        instances = self._job.instances
        present = instances.members.get(lost.sid)
        if all(unit.sid != lost.sid for unit in instances.units):
            return True
        there = present is not None and present != lost and instances.is_present(present)
        return there and lost.sid not in self._joining.coming

    def _replace(self, choice: FaultChoice) -> None:
        kept = [choice if one.question == choice.question else one for one in self._recorded]
        self._recorded = deque(kept, FAULT_CHOICES_KEPT)

    def _tell(self, choice: FaultChoice) -> None:
        self._job.events.fault_choice(choice, tuple(self._recorded))


def outcome_of(choice: FaultChoice, *, in_vain: bool = False) -> FaultOutcome:
    """What came of a choice by its forecast: a module's way is compared with the usual one.

    `in_vain`: what was waited for did not come back.
    """
    if choice.way == choice.usual or choice.took_s is None:
        return FaultOutcome.MEASURED
    if in_vain or (choice.lost and choice.way != "replace" and not choice.ended):
        return FaultOutcome.NO_BETTER
    usual_s = choice.costs.of(choice.usual)
    if usual_s is None:
        return FaultOutcome.MEASURED
    return FaultOutcome.BETTER if choice.took_s <= usual_s else FaultOutcome.NO_BETTER


def _unknown_if_open(choice: FaultChoice) -> FaultChoice:
    """Of what an earlier orchestrator chose, the outcome is not known any more."""
    if choice.outcome is not FaultOutcome.OPEN:
        return choice
    return choice.model_copy(update={"outcome": FaultOutcome.UNKNOWN})
