"""All jobs of one term: submissions, takeovers, and requests about running jobs."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from bus import subjects
from bus.logs import get_logger
from bus.messaging.key_value import KeyValueEntry
from bus.wire.correlation import current, new_correlation
from entities.orchestrator.job.code_archives import CodeArchives
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.job.term import TermContext, insistently
from entities.orchestrator.job.unreadable_records import above_all
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.job_state.retry_limits import Parked
from entities.orchestrator.membership.slot_holding import SlotHolding
from entities.orchestrator.queue.admission import JobAdmission
from entities.orchestrator.queue.job_arrays import JobArrays, forget_oldest, half_submitted, outcome_of
from entities.orchestrator.queue.job_queue import JobQueue, unknown
from entities.orchestrator.queue.mesh_slots import reshaped
from entities.orchestrator.queue.reservation_book import ReservationBook
from entities.queue.queue_rules import QueueOrder
from schemas import names
from schemas.actions import REPLICAS
from schemas.arrays import JobArray, OrderArray, SubmitArray, array_of, specs_of, values_at
from schemas.data_set.builds import is_build
from schemas.envelope import Envelope
from schemas.errors import (
    Ack,
    BadInput,
    BadJob,
    Conflict,
    DmscError,
    Fenced,
    NotFound,
    OverQuota,
    Unavailable,
)
from schemas.gateway_api import (
    CancelJob,
    ChangeStage,
    JobList,
    JobQuery,
    ParkJob,
    PrioritiseJob,
    ResumeJob,
    ScaleJob,
    SubmitJob,
)
from schemas.job import ENDED, ArrayPlace, JobRecord, JobSpec, JobState
from schemas.job_file.queue import QueueSpec
from schemas.queue import QueueQuery, QueueStatus
from schemas.quota import Quota
from schemas.recut import RecutAnswer, RecutJob

log = get_logger("orchestrator")

Item = TypeVar("Item")

SUBMITTED = "submitted"
AT_ONCE = 32
"""Members of an array that are written, or given an order, at the same time."""


class JobRuns:
    """`running`: jobs that have not ended, by id, each with its own state and task; `ended`: the last others.

    `former_records`: the jobs of an earlier term of this process; one that the store has lost goes on from
    there. `forget` is called with each job that has ended, `set_by_person` with job, knob, value and user of
    what a person sets; value None: nobody holds the knob any more. `run_type`: what drives a job.
    """

    def __init__(
        self,
        term: TermContext,
        former_records: Mapping[str, JobRecord],
        *,
        forget: Callable[[str], None],
        set_by_person: Callable[[str, str, str | None, str], None],
        run_type: Callable[[JobRecord], type[JobRun]] = lambda record: JobRun,
    ) -> None:
        self.running: dict[str, JobRun] = {}
        self.ended: dict[str, JobRecord] = {}
        self._term = term
        self._former_records = former_records
        self._forget, self._set_by_person, self._run_type = forget, set_by_person, run_type
        self._holders: dict[str, SlotHolding] = {}
        self.queue = JobQueue(term.mesh, self._holders, self.ended, term.queue_rules)
        self.reservations = ReservationBook(
            term.bus, table=lambda: self.queue.table, jobs=self.running, changed=self.queue.again
        )
        self.queue.reservations = self.reservations.kept
        self.arrays = JobArrays(term.ended_kept)
        self.queue.array_done = self.arrays.done
        self.admission = JobAdmission(lambda: [run.present_record() for run in self.running.values()])
        self.code = CodeArchives(term.bus, term.code_of_builds)
        self._submitted: OrderedDict[tuple[str, str], asyncio.Future[JobRecord]] = OrderedDict()

    async def submit(self, message: SubmitJob, envelope: Envelope) -> JobRecord:
        """Makes one job of a submission, even if the client repeats it through another gateway or leader.

        `causation` is the client's own command where it came by the bus; the job's record keeps it.
        """
        command = envelope.causation or envelope.id
        return await self._once((message.user, command), lambda: self._queue(message, command))

    async def submit_array(self, message: SubmitArray, envelope: Envelope) -> JobArray:
        """Makes the jobs of one array, all or none, even if the client repeats it; see `submit`."""
        command = envelope.causation or envelope.id
        first = await self._once((message.user, command), lambda: self._queue_array(message, command))
        return self._array("" if first.array is None else first.array.array)

    async def _once(self, submission: tuple[str, str], make: Callable[[], Awaitable[JobRecord]]) -> JobRecord:
        if submission in self._submitted:
            return await asyncio.shield(self._submitted[submission])
        promise = self._remember(submission)
        try:
            record = await make()
        except BaseException as error:  # a repetition may become a job
            self._submitted.pop(submission, None)
            if isinstance(error, DmscError):
                promise.set_exception(error)
                promise.exception()  # seen, even if nobody repeated it meanwhile
            else:
                promise.cancel()
            raise
        promise.set_result(record)
        return record

    def _remember(self, submission: tuple[str, str]) -> asyncio.Future[JobRecord]:
        promise: asyncio.Future[JobRecord] = asyncio.get_running_loop().create_future()
        self._submitted[submission] = promise
        while len(self._submitted) > self._term.submissions_kept:
            self._submitted.popitem(last=False)
        return promise

    async def _queue(self, message: SubmitJob, command: str) -> JobRecord:
        """
        Raises:
            OverQuota: its user has as much as they may.
            NotFound: the archive of its code is not there.
        """
        async with self.admission.turn:  # the next submission counts this one, too
            self.admission.submission(message)
            self._know(message.spec.queue)
            await self.code.require(message.spec)
            return await self._queued(message, command)

    async def _queue_array(self, message: SubmitArray, command: str) -> JobRecord:
        """Returns the record of the first member.

        Raises:
            BadJob: one of the members is no valid job.
            OverQuota, NotFound: see `_queue`.
        """
        specs = await asyncio.to_thread(specs_of, message)
        async with self.admission.turn:
            self.admission.array(message, specs)
            for asked in dict.fromkeys(spec.queue for spec in specs):
                self._know(asked)
            await self.code.require(message.spec)
            return await self._queued_array(message, specs, command)

    def _know(self, asked: QueueSpec) -> None:
        for where, jobs in (("after", asked.after), ("apart", asked.apart), ("beside", asked.beside)):
            for job in jobs:
                if where == "after" and job in self.arrays:
                    continue
                if job in self.arrays:
                    raise NotFound(f"queue.{where}: {job} is an array; name its jobs, as {job}_0")
                if not self.queue.knows(job):
                    raise NotFound(f"queue.{where}: {unknown(job)}")
                if where != "after" and is_build(job):
                    raise BadJob(f"queue.{where}: {job} is a build, which has no nodes of its own: name jobs")

    async def _queued(self, message: SubmitJob, command: str) -> JobRecord:
        record = self._new_record(f"j{secrets.token_hex(3)}", message, message.spec, command)
        return await self._start(record, 0, message.gateway, SUBMITTED)

    def _new_record(
        self,
        job: str,
        message: SubmitJob | SubmitArray,
        spec: JobSpec,
        command: str,
        place: ArrayPlace | None = None,
    ) -> JobRecord:
        names.refuse_taken("job", spec.name)
        now = time.time()
        quota = message.quota or Quota()
        if quota.guaranteed_slots and self.queue.rules.order is not QueueOrder.FAIR:
            log.warning("guaranteed slots count with --queue-order fair only", user=message.user)
        return JobRecord(
            job=job,
            spec=spec,
            state=JobState.QUEUED,
            user=message.user,
            array=place,
            guaranteed_slots=quota.guaranteed_slots,
            queue_share=quota.queue,
            may_read=message.may_read,
            command=command,
            correlation=current() or new_correlation(),
            caller_span=message.caller_span,
            held=f"held by {message.user}: queue.hold" if spec.queue.hold else "",
            submitted_at=now,
            changed_at=now,
        )

    async def _queued_array(self, message: SubmitArray, specs: Sequence[JobSpec], command: str) -> JobRecord:
        """Writes all records, that of the first member last: with it the array is submitted (ADR-0087)."""
        array, stores = f"{names.ARRAY_LETTER}{secrets.token_hex(3)}", []
        for index, spec in enumerate(specs):
            if not index % 16:
                await asyncio.sleep(0)  # a thousand files are not written down in one piece
            values = values_at(spec, message.paths)
            place = ArrayPlace(array=array, index=index, size=len(specs), limit=message.limit, values=values)
            job = names.member_id(array, index)
            record = self._new_record(job, message, spec, command, place)
            history = (f"{record.state}: {SUBMITTED}",)
            opened = record.model_copy(update={"epoch": 1, "reason": SUBMITTED, "history": history})
            stores.append(JobStore(self._term.bus, opened, 0, self._term.candidate.confirmed))
        first, *others = stores
        try:
            for batch in _batches(others):
                await asyncio.gather(*(store.note(now=True) for store in batch))
            await first.note(now=True)
        except DmscError as error:
            if not isinstance(error, Fenced):  # else the next leader removes them
                self._term.spawn(self._remove([store.job for store in others]))
            raise
        for batch in _batches(stores):
            await asyncio.gather(*(self._begin(store, message.gateway) for store in batch))
        return first.record

    async def _begin(self, store: JobStore, gateway: str) -> None:
        self._take(run := self._new_run(store, gateway))
        record = store.record
        await store.tell("state", text=SUBMITTED, state=record.state, total_steps=record.last_step)
        self._term.spawn(self._drive(run))

    async def _remove(self, jobs: Iterable[str]) -> None:
        """Removes the records of jobs that were never submitted."""
        for job in jobs:
            await insistently(partial(self._term.bus.bucket(subjects.JOB_RECORD).delete, job=job))

    async def _start(self, record: JobRecord, revision: int, gateway: str, reason: str) -> JobRecord:
        """Starts a job in a new epoch; the first write fences the orchestrator that ran it before.

        Raises:
            Fenced: the record is no longer the one of `revision`.
        """
        fresh = record.model_copy(update={"epoch": record.epoch + 1})
        store = JobStore(self._term.bus, fresh, revision, self._term.candidate.confirmed)
        run = self._new_run(store, gateway)
        # an ending job only has to be cleaned up, and a parked job goes on waiting
        stays = record.ends_as is not None or record.state is JobState.PARKED
        await store.move(record.state if stays else JobState.QUEUED, record.reason if stays else reason)
        self._take(run)
        self._term.spawn(self._drive(run))
        return store.record

    def _new_run(self, store: JobStore, gateway: str, parked: Parked | None = None) -> JobRun:
        run = self._run_type(store.record)(self._term, self.queue, store, gateway, parked)
        run.actions.on_set = run.training.rebalancing.on_set = partial(self._set_by_person, run.name)
        return run

    def _take(self, run: JobRun) -> None:
        self.running[run.name], self._holders[run.name] = run, run.holding
        self.arrays.take(run.job.store.record)

    async def _drive(self, run: JobRun) -> None:
        """Drives a job to its end. A parked job gets a new run, in the next epoch."""
        try:
            while True:
                await run.run()
                if run.parked is None:
                    return
                await self._term.mesh.nudge()  # its slots are free
                store, before = run.job.store, None if run.parking.resumed else run.parked
                store.begin_epoch()
                run = self._new_run(store, run.job.gateway.sid, before)
                self._take(run)
                await store.move(JobState.PARKED, store.record.reason)
        finally:
            del self.running[run.name], self._holders[run.name]
            await self._term.mesh.nudge()  # jobs behind it in the queue look again
            self.ended[run.name] = run.job.store.record
            self.arrays.take(run.job.store.record)
            self.queue.job_ended(run.job.store.record)
            forget_oldest(self.ended, self._term.ended_kept, self._started_after)
            self._forget(run.name)
            self._term.mesh.forget_job(run.name)
            await self._release_code(run)

    def _started_after(self) -> set[str]:
        return {name for run in self.running.values() for name in run.job.spec.queue.after}

    async def _release_code(self, run: JobRun) -> None:
        if run.job.spec.code is not None and run.job.store.record.state in ENDED:
            async with self.admission.turn:
                others = [other.present_record() for other in self.running.values()]
                await self.code.release([run.job.spec], others)

    async def resume(self) -> None:
        """Starts jobs again that an earlier leader left open, in a new epoch."""
        bucket = self._term.bus.bucket(subjects.JOB_RECORD)
        entries = await insistently(partial(bucket.entries, strict=True))
        # A decision of a newer version must be noticed before any job is taken up and writes its own.
        await insistently(partial(self._term.bus.bucket(subjects.STEP_DECISION).entries, strict=True))
        records = {entry.message.job: (above_all(entry), entry.revision) for entry in entries}
        for job in self._former_records.keys() - records.keys():
            log.error("job record lost: the job goes on from the record in memory", job=job)
            records[job] = (self._former_records[job], 0)
        half = half_submitted(record for record, _ in records.values())
        for job in half:
            del records[job]
        await self._remove(half)
        for record, revision in sorted(records.values(), key=lambda entry: entry[0].submitted_at):
            if record.command:
                self._remember((record.user, record.command)).set_result(record)
            await self._resume_one(record, revision)
        async with self.admission.turn:
            await self.code.release_left_behind(self.records())

    async def _resume_one(self, record: JobRecord, revision: int) -> None:
        """Takes over one job. The former leader may write its record until our epoch is in it."""
        while True:
            if record.state in ENDED:
                self.ended[record.job] = record
                self.arrays.take(record)
                self.queue.job_ended(record)
                return
            found = f"term {self._term.candidate.term}: found {record.state}"
            try:
                await self._start(record, revision, "", found)
                return
            except (Fenced, Unavailable) as error:
                log.info("job not taken over yet", job=record.job, reason=error.text)
            fresh = await insistently(partial(self._read, record.job))
            if fresh is None:
                return
            record, revision = above_all(fresh), fresh.revision

    async def _read(self, job: str) -> KeyValueEntry | None:
        return await self._term.bus.bucket(subjects.JOB_RECORD).get(leader=True, job=job)

    def _running(self, job: str) -> JobRun:
        if (run := self.running.get(job)) is None:
            raise NotFound(f"no job {job} runs: `dmsc jobs` lists them")
        return run

    async def scale(self, message: ScaleJob, envelope: Envelope) -> Ack:
        async with self.admission.turn:  # a job that is being submitted counts, too
            run = self._running(message.job)
            self.admission.scaling(message, run.present_record())
            note = run.shape.scale(message.stage, message.replicas, message.unit)
            if message.stage is None and not message.unit:
                await run.shape.prefer(message.replicas)
                run.holding.prefer(None)
                self._set_by_person(message.job, REPLICAS, str(message.replicas), message.user)
            return Ack(note=note)

    async def change_stage(self, message: ChangeStage, envelope: Envelope) -> Ack:
        return Ack(note=self._running(message.job).move(message.sid, message.stage, message.user))

    async def recut(self, message: RecutJob, envelope: Envelope) -> RecutAnswer:
        return await self._running(message.job).recut(message)

    async def cancel(self, message: CancelJob, envelope: Envelope) -> JobRecord:
        run = self.running.get(message.job)
        if run is None or run.job.store.record.ends_as is not JobState.CANCELLED:  # else it is asked again
            run = self._unended(message.job)
        await run.cancel(message.reason or f"cancelled by {message.user}")
        return run.job.store.record

    async def park(self, message: ParkJob, envelope: Envelope) -> JobRecord:
        run = self._unended(message.job)
        await run.parking.park(f"parked by {message.user}{message.reason and f': {message.reason}'}")
        return run.job.store.record

    async def unpark(self, message: ResumeJob, envelope: Envelope) -> JobRecord:
        run, shape = self._unended(message.job), ""
        if message.stages is not None or message.replicas is not None:
            async with self.admission.turn:  # a job that is being submitted counts, too
                spec = reshaped(run.job.spec, message.stages, message.replicas)
                self.admission.reshaping(message, run.present_record(), spec)
                await run.shape.reshape(spec)
                if message.replicas is not None and spec.serve is not None:  # whatever its load is
                    self._set_by_person(message.job, REPLICAS, str(message.replicas), message.user)
            shape = f" with {spec.parallel.stages} stages, replicas {spec.parallel.replicas_per_stage()}"
        await run.parking.resume(f"resumed by {message.user}{shape}")
        await self._term.mesh.nudge()  # one that was held in the queue may start
        return run.job.store.record

    async def prioritise(self, message: PrioritiseJob, envelope: Envelope) -> JobRecord:
        run = self._unended(message.job)
        await run.holding.prioritise(message.priority, message.user)
        return run.job.store.record

    async def order_array(self, message: OrderArray, envelope: Envelope) -> JobArray:
        """Gives one order to all members that can take it, to those that wait first: they need not start.

        Those that go on come first when they are resumed, so that none of the others takes their slots.

        Raises:
            NotFound: there is no such array.
            Conflict: no member can take the order; the text is that of the first.
        """
        order = partial(self._order_member, message, envelope)
        if message.action in ("resume", "prioritise"):
            await self._term.candidate.confirmed()
        members = self.arrays.jobs(message.array)
        if not members:
            raise NotFound(unknown(message.array))
        jobs = [job for job in members if job in self.running]
        waiting = [job for job in jobs if self.running[job].holding.waiting is not None]
        in_queue = set(waiting)
        begun = [job for job in jobs if job not in in_queue]
        refusals: list[DmscError] = []
        for group in (begun, waiting) if message.action == "resume" else (waiting, begun):
            for batch in _batches(group):
                answers = await asyncio.gather(*map(order, batch))
                refusals += [answer for answer in answers if answer is not None]
        if len(refusals) == len(jobs):
            raise refusals[0] if refusals else Conflict(f"array {message.array} has already ended")
        found = self._array(message.array)
        records = [self.running[job].job.store.record for job in members if job in self.running]
        return found.model_copy(update={"note": outcome_of(message, found, records)})

    async def _order_member(self, message: OrderArray, envelope: Envelope, job: str) -> DmscError | None:
        """Returns why the member can't take the order; None if it did."""
        user, reason = message.user, message.reason
        try:
            if message.action == "cancel":
                await self.cancel(CancelJob(job=job, user=user, reason=reason), envelope)
            elif message.action == "park":
                await self.park(ParkJob(job=job, user=user, reason=reason), envelope)
            elif message.priority is not None:
                await self.prioritise(PrioritiseJob(job=job, user=user, priority=message.priority), envelope)
            else:
                shape = {"stages": message.stages, "replicas": message.replicas, "quota": message.quota}
                await self.unpark(ResumeJob(job=job, user=user, **shape), envelope)
        except (Conflict, NotFound, OverQuota, BadInput) as error:
            return error
        return None

    def _array(self, array: str) -> JobArray:
        if (found := array_of(array, self.records())) is None:
            raise NotFound(unknown(array))
        return found

    def _unended(self, job: str) -> JobRun:
        """The job's run; it may wait, but has no end yet."""
        run, record = self.running.get(job), self.record(job)
        if record is None:
            raise NotFound(unknown(job))
        if run is None or record.state in ENDED:  # users hear of that before its run is over
            raise Conflict(f"job {job} has already ended: {record.state}")
        if run.over:
            raise Conflict(f"job {job} is ending: {record.state}")
        return run

    async def query(self, message: JobQuery, envelope: Envelope) -> JobList:
        if message.job is None:
            return JobList(jobs=tuple(self.records()))
        if (record := self.record(message.job)) is None:
            raise NotFound(f"no job {message.job}: `dmsc jobs` lists them")
        return JobList(jobs=(record,))

    async def queue_status(self, message: QueueQuery, envelope: Envelope) -> QueueStatus:
        if message.job is not None and message.job not in self.queue.builds.members:
            if (build := self.queue.builds.ended.get(message.job)) is not None:
                raise Conflict(f"build {message.job} has already ended: {build.state}")
            if message.job not in self.arrays:
                self._unended(message.job)
        return await self.queue.status(
            {name: run.job.store.record for name, run in self.running.items()},
            message.job,
            self.reservations.present(time.time()),
        )

    def record(self, job: str) -> JobRecord | None:
        run = self.running.get(job)
        return self.ended.get(job) if run is None else run.job.store.record

    def records(self) -> list[JobRecord]:
        records = [*self.ended.values(), *(run.job.store.record for run in self.running.values())]
        return sorted(records, key=lambda record: record.submitted_at)


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE))
