"""A job's checkpoints: taken at step boundaries, written beside the training, published whole, restored.

The step loop waits only for the copies of the state (`at_boundary`). One task at a time collects what the
instances wrote, publishes the manifest, and removes checkpoints that are too old. If a checkpoint fails,
training goes on, and the checkpoint before still counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bus.logs import get_logger
from bus.subjects import CHECKPOINT, CHECKPOINT_WAIT, STATE_RESTORE
from bus.tasks import cancel
from entities.job_files.checkpoint_catalog import CheckpointFolder, Opener, read_manifest
from entities.orchestrator.checkpointing.checkpoint_schedule import (
    RISK,
    TREND_STEPS,
    Choice,
    Conditions,
    choose,
)
from entities.orchestrator.checkpointing.job_artifacts import JobCheckpoints, Unsure
from entities.orchestrator.checkpointing.named_checkpoint import named_checkpoints
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.instances import MemberLost
from entities.orchestrator.job_state.retry_limits import Unrecoverable
from entities.orchestrator.monitoring.hardware_risk import hardware_risk
from schemas.checkpoint import (
    CheckpointManifest,
    CheckpointOrder,
    CheckpointTaken,
    CheckpointWait,
    CheckpointWritten,
    spec_digests,
)
from schemas.data_account import DataAccount, account
from schemas.errors import Conflict, DamagedCheckpoint, DmscError
from schemas.job import StepResult
from schemas.recipe_progress import RecipeProgress
from schemas.step import Member, StateRestore

log = get_logger("orchestrator")


@dataclass(frozen=True, slots=True)
class _Order:
    """A checkpoint in progress: its states are copied, its manifest is not published yet."""

    folder: CheckpointFolder
    url: str
    writers: tuple[Member, ...]
    stall_s: float
    began: float
    reason: str
    progress: RecipeProgress
    account: DataAccount


class Checkpoints:
    """The checkpoints of one job.

    The owner calls `committed` after each step, `due` and then `at_boundary` between two steps, and `restore`
    to go back. Where it waits between two steps, `rest_s` says for how long before it calls `rests`.
    """

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._times = job.times.checkpoints
        self._store = JobCheckpoints(job)
        self._numbers = 0
        self._last_step = 0
        self._tried = -1
        self._rested_at = -1
        self._writing: asyncio.Task[None] | None = None
        self._writing_folder: CheckpointFolder | None = None
        self._damaged: set[str] = set()
        self._unsure: set[CheckpointFolder] = set()
        self._uneven = False
        self._crew: Collection[Member] | None = None
        self._costs: deque[float] = deque(maxlen=5)
        self._step_s: deque[float] = deque(maxlen=TREND_STEPS)
        self._losses: deque[float] = deque(maxlen=TREND_STEPS)
        self._risk_answered = False
        self._expected: tuple[float, float, str] | None = None  # between failures, until when, by whom
        self._asked_by = ""
        self._asked_at: float | None = None

    # --- when ---------------------------------------------------------------------------------------------
    def committed(self, result: StepResult) -> None:
        """A step was decided: its time and loss count from now on."""
        self._step_s.append(result.step_s)
        self._losses.append(result.loss)

    def expect(self, between_s: float, valid_s: float, by: str) -> None:
        """A functional module expects a failure every `between_s` seconds; that is valid for `valid_s` s."""
        self._expected = (between_s, time.monotonic() + valid_s, by)

    def ask(self, by: str) -> None:
        """A checkpoint is due at the end of the open step.

        Raises:
            Conflict: the job wants none, or one is being written.
        """
        if not self._job.spec.training.checkpoint_every:
            raise Conflict("training.checkpoint_every is 0: the job wants no checkpoints")
        if self._busy:
            raise Conflict("a checkpoint is being written")
        pause_s, now = self._pause_s, time.monotonic()
        if self._asked_at is not None and now - self._asked_at < pause_s:
            raise Conflict(f"the last one that was asked for is {now - self._asked_at:.0f} s old")
        self._asked_by, self._asked_at = by, now

    @property
    def cost_s(self) -> float | None:
        """What a checkpoint takes, as measured; None: none was written yet."""
        return statistics.median(self._costs) if self._costs else None

    @property
    def step_s(self) -> float | None:
        """What a step takes, as measured; None: none was decided yet."""
        return statistics.median(self._step_s) if self._step_s else None

    def due(self, step: int) -> bool:
        """Whether the loop has to stop at this boundary and call `at_boundary`."""
        return self._lacks(step) and self._choice(step).due

    def rest_s(self, step: int) -> float | None:
        """How long a wait at this boundary lasts before it is worth a checkpoint; None: it never is."""
        known = (0, self._job.store.record.checkpoint_step)
        if step in known or not self._lacks(step) or not self._job.spec.training.checkpoint_every:
            return None
        return self._pause_s

    @property
    def _pause_s(self) -> float:
        return max(self._times.waited_s, (self.cost_s or 0.0) / self._times.waited_share)

    def rests(self, step: int) -> None:
        """The job has waited for `rest_s` at this boundary: a checkpoint of it is due."""
        self._rested_at = step

    def _choice(self, step: int) -> Choice:
        if self._asked_by:
            return Choice(not self._busy, 0, f"{self._asked_by} asks for it")
        if step == self._rested_at:
            return Choice(not self._busy, 0, "the job waits for records")
        return self._choose(step)

    def _lacks(self, step: int) -> bool:
        return step != self._tried and step != self._last_step

    def _choose(self, step: int) -> Choice:
        record = self._job.store.record
        risk, reason = hardware_risk(
            report for (_, job), report in self._job.mesh.quality.items() if job == self._job.name
        )
        if risk <= RISK:
            self._risk_answered = False
        if self._expected is not None and time.monotonic() > self._expected[1]:
            self._expected = None
        expected_s, _, expected_by = self._expected or (None, 0.0, "")
        choice = choose(
            self._job.spec.training.checkpoint_every,
            Conditions(
                step=step,
                last_step=max(self._last_step, self._tried),
                steps=self._job.store.record.last_step,
                step_s=self.step_s,
                cost_s=self.cost_s,
                observed_s=max(0.0, time.time() - record.submitted_at),
                failures=record.recoveries + self._job.epoch - 1,
                instances=len(self._job.instances.stage_members()),
                losses=tuple(self._losses),
                risk=risk,
                risk_reason=reason,
                risk_answered=self._risk_answered,
                expected_s=expected_s,
                expected_by=expected_by,
            ),
        )
        if choice.due and self._busy and self._job.spec.training.checkpoint_every == "auto":
            return Choice(False, choice.interval_steps, choice.reason)  # due once the one before is written
        return choice

    @property
    def _busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    # --- taking and writing -------------------------------------------------------------------------------
    async def at_boundary(self, step: int, stages: Sequence[Sequence[Member]]) -> None:
        """Takes a checkpoint at `step` if one is due; returns once every stage has copied its state.

        Args:
            step: the version that all members are at.
            stages: the members at that version, by stage.

        Raises:
            MemberLost: a replica died before its copy was taken.
        """
        if not self.due(step) or not all(stages):
            return
        reason = self._choice(step).reason
        self._tried, self._asked_by = step, ""
        if self._busy and step >= self._job.store.record.last_step:
            assert self._writing is not None
            await asyncio.wait([self._writing])  # this is the last boundary: training need not go on
        if self._busy:
            before = self._writing_folder.version if self._writing_folder else "?"
            await self._tell(f"step {step}: none taken, that of step {before} is still being written")
            return
        await self._take(step, stages, reason)

    async def of_this_step(self, step: int, stages: Sequence[Sequence[Member]], reason: str) -> bool:
        """Takes a checkpoint of `step`, due or not; returns whether there is a whole one.

        Raises:
            MemberLost: a replica died before its copy was taken.
        """
        await self._settled()
        if self._last_step == step:
            return True
        await self._take(step, stages, reason)
        await self._settled()
        return self._last_step == step

    async def _take(self, step: int, stages: Sequence[Sequence[Member]], reason: str) -> None:
        self._tried = step
        self._numbers += 1
        folder = CheckpointFolder(step, self._job.epoch, self._numbers)
        url = self._store.url_of(folder)
        writers = tuple(members[0] for members in stages if members)
        order = CheckpointOrder(job=self._job.name, epoch=self._job.epoch, version=step, url=url)
        began, progress = time.monotonic(), self._job.store.record.progress
        seen = account(self._job.spec, self._job.instances.graph.sources, step, self._job.decisions.replaced)
        try:
            answers = await self._job.instances.order(
                CHECKPOINT,
                order,
                writers,
                deadline_s=self._job.instances.patience_s(self._times.take_s),
            )
        except MemberLost:
            self._tried = -1
            raise
        except DmscError as error:
            await self._not_written(step, str(error))
            return
        copies = [answer for answer in answers.values() if isinstance(answer, CheckpointTaken)]
        stall_s = max((copy.stall_ms for copy in copies), default=0.0) / 1e3
        self._writing_folder, self._risk_answered = folder, True
        coming = _Order(folder, url, writers, stall_s, began, reason, progress, seen)
        self._writing = asyncio.create_task(
            self._contained(coming), name=f"checkpoint {self._job.name} {folder}"
        )

    async def _contained(self, order: _Order) -> None:
        """Publishes a checkpoint; handles every failure, so that the job goes on."""
        try:
            await self._publish(order)
        except MemberLost as error:  # not the store's fault: due again as soon as the job is back
            self._tried, self._risk_answered = -1, False
            await self._drop(order, str(error))
        except Unsure as error:
            self._unsure.add(order.folder)
            if isinstance(error.cause, MemberLost):
                self._tried, self._risk_answered = -1, False
            await self._not_written(order.folder.version, str(error))
        except DmscError as error:
            await self._drop(order, str(error))
        except Exception as error:
            log.error("checkpoint broke", job=self._job.name, exc_info=error)
            await self._drop(order, f"internal error: {type(error).__name__}: {error}")

    async def _publish(self, order: _Order) -> None:
        wait = CheckpointWait(job=self._job.name, epoch=self._job.epoch, url=order.url)
        answers = await self._job.instances.order(
            CHECKPOINT_WAIT,
            wait,
            order.writers,
            deadline_s=self._job.instances.idle_s(order.url),
            moving=True,
        )
        written = [answer.part for answer in answers.values() if isinstance(answer, CheckpointWritten)]
        parts = tuple(sorted(written, key=lambda part: part.stage))
        manifest = CheckpointManifest(
            job=self._job.name,
            version=order.folder.version,
            epoch=self._job.epoch,
            written_at=time.time(),
            spec_sha256=spec_digests(self._job.spec),
            torch_version=parts[0].torch_version,
            stages=parts,
            progress=order.progress,
            account=order.account,
            bits_class=self._job.store.record.bits_class,
        )
        await self._store.publish(order.folder, manifest, order.writers)
        write_s = time.monotonic() - order.began - order.stall_s
        self._costs.append(order.stall_s + write_s)
        self._last_step = order.folder.version
        await self._job.store.note(now=True, checkpoint_step=order.folder.version)
        await self._tell(
            f"step {order.folder.version} at {order.url}: {_size(manifest.size_bytes)}, "
            f"stall {order.stall_s * 1e3:.0f} ms, written in {write_s:.2f} s; why: {order.reason}; "
            f"{self._outlook(order)}"
        )
        try:
            await self._store.sweep(order.folder, self._damaged, self._unsure)
        except DmscError as error:
            log.warning("old checkpoints not removed", job=self._job.name, reason=str(error))

    def _outlook(self, order: _Order) -> str:
        choice = self._choose(order.folder.version)
        if not choice.interval_steps or order.folder.version >= self._job.store.record.last_step:
            return "the last"
        because = f" ({choice.reason})" if choice.reason != order.reason else ""
        return f"next after {choice.interval_steps} steps{because}"

    async def _drop(self, order: _Order, why: str) -> None:
        await self._not_written(order.folder.version, why)
        try:
            await self._store.remove(order.folder)
        except DmscError as error:  # the next sweep removes it
            log.warning("leftover of a checkpoint not removed", job=self._job.name, reason=str(error))

    async def _not_written(self, step: int, why: str) -> None:
        log.warning("no checkpoint", job=self._job.name, step=step, reason=why)
        await self._tell(f"step {step}: not written: {why}")

    async def _tell(self, text: str) -> None:
        with contextlib.suppress(DmscError):  # the bus is away: the checkpoint counts without its event
            await self._job.store.tell("checkpoint", text=text)

    # --- going back ---------------------------------------------------------------------------------------
    async def restore(self, *, fresh: bool = False, crew: Collection[Member] | None = None) -> int:
        """Has every stage instance take the newest whole checkpoint or, without one, the job's beginning.

        It waits for a checkpoint that is being written, which may be the newest. The beginning is the
        checkpoint that `resume_from` names, or else the seed or the initial weights.

        Args:
            fresh: the instances have just been built, so that they are at the seed already.
            crew: only these members take it; None: all. Others are on their way, and join later.

        Returns:
            The version that all are at.

        Raises:
            MemberLost: a member died meanwhile.
            Unrecoverable: there is nothing to begin from.
            DmscError: the store does not answer; try again.
        """
        await self._settled()
        self._uneven = False
        self._crew = crew
        version = await self._restore_own()
        if version is None and self._job.spec.resume_from is not None:
            version = await self._restore_named(self._job.spec.resume_from)
        if version is None:
            version = 0
            if not fresh or self._uneven:
                await self._order_restore(0, None)
            await self._take_up(RecipeProgress())
        self._last_step, self._tried, self._rested_at = version, -1, -1
        self._losses.clear()
        return version

    async def _take_up(self, progress: RecipeProgress, seen: DataAccount | None = None) -> None:
        """Goes back to what validations had decided at the version that is restored, and to what was seen.

        After the restore: a successor that finds members at their old version goes on with them, and needs
        what was decided there.
        """
        self._job.decisions.replaced = replaced = 0 if seen is None else seen.replaced
        record = self._job.store.record
        if (progress, replaced) != (record.progress, record.replaced):
            await self._job.store.note(now=True, progress=progress, replaced=replaced)

    async def _restore_own(self) -> int | None:
        open_url, folders = await self._store.opener(), await self._store.published()
        if not folders and (lost := self._job.store.record.checkpoint_step) is not None:
            await self._tell(f"that of step {lost} is not at {self._store.url} any more")
        for folder in folders:
            url = self._store.url_of(folder)
            if url not in self._damaged and (manifest := await self._try(url, open_url)) is not None:
                await self._take_up(manifest.progress, manifest.account)
                return folder.version
        return None

    async def _restore_named(self, named: str) -> int:
        """Restores the checkpoint that `resume_from` names, which may be another job's; nodes read it."""
        urls, open_url = await named_checkpoints(self._job.bus, self._job.spec, named, self._store.agents)
        for url in urls:
            if (manifest := await self._try(url, open_url)) is not None:
                differing = _differing(manifest, spec_digests(self._job.spec))
                progress = manifest.progress
                if differing:  # another end, or values that can't be compared: validations decide anew
                    progress = RecipeProgress(drops=progress.drops)
                await self._take_up(progress, manifest.account)
                if differing:
                    await self._tell(f"{url} is of a job with other {' and '.join(differing)}: as you wish")
                return manifest.version
        raise Unrecoverable(f"resume_from {named}: no checkpoint there can be read")

    async def _try(self, url: str, open_url: Opener) -> CheckpointManifest | None:
        """Restores the checkpoint at `url`; returns its manifest, or None if it is damaged.

        Raises:
            Unrecoverable: it is whole, but of another model, or has all steps of this job already.
        """
        try:
            manifest = await read_manifest(open_url, url)
            if manifest.version >= self._job.spec.training.steps and manifest.job != self._job.name:
                raise Unrecoverable(
                    f"resume_from {url} is of step {manifest.version}, but training.steps is "
                    f"{self._job.spec.training.steps}: ask for more steps"
                )
            await self._order_restore(manifest.version, url)
        except Conflict as error:
            raise Unrecoverable(error.text) from None
        except DamagedCheckpoint as error:  # stages whose files were whole have restored them already
            self._uneven = True
            self._damaged.add(url)
            log.error("damaged checkpoint", job=self._job.name, url=url, reason=error.text)
            await self._tell(f"{error.text}; the one before is tried")
            return None
        return manifest

    async def _order_restore(self, version: int, url: str | None) -> None:
        order = StateRestore(job=self._job.name, epoch=self._job.epoch, version=version, checkpoint=url)
        members = [
            member
            for member in self._job.instances.stage_members()
            if self._crew is None or member in self._crew
        ]
        idle_s = self._job.instances.idle_s(url or self._job.spec.weights_url or "")
        await self._job.instances.order(STATE_RESTORE, order, members, deadline_s=idle_s, moving=True)

    # --- the end ------------------------------------------------------------------------------------------
    async def _settled(self) -> None:
        """Waits until a checkpoint in progress is published or dropped, but not for ever.

        The order itself notices a dead writer, and one that makes no progress.
        """
        if self._writing is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._job.instances.patience_s(self._times.end_s)):
                    await asyncio.wait([self._writing])

    async def finish(self) -> None:
        """Waits for a checkpoint in progress, because the job has ended well."""
        await self._settled()

    async def abandon(self) -> None:
        """Gives up a checkpoint in progress, and leaves the store as it is. Twice is fine."""
        writing, self._writing = self._writing, None
        if writing is not None and not writing.done():
            await cancel(writing)

    async def close(self) -> None:
        """Removes unfinished and too old checkpoints, after the job and its instances have ended."""
        await self.abandon()
        if not (self._numbers or self._job.epoch > 1):
            return
        try:
            await self._store.sweep(None, self._damaged, ())  # no instance is left that could still publish
        except DmscError as error:
            log.warning("old checkpoints not removed", job=self._job.name, reason=str(error))
            await self._tell(f"what is unfinished or too old may be left at {self._store.url}: {error.text}")


def _differing(manifest: CheckpointManifest, own: dict[str, str]) -> list[str]:
    theirs = manifest.spec_sha256
    return sorted(section for section in own if theirs.get(section) != own[section])


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
