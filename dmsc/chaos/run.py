"""Executes a chaos run: a clean run to compare with, the same job with the plan's faults, and the report."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from bus.connection import Bus
from bus.tasks import cancel
from dmsc.chaos import history, report, store_faults
from dmsc.chaos.history import ComputedWork
from dmsc.chaos.holding import Holding
from dmsc.chaos.injection import FaultInjector, fault_line
from dmsc.chaos.patience import persistently
from dmsc.chaos.plan import ChaosTimes, Every, FaultKind, plan
from dmsc.chaos.processes import LocalMesh, ProcessHandle, resume
from dmsc.chaos.report import ChaosReport, Clean, InjectedFault
from dmsc.chaos.watch import Watched, watching, work_of
from dmsc.client.async_client import AsyncClient
from dmsc.state.settings import BusAddress, find_bus
from dmsc.state.state_folder import StateFolder
from schemas.envelope import EntityKind
from schemas.errors import BadInput, DmscError
from schemas.job import ENDED, JobEvent, JobRecord, JobSpec, JobState

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """The options of a chaos run. `faults` is the maximal number of faults; None: until the job has ended."""

    every: Every
    seed: int = 0
    kinds: tuple[FaultKind, ...] = (FaultKind.INSTANCE,)
    faults: int | None = None


class Chaos:
    """Runs jobs of one mesh on this machine with and without faults. `open_chaos` makes it."""

    def __init__(
        self,
        folder: StateFolder,
        client: AsyncClient,
        bus: Bus,
        say: Say,
        address: BusAddress,
        times: ChaosTimes = ChaosTimes(),
    ) -> None:
        self.client = client
        self.say = say
        self.times = times
        self.injector = FaultInjector(folder.path, LocalMesh(folder), bus, address, times)
        self.folder = folder.path
        self._bus = bus

    async def clean_run(self, spec: JobSpec) -> Clean:
        """Run the job without faults. Raises `DmscError` if it does not end well."""
        record = await self.client.submit(spec)
        self.say(f"{record.job}: clean run of {spec.training.steps} steps, to compare with")
        async with self._own(record), watching(self.client, self._bus, record.job) as watched:
            await watched.ended.wait()
        return await self.clean_figures(record.job, watched)

    async def clean_figures(self, job: str, watched: Watched | None = None) -> Clean:
        """The figures of a job that ran without faults. Raises `BadInput` if it can't be compared with."""
        if watched is None:
            async with watching(self.client, self._bus, job) as watched:
                await watched.ended.wait()
            watched.decided.clear()  # only the last decision is left, and its time is when it was read
        record = await self._final(job)
        if record.state is not JobState.DONE:
            raise BadInput(f"{job} is {record.state.value}: {record.reason}; it can't be compared with")
        steps = history.read(watched.events, watched.decided, microbatches=record.spec.training.microbatches)
        sha256 = record.weights.sha256 if record.weights is not None else None
        clean = report.clean_of(steps.advances, sha256=sha256, job=job)
        if clean is None:
            raise BadInput(f"{job} has fewer than two steps; give it more (--set training.steps=…)")
        self.say(f"{job}: {clean.step_s:.3f} s a step, sha256 {str(sha256)[:12]}")
        return clean

    async def disturbed_run(
        self, job: JobSpec | str, options: ChaosOptions, clean: Clean | None = None
    ) -> ChaosReport:
        """Submit the job (or take a running one by its id) and inject the faults.

        Raises:
            BadInput: The job has ended, or has instances on other machines, or the disk to fill is too large.
        """
        if FaultKind.DISK_FULL in options.kinds:
            store_faults.check_disk(self.folder)
        submitted = not isinstance(job, str)
        record = await (self.client.job(job) if isinstance(job, str) else self.client.submit(job))
        if record.state in ENDED:
            raise BadInput(
                f"{record.job} has ended ({record.state.value}); name one that runs, or a job file"
            )
        spec, job = record.spec, record.job
        kinds = ", ".join(kind.value for kind in options.kinds)
        self.say(f"{job}: a fault every {options.every} ({kinds}), seed {options.seed}")
        faults: list[InjectedFault] = []
        frozen: list[ProcessHandle] = []
        async with AsyncExitStack() as stack:
            if submitted:
                await stack.enter_async_context(self._own(record))
            stack.callback(resume, frozen)
            stack.push_async_callback(self.injector.free_disks)
            holding = await stack.enter_async_context(Holding(self.client, frozen, self.say))
            tell = await stack.enter_async_context(auditing(self.client, self.say, self.times))
            watched = await stack.enter_async_context(
                watching(self.client, self._bus, job, lambda event: self._tell(event, faults))
            )
            injecting = asyncio.create_task(
                self._inject_all(watched, max(record.step, 1), options, clean, faults, frozen, holding, tell)
            )
            ending = asyncio.create_task(watched.ended.wait())
            try:
                await asyncio.wait({injecting, ending}, return_when=asyncio.FIRST_COMPLETED)
                if injecting.done():
                    injecting.result()
                await ending
            finally:
                await cancel(injecting, ending)
        return await self._report(job, spec, options, clean, watched, faults)

    # --- the faults ---------------------------------------------------------------------------------------
    async def _inject_all(
        self,
        watched: Watched,
        first: int,
        options: ChaosOptions,
        clean: Clean | None,
        faults: list[InjectedFault],
        frozen: list[ProcessHandle],
        holding: Holding,
        tell: Tell,
    ) -> None:
        """Inject the plan's faults as soon as `first` steps are committed."""
        if not await watched.reach(first):
            return
        await self.injector.all_here(watched.job)
        began = time.monotonic()
        for planned in plan(options.seed, options.every, options.kinds):
            if options.faults is not None and planned.number >= options.faults:
                return
            offset_s = planned.offset * (clean.step_s if clean else _step_s(watched))
            if options.every.seconds is not None:
                await asyncio.sleep(max(0.0, began + planned.due + offset_s - time.monotonic()))
            else:
                await watched.reach(first + int(planned.due))
                await asyncio.sleep(offset_s)
            if not watched.training:
                return
            fault = await self.injector.inject(
                planned,
                watched.job,
                lambda: watched.training,
                frozen,
                holding,
                lambda: watched.standbys,
            )
            faults.append(fault)
            self.say(fault_line(fault, f"step {watched.committed}", self.times.hold_s))
            if fault.fired:
                tell(fault)

    # --- what came of it ----------------------------------------------------------------------------------
    async def _report(
        self,
        job: str,
        spec: JobSpec,
        options: ChaosOptions,
        clean: Clean | None,
        watched: Watched,
        faults: Sequence[InjectedFault],
    ) -> ChaosReport:
        record = await self._final(job)
        training = spec.training
        done = record.state is JobState.DONE
        steps = history.read(
            watched.events,
            watched.decided,
            microbatches=training.microbatches,
            steps=training.steps if done else None,
        )
        return report.make_report(
            job=job,
            state=record.state.value,
            reason=record.reason,
            seed=options.seed,
            every=str(options.every),
            steps=training.steps,
            samples_per_step=training.microbatches * training.microbatch_samples,
            faults=faults,
            clean=clean,
            history=steps,
            work=await self._work(job),
            units_per_step=training.microbatches * spec.parallel.stages,
            recoveries=record.recoveries,
            sha256=record.weights.sha256 if record.weights is not None else None,
        )

    async def _work(self, job: str) -> ComputedWork:
        return await persistently(lambda: work_of(self._bus, job))

    async def _final(self, job: str) -> JobRecord:
        """The record of a job that has ended. The mesh may not answer at once, so the request is repeated."""
        record = await persistently(lambda: self.client.job(job))
        deadline = time.monotonic() + self.times.end_s
        while record.state not in ENDED and time.monotonic() < deadline:
            await asyncio.sleep(self.times.look_every_s)
            record = await persistently(lambda: self.client.job(job))
        return record

    @asynccontextmanager
    async def _own(self, record: JobRecord) -> AsyncIterator[None]:
        """Cancel a job that this run has submitted if the block ends with an error."""
        try:
            yield
        except BaseException:
            try:
                async with asyncio.timeout(10.0):
                    await asyncio.shield(self.client.cancel(record.job))
            except (DmscError, TimeoutError):
                self.say(f"{record.job} could not be cancelled: dmsc cancel {record.job}")
            raise

    def _tell(self, event: JobEvent, faults: Sequence[InjectedFault]) -> None:
        if faults and event.kind in ("fault", "recovery") and event.text:
            mark = "!" if event.warning else "✗" if event.kind == "fault" else "↻"
            self.say(f"          {mark} {event.text}")


@asynccontextmanager
async def open_chaos(folder: StateFolder, say: Say, times: ChaosTimes = ChaosTimes()) -> AsyncIterator[Chaos]:
    """Open `Chaos` for the mesh of a state folder. Raises `BadInput` if no mesh runs there."""
    LocalMesh(folder)  # raises its clear error before anything is connected
    address = find_bus(state=folder.path)
    async with (
        AsyncClient(state=folder.path, patience_s=times.patience_s) as client,
        Bus.connect(address.servers, name="chaos", kind=EntityKind.CLIENT, token=address.token) as bus,
    ):
        yield Chaos(folder, client, bus, say, address, times)


def _step_s(watched: Watched) -> float:
    """The mean time of the last steps, used if there is no clean run."""
    recent = [event.result.step_s for event in watched.events if event.result is not None][-10:]
    return sum(recent) / len(recent) if recent else 0.0


Tell = Callable[[InjectedFault], None]


@asynccontextmanager
async def auditing(client: AsyncClient, say: Callable[[str], None], times: ChaosTimes) -> AsyncIterator[Tell]:
    """Yield a function that records a fault on the audit stream, through a gateway, as soon as one answers.

    At the end of the block it waits for all records; `say` gets a line about those that failed.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def record(fault: InjectedFault) -> None:
        key = secrets.token_hex(16)  # a repeated request then records the same fault
        what = (fault.victim, fault.kind.value)
        try:
            await persistently(lambda: client.tell_outside_fault(*what, idempotency_key=key))
        except DmscError as error:
            say(f"{fault.victim} {fault.kind.value}: not on the audit stream: {error.text}")

    patience_s = times.given_up_s
    try:
        yield lambda fault: tasks.add(asyncio.create_task(record(fault)))
        patience_s = times.end_s
    finally:
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=patience_s)
            for task in late:
                task.cancel()
            if late:
                say(f"{len(late)} faults are not on the audit stream: no gateway answered in time")
            await asyncio.gather(*tasks, return_exceptions=True)
