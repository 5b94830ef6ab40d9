"""Injects single faults: chooses a live victim, hits it, and verifies that it was hit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from pathlib import Path

from bus.connection import Bus
from bus.subjects import REGISTRY_RECORD
from bus.tasks import cancel
from dmsc.chaos import store_faults
from dmsc.chaos.holding import Holding
from dmsc.chaos.patience import persistently
from dmsc.chaos.plan import (
    FREEZES,
    STRIKES_STORE,
    ChaosTimes,
    FaultKind,
    PlannedFault,
    Target,
    choose,
)
from dmsc.chaos.processes import LocalMesh, ProcessHandle, inject
from dmsc.chaos.report import InjectedFault
from dmsc.state.settings import BusAddress
from schemas.errors import BadInput, DmscError
from schemas.registry import ServiceRecord


class FaultInjector:
    """Faults of one mesh on this machine. `folder`: the mesh's state folder; `bus`: with a tap's rights."""

    def __init__(
        self, folder: Path, mesh: LocalMesh, bus: Bus, address: BusAddress, times: ChaosTimes
    ) -> None:
        self._folder = folder
        self._mesh = mesh
        self._bus = bus
        self._address = address
        self._times = times
        self._filled: set[asyncio.Task[None]] = set()

    async def all_here(self, job: str) -> None:
        """Raise `BadInput` if the job has instances on other machines, because faults can't hit those."""
        elsewhere = self._mesh.elsewhere(job, await self._records())
        if elsewhere:
            await asyncio.sleep(self._times.victim_s)  # an instance may just have died or just have started
            elsewhere = self._mesh.elsewhere(job, await self._records())
        if elsewhere:
            raise BadInput(
                f"{job}: {', '.join(elsewhere)} run on other machines; chaos kills only what runs here: keep"
                " the job here with parallel.clusters"
            )

    async def inject(
        self,
        planned: PlannedFault,
        job: str,
        going: Callable[[], bool],
        frozen: list[ProcessHandle],
        holding: Holding,
        standbys: Callable[[], Collection[str]] = frozenset,
    ) -> InjectedFault:
        """Inject one fault: choose a live victim, signal it, and verify that it has died (or stopped).

        Args:
            planned: What is due.
            job: The job whose instances may be hit.
            going: Whether the run still goes on; without it nobody is waited for.
            frozen: Gets the handles of stopped processes.
            holding: Ends faults that last for a while.
            standbys: SIDs of standby replicas.
        """
        if planned.kind in STRIKES_STORE:
            return await self._inject_store_fault(planned)
        target: Target | None = None
        deadline = time.monotonic() + self._times.victim_s
        while going():
            alive = self._mesh.alive(job, await self._records(), standbys())
            target = choose(planned, alive)
            if target is not None or time.monotonic() > deadline:
                break
            await asyncio.sleep(self._times.look_every_s)  # all candidates are just being restarted
        if target is None:
            missed = f"nobody to hit for {self._times.victim_s:.0f} s" if going() else "the job ended"
            return InjectedFault(number=planned.number, kind=planned.kind, at=time.time(), missed=missed)
        requested_at = time.time()
        try:
            if planned.kind is FaultKind.NO_ROOM:
                await holding.close_mesh(self._times.hold_s)
            if planned.kind is FaultKind.NOTICE:
                at, handles = await inject(target.processes, notice=True, within_s=self._times.leave_s)
            else:
                at, handles = await inject(target.processes, freeze=planned.kind in FREEZES)
        except DmscError as error:
            return InjectedFault(
                number=planned.number,
                kind=planned.kind,
                at=requested_at,
                victim=target.name,
                missed=error.text,
                failed=True,
            )
        frozen.extend(handles)
        if planned.kind is FaultKind.SERVER_FREEZE:
            holding.thaw_after(self._times.hold_s, handles)
        return InjectedFault(
            number=planned.number,
            kind=planned.kind,
            at=at,
            victim=target.name,
            incarnations=tuple(instance.incarnation for instance in target.instances),
            processes=len(target.processes),
            sole=target.sole,
        )

    async def _inject_store_fault(self, planned: PlannedFault) -> InjectedFault:
        """Inject one fault of stored data."""
        requested_at = time.time()
        try:
            if planned.kind is FaultKind.GARBAGE_VALUE:
                at, victim = await persistently(lambda: store_faults.spoil(self._address, planned.pick))
            else:
                victim = f"disk of {self._folder}"
                await self.free_disks()
                at, task = await store_faults.fill(self._folder, self._times.full_s)
                self._filled.add(task)
        except (DmscError, OSError) as error:
            return InjectedFault(
                number=planned.number, kind=planned.kind, at=requested_at, missed=str(error), failed=True
            )
        return InjectedFault(number=planned.number, kind=planned.kind, at=at, victim=victim)

    async def free_disks(self) -> None:
        """Free the disks that were filled."""
        await cancel(*self._filled)
        self._filled.clear()

    async def _records(self) -> list[ServiceRecord]:
        """The registry's records, read from the bus, so that they are available without the registry."""
        while True:
            try:
                return [entry.message for entry in await self._bus.bucket(REGISTRY_RECORD).entries()]
            except DmscError:  # the bus's server is just being restarted
                await asyncio.sleep(self._times.look_every_s)


def fault_line(fault: InjectedFault, place: str, hold_s: float) -> str:
    """What happened, for people; `place`: when it was, as `step 12`. `hold_s`: see `ChaosTimes`."""
    outcomes = {
        FaultKind.FREEZE: "frozen",
        FaultKind.NOTICE: "given notice, and left",
        FaultKind.SERVER_FREEZE: f"frozen, for {hold_s:.0f} s",
        FaultKind.NO_ROOM: f"killed, for {hold_s:.0f} s in a mesh without room",
        FaultKind.GARBAGE_VALUE: "overwritten with garbage",
        FaultKind.DISK_FULL: "filled",
    }
    clock = time.strftime("%H:%M:%S", time.localtime(fault.at))
    if not fault.fired:
        return f"{clock}  {place}: {fault.kind.value} missed: {fault.missed}"
    outcome = outcomes.get(fault.kind, "killed")
    return f"{clock}  {place}: {fault.victim} {outcome}"
