"""The orders to instances and the gateway that carry out the step machine's effects.

There is one coroutine per effect of `step_events`. It posts the answers as events, and tells the observer
which members do not answer. Orders are idempotent, and repeated until they are answered (DESIGN §5 rule 11).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from bus.logs import get_logger
from bus.subjects import (
    GROUP_FORM,
    STATE_SEND,
    STATE_WAIT,
    STEP_ASSIGN,
    STEP_BEGIN,
    STEP_PREPARE,
)
from bus.wire.request_progress import RequestProgress
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.instances import MemberLost
from entities.orchestrator.step.member_orders import MemberOrders
from entities.orchestrator.step.step_observer import StepObserver
from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.step_machine import StepMachine
from schemas.errors import DmscError, Fenced, Unavailable
from schemas.evaluation_sets import evaluation_sets
from schemas.step import (
    GroupForm,
    Member,
    PathUpdate,
    StateReady,
    StateSend,
    StateWait,
    StepAssign,
    StepBegin,
    StepDecision,
    StepPrepare,
    TiedStage,
)

log = get_logger("orchestrator")


Reply = TypeVar("Reply")


class StepOrders:
    """Gives the orders of one step loop. `Fenced`, where raised: another orchestrator leads the job.

    `machine` is only read: an order that it has left behind is not repeated.
    """

    def __init__(
        self,
        job: JobContext,
        machine: StepMachine,
        observer: StepObserver,
        post: Callable[[ev.Event], None],
    ) -> None:
        self._job = job
        self._times = job.times.steps
        self._machine = machine
        self._observer = observer
        self._post = post
        self._member_orders = MemberOrders(job)

    async def begin_step(self, step: int, attempt: int) -> None:
        """Has a gateway dispatch the step; tries other gateways; stops once the step has a new attempt."""
        while (step, attempt) == (self._machine.step, self._machine.attempt):
            gateway = self._job.gateway.sid
            try:
                await self.begin(step, attempt)
                self._post(ev.Begun(step, attempt))
                return
            except Unavailable as error:
                if gateway == self._job.gateway.sid and self._machine.data:
                    log.warning("step not begun", job=self._job.name, step=step, reason=str(error))
                    await self._observer.other_gateway(gateway)
            except DmscError as error:
                log.warning("step not begun", job=self._job.name, step=step, reason=str(error))
            await asyncio.sleep(self._times.repeat_s)

    async def begin(self, step: int, attempt: int, *, evaluate: bool = False) -> None:
        """Has the entry gateway dispatch a step, or a validation pass.

        Raises:
            Unavailable: the gateway does not answer.
            DmscError: it refuses.
        """
        training = self._job.spec.training
        scored = sum(microbatches for _, microbatches in evaluation_sets(self._job.spec))
        count = scored if evaluate else training.microbatches
        order = StepBegin(
            job=self._job.name,
            epoch=self._job.epoch,
            step=step,
            attempt=attempt,
            microbatches=tuple(range(count)),
            evaluate=evaluate,
        )
        gateway = self._job.gateway.sid
        await self._job.bus.command(
            STEP_BEGIN,
            order,
            deadline_s=self._times.begin_s,
            while_heard=True,
            job=self._job.name,
            gateway=gateway,
        )

    async def fence(self, effect: ev.Fence) -> None:
        order = self._member_orders.fence(
            effect.targets,
            step=effect.step,
            attempt=effect.attempt,
            round=effect.round,
            fenced=effect.fenced,
        )
        answers = await self._answers(order)
        if answers is not None:
            self._post(ev.FenceAcknowledged(effect.round, tuple(answers.values())))

    async def assign(self, effect: ev.Assign) -> None:
        async def assign_to(member: Member, paths: tuple[PathUpdate, ...]) -> bool:
            message = StepAssign(
                job=self._job.name,
                epoch=self._job.epoch,
                step=effect.step,
                attempt=effect.attempt,
                round=effect.round,
                paths=paths,
            )
            order = self._job.instances.order(STEP_ASSIGN, message, [member], deadline_s=self._times.assign_s)
            return await self._answers(order) is not None

        if all(await asyncio.gather(*(assign_to(member, paths) for member, paths in effect.paths.items()))):
            self._post(ev.Assigned(effect.round))

    async def _answers(self, order: Awaitable[dict[str, Reply]]) -> dict[str, Reply] | None:
        """The answers by SID; None if a member is lost (tells the observer) or refused (posts `Stalled`)."""
        try:
            return await order
        except MemberLost as lost:
            self._observer.losing(lost.members, str(lost))
        except Fenced:
            raise
        except DmscError as error:
            self._post(ev.Stalled(str(error)))
        return None

    async def form(self, effect: ev.FormGroup) -> None:
        layout = self._job.instances.layouts.of(effect.stage, effect.generation)
        members = layout.ordered(effect.members)
        order = GroupForm(
            job=self._job.name,
            epoch=self._job.epoch,
            stage=effect.stage,
            step=effect.step,
            attempt=effect.attempt,
            round=effect.round,
            generation=effect.generation,
            members=members,
            fenced=effect.fenced,
            parts=layout.sizes(members),
        )

        async def form_at(member: Member) -> tuple[tuple[Member, Member], ...] | None:
            """None if the member has built the group; else the edges to peers that it found silent."""
            try:
                await self._job.instances.order(GROUP_FORM, order, [member], deadline_s=self._times.group_s)
            except DmscError as error:
                if isinstance(error, MemberLost):
                    lost.extend(error.members)
                log.info("group not formed", job=self._job.name, stage=effect.stage, reason=str(error))
                reasons.append(f"{member.sid}: {error}")
                return self._silent_edges(member, effect.members, error)
            return None

        lost: list[Member] = []
        reasons: list[str] = []
        answers = await asyncio.gather(*(form_at(member) for member in effect.members))
        if lost:
            self._observer.losing(lost, f"no answer to group form of stage {effect.stage}")
            return
        if all(edges is None for edges in answers):
            self._post(ev.ReductionGroupFormed(effect.stage, effect.generation))
        else:
            failed = tuple(edge for edges in answers for edge in edges or ())
            self._post(
                ev.ReductionGroupFailed(
                    effect.stage, effect.generation, failed, reasons[0], answered=effect.members
                )
            )

    def _silent_edges(
        self, witness: Member, members: Iterable[Member], error: DmscError
    ) -> tuple[tuple[Member, Member], ...]:
        """The edges to the peers that this error names as silent; tells the observer of them first."""
        incarnations = str(error.fields.get("unreached", "")).split()
        silent = tuple(peer for peer in members if peer.incarnation in incarnations)
        for peer in silent:
            self._observer.silence(witness, peer)
        return tuple((witness, peer) for peer in silent)

    async def prepare(self, effect: ev.Prepare, place: int) -> None:
        """Has the member at `place` among those of the stage prepare."""
        member = effect.members[place]
        order = StepPrepare(
            job=self._job.name,
            epoch=self._job.epoch,
            step=effect.step,
            attempt=effect.attempt,
            generation=effect.generation,
            tied=tuple(self._tied(stage, members) for stage, members in effect.receivers(place)),
        )
        try:
            answers = await self._job.instances.order(
                STEP_PREPARE, order, [member], deadline_s=self._times.prepare_s, moving=True
            )
        except MemberLost as lost:
            self._observer.losing(lost.members, str(lost))
        except DmscError as error:
            log.info("not prepared", job=self._job.name, sid=member.sid, reason=str(error))
            edges = self._silent_edges(member, effect.members, error)
            why = f"{member.sid}: {error}"
            failed = ev.ReductionGroupFailed(effect.stage, effect.generation, edges, why, answered=(member,))
            self._post(failed)
        else:
            vote = answers[member.sid]
            self._post(ev.Voted(effect.stage, vote))

    def _tied(self, stage: int, receivers: tuple[Member, ...]) -> TiedStage:
        first, last = self._job.instances.graph.layers(stage)
        return TiedStage(stage=stage, first_layer=first, last_layer=last, receivers=receivers)

    async def record(self, decision: StepDecision) -> None:
        await self._job.decisions.write(decision)
        self._post(ev.DecisionRecorded(decision))

    async def commit(self, decision: StepDecision) -> None:
        """Has every member apply the decision.

        A member that does not answer is lost to the job, even if it lives: the decision stands (rule 6).
        """
        silent: list[Member] = []

        def on_silent(member: Member, error: DmscError) -> None:
            log.warning("not committed", job=self._job.name, sid=member.sid, reason=str(error))
            silent.append(member)

        await self._member_orders.commit(decision, on_silent)
        self._post(ev.Committed(decision.step, tuple(silent)))
        self._observer.committed(decision.step)
        if silent:
            self._observer.losing(silent, f"no commit of step {decision.step}")

    async def follow(self, effect: ev.SendState) -> None:
        """Has a newcomer follow its source, until it is ready or too slow.

        A living source answers within moments, however long the transfer takes; it is asked until it is done.
        """
        ready: StateReady | None = None
        while ready is None or (ready.version < 0 and not ready.slow):
            try:
                answers = await self._job.instances.order(
                    STATE_SEND,
                    self._state_send(effect),
                    [effect.source],
                    deadline_s=self._times.follow_s,
                )
            except DmscError as error:
                await self._join_failed(effect.to, effect.transfer, [error])
                return
            ready = answers[effect.source.sid]
            if self._machine.transfer_of(effect.to) != effect.transfer:
                return
        self._post(ev.Followed(effect.to, effect.transfer, ready.version, ready.slow))

    def _state_send(self, effect: ev.SendState) -> StateSend:
        return StateSend(
            job=self._job.name,
            epoch=self._job.epoch,
            to=effect.to,
            version=effect.version,
            transfer=effect.transfer,
            follow=effect.follow,
        )

    async def await_state(self, effect: ev.AwaitState) -> None:
        """Waits for a newcomer's last redo, for which its stage waits; the transfer fails at the deadline."""
        within_s = self._job.instances.patience_s(self._times.last_redo_s, times=self._times.last_redo_part)
        wait = StateWait(job=self._job.name, epoch=self._job.epoch, version=effect.version, within_s=within_s)
        try:
            await self._job.instances.order(
                STATE_WAIT, wait, [effect.to], deadline_s=within_s + self._times.follow_s
            )
        except DmscError as error:
            await self._join_failed(effect.to, effect.transfer, [error])
        else:
            self._post(ev.Joined(effect.to, effect.transfer, effect.version))

    async def send_state(self, effect: ev.SendState) -> None:
        send = self._state_send(effect)
        wait = StateWait(job=self._job.name, epoch=self._job.epoch, version=effect.version)
        patience_s = self._job.instances.patience_s(self._times.state_s)
        moving = RequestProgress()  # progress of the newcomer counts for its source, too
        order = partial(self._job.instances.order, deadline_s=patience_s, moving=moving)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(order(STATE_SEND, send, [effect.source]))
                both.create_task(order(STATE_WAIT, wait, [effect.to]))
        except* DmscError as errors:
            await self._join_failed(effect.to, effect.transfer, errors.exceptions)
        else:
            self._post(ev.Joined(effect.to, effect.transfer, effect.version))

    async def _join_failed(self, to: Member, transfer: int, errors: Iterable[BaseException]) -> None:
        """Posts `JoinFailed`; another transfer begins after a pause, unless this one was given up before."""
        superseded = self._machine.transfer_of(to) != transfer
        stage = self._machine.stage_of(to)
        self._post(ev.JoinFailed(to, transfer))
        for error in errors:
            log.info("state not sent", job=self._job.name, to=to.sid, reason=str(error))
            if isinstance(error, MemberLost):
                self._observer.losing(error.members, str(error))
        if stage is None or superseded:
            return
        await asyncio.sleep(self._times.repeat_s)
        if to not in self._job.instances.lost:
            self._post(ev.NewcomerReady(to, stage))

    async def withdraw(self, effect: ev.Withdraw) -> None:
        """Fences a lost newcomer at its source."""
        await self._member_orders.withdraw(
            (effect.newcomer,), effect.source, step=effect.step, attempt=effect.attempt
        )

    async def restart(self, effect: ev.Restart) -> None:
        await self._member_orders.abort(
            effect.targets,
            step=self._machine.step,
            attempt=effect.attempt,
            fenced=effect.fenced,
            on_silent=lambda member, error: self._observer.losing([member], str(error)),
        )
        self._post(ev.Restarted(effect.attempt))
