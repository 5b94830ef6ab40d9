"""The step transaction's shell (DESIGN §5): begin, gather claims, prepare, decide, commit, evaluate.

The accounting is `step_ledger.StepLedger`; here are the orders, the record's compare-and-set that is the
commit point, and the repair of what the bus lost.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

from bus.buckets import Bucket
from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import GROUP_FORM, STEP_BEGIN, STEP_COMMIT, STEP_DECISION, STEP_PREPARE, STEP_STATUS
from entities.orchestrator.instances import Instances, MemberLost
from entities.orchestrator.step_ledger import Decide, Effect, Inconsistent, Prepare, StepLedger
from schemas.errors import Conflict, DmscError, Fenced, Unavailable
from schemas.job import JobSpec, StepResult
from schemas.learning_rate import learning_rate
from schemas.step import (
    GroupForm,
    MicrobatchClaim,
    StepBegin,
    StepCommit,
    StepDecision,
    StepPrepare,
    StepStatus,
    StepStatusReply,
    StepVote,
)

log = get_logger("orchestrator")

BEGIN_DEADLINE_S = 10.0
PREPARE_DEADLINE_S = 30.0
SLOWEST_BYTES_PER_S = 4e6
"""A reduction slower than this counts as broken (the instances reckon with the same)."""
COMMIT_DEADLINE_S = 30.0
GROUP_DEADLINE_S = 20.0
RECORD_DEADLINE_S, RECORD_RETRY_S = 60.0, 0.2
"""How long a decision waits for the bus, and how often it asks."""
QUIET_S = 1.0
"""Without a claim for this long, instances are asked what they hold (rule 11)."""
STALL_S = 30.0
"""Without progress for max(this, 20 × the median microbatch): the attempt is given up and begun again."""


class AttemptFailed(DmscError):
    """This attempt of the step can't succeed; nothing was decided, and nobody is known to be lost.

    No progress, a broken all-reduce, an instance that is elsewhere: hints, which the registry and the
    node agents will explain, or not. The step is begun again as the next attempt.
    """

    code = "attempt_failed"
    retryable = True


class EntryLost(AttemptFailed):
    """The entry gateway did not take the step."""

    code = "entry_lost"


@dataclass(frozen=True)
class Evaluated:
    """Validation losses by microbatch."""

    losses: dict[int, float]

    @property
    def mean(self) -> float:
        return math.fsum(self.losses[number] for number in sorted(self.losses)) / len(self.losses)


class StepLoop:
    """Runs steps of one job with its present members. `attempt` only ever grows."""

    def __init__(self, bus: Bus, job: str, spec: JobSpec, epoch: int, instances: Instances) -> None:
        self._bus = bus
        self._job = job
        self._spec = spec
        self._epoch = epoch
        self._instances = instances
        self._decisions: Bucket = bus.bucket(STEP_DECISION)
        self._revision: int | None = None
        self._ledger: StepLedger | None = None
        self._evaluation: dict[int, float] | None = None
        self._effects: asyncio.Queue[Effect] = asyncio.Queue()
        self._progress = asyncio.Event()
        self.attempt = 0
        self.generations: list[int] = []
        self.entry_gateway = ""

    async def form_groups(self) -> None:
        """Builds the next generation of every stage's reduction group.

        Raises:
            MemberLost: members that did not answer.
        """
        stages = self._instances.stages()
        self.generations = [generation + 1 for generation in self.generations or [-1] * len(stages)]

        async def form(stage: int) -> None:
            order = GroupForm(
                job=self._job,
                epoch=self._epoch,
                stage=stage,
                generation=self.generations[stage],
                members=stages[stage],
            )
            await self._instances.order(GROUP_FORM, order, stages[stage], deadline_s=GROUP_DEADLINE_S)

        await asyncio.gather(*(form(stage) for stage in range(len(stages))))

    def claimed(self, claim: MicrobatchClaim) -> None:
        """A claim came in (from the bus, or in an answer to `StepStatus`)."""
        if claim.job != self._job or claim.epoch != self._epoch or claim.attempt != self.attempt:
            return
        if claim.evaluate:
            if self._evaluation is not None and claim.loss is not None:
                self._evaluation[claim.microbatch] = claim.loss
                self._progress.set()
            return
        if self._ledger is not None:
            for effect in self._ledger.claim(claim):
                self._effects.put_nowait(effect)
            self._progress.set()

    async def begin(self, step: int, *, evaluate: bool = False) -> None:
        """Tells the entry gateway to dispatch; repeated until acknowledged."""
        count = self._spec.training.validation_microbatches if evaluate else self._spec.training.microbatches
        order = StepBegin(
            job=self._job,
            epoch=self._epoch,
            step=step,
            attempt=self.attempt,
            microbatches=tuple(range(count)),
            evaluate=evaluate,
        )
        try:
            await self._bus.command(
                STEP_BEGIN, order, deadline_s=BEGIN_DEADLINE_S, job=self._job, gateway=self.entry_gateway
            )
        except Unavailable as error:
            raise EntryLost(f"gateway {self.entry_gateway} did not begin step {step}: {error}") from None
        except DmscError as error:
            raise AttemptFailed(f"step {step} was not begun: {error}") from None

    def open(self, step: int) -> StepLedger:
        """Opens the account of a step's present attempt; from here on its claims count."""
        ledger = StepLedger(
            job=self._job,
            epoch=self._epoch,
            step=step,
            attempt=self.attempt,
            microbatches=self._spec.training.microbatches,
            membership=self._instances.stages(),
            generations=tuple(self.generations),
            clip_norm=self._spec.training.clip_norm,
        )
        self._effects = asyncio.Queue()
        self._ledger = ledger
        return ledger

    async def gather(self, ledger: StepLedger, *, begun: bool) -> StepDecision:
        """Runs an opened step up to its decision: microbatches, claims, prepare, votes. May be cancelled.

        Args:
            ledger: from `open`.
            begun: the gateway was already told (while the step before was being committed).

        Raises:
            MemberLost, AttemptFailed: nothing was decided.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                if not begun:
                    tasks.create_task(self.begin(ledger.step))
                watch = tasks.create_task(self._watch(ledger))
                while True:
                    effect = await self._effects.get()
                    if isinstance(effect, Inconsistent):
                        raise AttemptFailed(effect.reason)
                    if isinstance(effect, Decide):
                        watch.cancel()
                        return effect.decision
                    if isinstance(effect, Prepare):
                        for member in ledger.membership[effect.stage]:
                            tasks.create_task(self._prepare(ledger, effect.stage, member.sid))
        except BaseExceptionGroup as errors:
            worst = _worst(errors)
            if isinstance(worst, DmscError) and not isinstance(worst, (MemberLost, AttemptFailed)):
                worst = AttemptFailed(f"step {ledger.step}: {worst}")
            raise worst from None

    async def _prepare(self, ledger: StepLedger, stage: int, sid: str) -> None:
        order = StepPrepare(
            job=self._job,
            epoch=self._epoch,
            step=ledger.step,
            attempt=ledger.attempt,
            generation=ledger.generations[stage],
        )
        member = next(member for member in ledger.membership[stage] if member.sid == sid)
        answers = await self._instances.order(STEP_PREPARE, order, [member], deadline_s=self._prepare_s())
        vote = answers[sid]
        assert isinstance(vote, StepVote)
        for effect in ledger.vote(stage, vote):
            self._effects.put_nowait(effect)

    def _prepare_s(self) -> float:
        """Longer than an all-reduce of this size may take on the slowest link that is borne with."""
        return PREPARE_DEADLINE_S + 4 * self._instances.sum_bytes / SLOWEST_BYTES_PER_S

    async def _watch(self, ledger: StepLedger) -> None:
        """Repairs lost claims; gives up on an attempt that no longer moves."""
        moved_at = time.monotonic()
        while True:
            self._progress.clear()
            try:
                async with asyncio.timeout(QUIET_S):
                    await self._progress.wait()
                moved_at = time.monotonic()
                continue
            except TimeoutError:
                pass
            times = sorted(claim.forward_ms + claim.backward_ms for claim in ledger.claims.values())
            patience = max(self._patience_s(), 0.02 * times[len(times) // 2] if times else 0.0)
            missing = ledger.missing()
            if not missing:
                moved_at = time.monotonic()  # preparing; its orders have their own deadlines
                continue
            held = len(ledger.claims)
            everyone = [member.sid for members in ledger.membership for member in members]
            await self._ask(ledger.step, ledger.attempt, everyone)
            if len(ledger.claims) > held:
                moved_at = time.monotonic()
            if time.monotonic() - moved_at > patience:
                raise AttemptFailed(
                    f"step {ledger.step}: no progress for {patience:.0f} s, missing {missing[:4]}"
                )

    def _patience_s(self) -> float:
        """A first claim needs a whole way through the pipeline: ten times what was measured for that."""
        return max(STALL_S, 10 * self._instances.expected_ms / 1e3)

    async def _ask(self, step: int, attempt: int, sids: list[str], *, evaluate: bool = False) -> None:
        """Asks instances what they hold of a step, and counts what they say like claims."""
        query = StepStatus(job=self._job, epoch=self._epoch, step=step, attempt=attempt, evaluate=evaluate)

        async def one(sid: str) -> None:
            try:
                reply = await self._bus.request(STEP_STATUS, query, timeout_s=2.0, job=self._job, sid=sid)
            except DmscError:
                return
            assert isinstance(reply, StepStatusReply)
            for claim in reply.claims:
                self.claimed(claim)

        await asyncio.gather(*(one(sid) for sid in sids))

    async def record(self, decision: StepDecision) -> None:
        """The commit point: a compare-and-set on the job's decision record.

        Raises:
            Fenced: another orchestrator has moved the record on; this one must stop.
        """
        deadline = time.monotonic() + RECORD_DEADLINE_S
        while True:
            try:
                await self._write_decision(decision)
                return
            except Conflict as error:
                raise Fenced(f"the decision record of job {self._job} moved on: {error}") from None
            except Unavailable:
                # unknown: it may have been written; read through the leader before anything else
                if time.monotonic() > deadline:
                    raise
                self._revision = None
                await asyncio.sleep(RECORD_RETRY_S)

    async def _write_decision(self, decision: StepDecision) -> None:
        if self._revision is None:
            held = await self._decisions.get(leader=True, job=self._job)
            if held is not None and held.message.epoch > self._epoch:
                raise Fenced(f"job {self._job} is led in epoch {held.message.epoch}")
            self._revision = held.revision if held is not None else 0
            if held is not None and held.message == decision:
                return
        if self._revision:
            self._revision = await self._decisions.update(decision, revision=self._revision, job=self._job)
        else:
            self._revision = await self._decisions.create(decision, job=self._job)

    async def commit(self, decision: StepDecision) -> set[str]:
        """Has every member apply the decision. Returns the SIDs of those that did not answer.

        They are lost to the job whatever became of them: the decision stands (rule 6).
        """

        async def one(stage: int, sid: str) -> str | None:
            order = StepCommit(
                job=self._job,
                epoch=self._epoch,
                step=decision.step,
                attempt=decision.attempt,
                generation=decision.generations[stage],
                checksum=decision.checksums[stage],
                clip=decision.clip,
                action=decision.action,
            )
            member = next(member for member in decision.membership[stage] if member.sid == sid)
            try:
                await self._instances.order(STEP_COMMIT, order, [member], deadline_s=COMMIT_DEADLINE_S)
            except MemberLost:
                return sid
            except DmscError as error:
                log.error("commit refused", job=self._job, sid=sid, reason=str(error))
                return sid
            return None

        answers = await asyncio.gather(
            *(
                one(stage, member.sid)
                for stage, members in enumerate(decision.membership)
                for member in members
            )
        )
        return {sid for sid in answers if sid is not None}

    def result(self, ledger: StepLedger, decision: StepDecision, step_s: float) -> StepResult:
        training = self._spec.training
        tokens = training.microbatches * training.microbatch_samples * self._spec.data.sample_tokens
        return StepResult(
            step=decision.step,
            loss=ledger.mean_loss(),
            gradient_norm=decision.gradient_norm,
            learning_rate=learning_rate(decision.step, training),
            tokens=tokens,
            step_s=step_s,
            tokens_per_s=tokens / max(step_s, 1e-9),
            attempt=decision.attempt,
            shares=ledger.shares(),
        )

    async def evaluate(self, version: int) -> Evaluated:
        """One validation pass at `version`: forward only, losses from the last stage.

        Raises:
            AttemptFailed: not all microbatches were scored in time.
        """
        self._evaluation = {}
        try:
            await self.begin(version, evaluate=True)
            count = self._spec.training.validation_microbatches
            moved_at = time.monotonic()
            while len(self._evaluation) < count:
                self._progress.clear()
                try:
                    async with asyncio.timeout(QUIET_S):
                        await self._progress.wait()
                    moved_at = time.monotonic()
                except TimeoutError:
                    last = self._instances.stages()[-1]
                    await self._ask(version, self.attempt, [member.sid for member in last], evaluate=True)
                    if time.monotonic() - moved_at > self._patience_s():
                        raise AttemptFailed(f"validation at step {version} made no progress") from None
            return Evaluated(dict(self._evaluation))
        finally:
            self._evaluation = None


def _worst(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error to act on: a bug before a loss of members before what follows from it."""
    flat: list[BaseException] = []
    pending: list[BaseException] = list(group.exceptions)
    while pending:
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            flat.append(error)
    return min(flat, key=lambda error: (isinstance(error, DmscError), not isinstance(error, MemberLost)))
