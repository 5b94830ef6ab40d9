"""All builds of one term: submissions, takeovers, cancellations, questions; versions that users delete."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from bus import subjects
from bus.logs import get_logger
from bus.messaging.key_value import KeyValueEntry
from entities.orchestrator.data_builds.build_run import BuildRun
from entities.orchestrator.data_builds.build_store import BuildStore
from entities.orchestrator.data_builds.late_versions import LateVersions
from entities.orchestrator.data_builds.leftovers import BuildObjects
from entities.orchestrator.data_builds.versions import DataSetVersions
from entities.orchestrator.job.code_archives import archive_of
from entities.orchestrator.job.job_runs import JobRuns
from entities.orchestrator.job.term import TermContext, insistently
from entities.orchestrator.queue.job_queue import unknown
from schemas.data_set.builds import BUILD_LETTER, BuildRecord, BuildState
from schemas.data_set.commands import (
    BuildList,
    BuildQuery,
    CancelBuild,
    DeleteVersion,
    ParkBuild,
    PrioritiseBuild,
    ResumeBuild,
    SubmitBuild,
    UnitPrepared,
)
from schemas.envelope import Envelope
from schemas.errors import (
    Ack,
    Conflict,
    DmscError,
    Fenced,
    NotFound,
    OverQuota,
    Refused,
    Unavailable,
)
from schemas.quota import QuotaUse, used_by

log = get_logger("orchestrator")


@dataclass(frozen=True, kw_only=True)
class BuildsConfig:
    """Bounds of what stays of builds.

    `ended_kept`: ended builds that stay in memory for listings. `work_kept_s`: how long the finished units of
    a build that failed or was cancelled stay for the next one; longer costs space. `sweep_s`: how often that
    is looked at.
    """

    ended_kept: int = 1000
    work_kept_s: float = 7 * 86_400.0
    sweep_s: float = 3600.0


class Builds:
    """`running`: builds that have not ended, by id; `ended`: the last others."""

    def __init__(self, term: TermContext, jobs: JobRuns, config: BuildsConfig = BuildsConfig()) -> None:
        self.running: dict[str, BuildRun] = {}
        self.ended: dict[str, BuildRecord] = {}
        self._term = term
        self._jobs = jobs
        self._config = config
        self._versions = DataSetVersions(term.bus)
        self._objects = BuildObjects(term.bus, term.mesh)
        self._working: Counter[str] = Counter()
        self._turn = asyncio.Lock()
        jobs.queue.builds.ended = self.ended
        jobs.queue.builds.late_versions = LateVersions(self._versions, self.ended.get).resolve

    # --- requests -------------------------------------------------------------------------------------------
    async def submit(self, message: SubmitBuild, envelope: Envelope) -> BuildRecord:
        """Begins a build; a submission that comes again, through another gateway or leader, is the same one.

        Raises:
            Conflict: a build of this data set is under way.
            Refused: the data set is another user's.
            OverQuota: the user has as many jobs and builds as they may.
            NotFound: the archive of its code, or what it is to start after, is not there.
        """
        command = envelope.causation or envelope.id
        async with self._turn:
            same = (each for each in self.records() if (each.user, each.command) == (message.user, command))
            if (known := next(same, None)) is not None:
                return known
            await self._admit(message)
            for name in message.spec.queue.after:
                if not self._jobs.queue.knows(name):
                    raise NotFound(f"queue.after: {unknown(name)}")
            now = time.time()
            record = BuildRecord(
                build=f"{BUILD_LETTER}{secrets.token_hex(3)}",
                spec=message.spec,
                state=BuildState.QUEUED,
                user=message.user,
                may_read=message.may_read,
                command=command,
                held=f"held by {message.user}: queue.hold" if message.spec.queue.hold else "",
                submitted_at=now,
                changed_at=now,
            )
            async with self._jobs.admission.turn:  # the archive of its code does not go meanwhile
                await self._jobs.code.require(message.spec)
                self._need_code(record)
            await self._drop_other_work(record)
            return await self._start(record, 0, "submitted")

    async def _admit(self, message: SubmitBuild) -> None:
        name, user = message.spec.name, message.user
        for run in self.running.values():
            if run.record.spec.name == name and not run.record.ended:
                raise Conflict(
                    f"build {run.record.build} of {name} is under way: wait for its end, or cancel it "
                    f"(dmsc data cancel {run.record.build})"
                )
        rows = await self._versions.of(name)
        owner = rows[0].built_by if rows else user
        if owner != user and not message.over_others:
            raise Refused(f"data set {name} is {owner}'s; build yours under another name", user=user)
        own = sum(run.record.user == user for run in self.running.values())
        use = used_by(user, (run.present_record() for run in self._jobs.running.values()))
        quota, one = message.quota, QuotaUse(jobs=1)
        excess = "" if quota is None else quota.excess(use.plus(QuotaUse(jobs=own)), one)
        if excess:
            raise OverQuota(excess, user=user)

    async def cancel(self, message: CancelBuild, envelope: Envelope) -> BuildRecord:
        """
        Raises:
            NotFound: there is no such build.
            Conflict: it has ended, or is ending.
        """
        run = self._unended(message.build)
        await run.cancel(message.reason or f"cancelled by {message.user}")
        return run.record

    async def park(self, message: ParkBuild, envelope: Envelope) -> BuildRecord:
        """
        Raises:
            NotFound: there is no such build.
            Conflict: it has ended, or is ending.
        """
        run = self._unended(message.build)
        await run.park(f"parked by {message.user}{message.reason and f': {message.reason}'}")
        return run.record

    async def unpark(self, message: ResumeBuild, envelope: Envelope) -> BuildRecord:
        """Raises as `park` does, and `Conflict` if it is neither parked nor held."""
        run = self._unended(message.build)
        await run.resume(f"resumed by {message.user}")
        return run.record

    async def prioritise(self, message: PrioritiseBuild, envelope: Envelope) -> BuildRecord:
        """Raises as `park` does."""
        run = self._unended(message.build)
        await run.prioritise(message.priority)
        return run.record

    def _unended(self, build: str) -> BuildRun:
        run = self.running.get(build)
        if run is None:
            record = self.ended.get(build)
            if record is None:
                raise NotFound(unknown(build))
            raise Conflict(f"build {build} has already ended: {record.state}")
        return run

    async def query(self, message: BuildQuery, envelope: Envelope) -> BuildList:
        if message.build is None:
            return BuildList(builds=tuple(self.records()))
        run = self.running.get(message.build)
        record = run.record if run is not None else self.ended.get(message.build)
        if record is None:
            raise NotFound(unknown(message.build))
        return BuildList(builds=(record,))

    async def prepared(self, message: UnitPrepared, envelope: Envelope) -> Ack:
        """A node agent tells what a unit gave. What nobody asked it for counts for nothing."""
        agent = envelope.sender.name
        run = self.running.get(message.build)
        if run is None or not run.prepared(message, agent):
            log.info("result of a unit that was not asked for", build=message.build, agent=agent)
            return Ack(note="not asked for")
        return Ack()

    async def delete(self, message: DeleteVersion, envelope: Envelope) -> Ack:
        """Removes a version, and what only it refers to.

        Raises:
            NotFound: there is no such version.
            Conflict: a job reads it, or a build of the data set is under way.
        """
        name = message.name
        async with self._turn:
            for run in self.running.values():
                if run.record.spec.name == name:
                    raise Conflict(f"build {run.record.build} of {name} is under way: wait for its end")
            row = await self._versions.remove(name, message.version, message.user, self._jobs.records())
            kept = await self._versions.objects_in(name, row.store)
            await self._objects.remove_but(row.store, kept)
        return Ack(note=f"{row.reference} removed")

    def records(self) -> list[BuildRecord]:
        records = [*self.ended.values(), *(run.record for run in self.running.values())]
        return sorted(records, key=lambda record: record.submitted_at)

    # --- lives ----------------------------------------------------------------------------------------------
    async def know_code(self) -> None:
        """Notes the archives of code that builds need, before any that nobody needs are removed."""
        for entry in await self._entries():
            if not entry.message.ended:
                self._need_code(entry.message)

    async def _entries(self) -> list[KeyValueEntry]:
        bucket = self._term.bus.bucket(subjects.BUILD_RECORD)
        return await insistently(partial(bucket.entries, strict=True))

    async def resume(self) -> None:
        """Goes on with the builds that an earlier leader left open."""
        for entry in sorted(await self._entries(), key=lambda entry: entry.message.submitted_at):
            record: BuildRecord = entry.message
            if record.ended:
                self._keep(record)
                self._jobs.queue.job_ended(record)
            else:
                await self._take_over(record, entry.revision)

    async def _take_over(self, record: BuildRecord, revision: int) -> None:
        """Takes over one build. The former leader may write its record until ours is there."""
        reason = f"term {self._term.candidate.term}: goes on"
        while not record.ended:
            try:
                await self._start(record, revision, reason)
                return
            except (Fenced, Unavailable) as error:
                log.info("build not taken over yet", build=record.build, reason=error.text)
            bucket = self._term.bus.bucket(subjects.BUILD_RECORD)
            entry = await insistently(partial(bucket.get, leader=True, build=record.build))
            if entry is None:
                return
            record, revision = entry.message, entry.revision
        self._keep(record)

    async def _start(self, record: BuildRecord, revision: int, reason: str) -> BuildRecord:
        store = BuildStore(self._term.bus, record, revision, self._term.candidate.confirmed)
        store.used(record.usage.held(0, time.time()))  # it has no lanes before the queue gives it some
        await store.move(record.state, reason if record.ends_as is None else record.reason)
        run = self._run_of(store)
        self.running[record.build] = run
        self._jobs.queue.builds.enter(run.lanes)
        self._term.spawn(self._drive(run))
        return store.record

    def _run_of(self, store: BuildStore) -> BuildRun:
        return BuildRun(self._term, store, self._versions, self._objects, self._working, self._jobs.queue)

    async def _drive(self, run: BuildRun) -> None:
        try:
            await run.run()
        finally:
            record = run.record
            self.running.pop(record.build, None)
            if record.ended:
                self._keep(record)
                self._jobs.queue.job_ended(record)
            self._jobs.queue.builds.leave(record.build)
            if record.ended:
                await self._release_code(record)

    def _keep(self, record: BuildRecord) -> None:
        self.ended[record.build] = record
        while len(self.ended) > self._config.ended_kept:
            del self.ended[next(iter(self.ended))]

    async def shut_down(self) -> None:
        """Ends all runs of this term; their builds go on with the next leader."""
        await asyncio.gather(*(run.shut_down() for run in list(self.running.values())))

    def _need_code(self, record: BuildRecord) -> None:
        if name := archive_of(record.spec):
            self._term.code_of_builds[record.build] = name

    async def _release_code(self, record: BuildRecord) -> None:
        if self._term.code_of_builds.pop(record.build, None) is not None:
            async with self._jobs.admission.turn:
                await self._jobs.code.release([record.spec], self._jobs.records())

    # --- work that is left ----------------------------------------------------------------------------------
    async def _drop_other_work(self, record: BuildRecord) -> None:
        """Drops unfinished work of this data set that the new build does not go on with."""
        await self._drop(
            each
            for each in list(self.ended.values())
            if each.keeps_work and each.spec.name == record.spec.name and each.scope != record.scope
        )

    async def sweep(self) -> None:
        """Drops work that nobody has gone on with for long; runs until cancelled."""
        while True:
            oldest = time.time() - self._config.work_kept_s
            kept = [each for each in self.ended.values() if each.keeps_work and each.changed_at < oldest]
            in_use = {run.record.scope for run in self.running.values()}
            async with self._turn:
                await self._drop(each for each in kept if each.scope not in in_use)
            await asyncio.sleep(self._config.sweep_s)

    async def _drop(self, records: Iterable[BuildRecord]) -> None:
        for record in records:
            try:
                entry = await self._term.bus.bucket(subjects.BUILD_RECORD).get(
                    leader=True, build=record.build
                )
                if entry is None:
                    continue
                confirmed = self._term.candidate.confirmed
                store = BuildStore(self._term.bus, entry.message, entry.revision, confirmed)
                await self._run_of(store).drop_work()
                self.ended[record.build] = store.record
            except DmscError as error:
                log.warning("work of a build not removed", build=record.build, reason=error.text)
