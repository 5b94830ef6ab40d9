"""The instances of a version while it serves: those that are lost come again, one by one (ADR-0141).

There is no step that all take part in, so nobody waits for anybody: the loop looks at what is registered
after each change of the mesh, and has missing units started where there is room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from bus.logs import get_logger
from bus.subjects import STOP_INSTANCE
from bus.tasks import cancel
from entities.orchestrator.job.services.version_state import facts_of, of_different_kinds
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.retry_limits import Parked
from entities.orchestrator.planning.scaling import added_replicas, removed_replicas, with_units, without_units
from entities.orchestrator.recovery.replacement import Replacement
from schemas.cluster import InstanceStop
from schemas.errors import BadModel, Conflict, DmscError
from schemas.job import JobState
from schemas.step import Member
from schemas.task_graph import TaskUnit

log = get_logger("orchestrator")


class Serving:
    """Keeps a version's units staffed; an async context from the deployment to the end of the job's run."""

    step = 0
    """No step is ever open."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._replacement = Replacement(job)
        self._coming: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[str] = set()
        self._successors: dict[str, str] = {}  # unit that comes → the one whose place it takes
        self._wake = asyncio.Event()
        self._running = False
        self._parks: tuple[str, bool] | None = None

    async def __aenter__(self) -> Self:
        self._job.tasks.spawn(self._job.events.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._running = False
        await self._job.tasks.close()

    # --- for the job's run, the queue, and people -------------------------------------------------------
    @property
    def finds_room(self) -> bool:
        """Whether an instance that it lost is placed in a moment."""
        return self._replacement.finds_room()

    @property
    def leaving(self) -> frozenset[str]:
        """Units that were told to leave and have not been seen to exit."""
        return frozenset(self._leaving | {*self._successors.values()})

    def park(self, why: str, *, for_room: bool = False) -> bool:
        """Has the version give up its instances; '' withdraws that. Returns: it serves."""
        self._parks = (why, for_room) if why else None
        self._wake.set()
        return self._running

    def scale(self, stages: Sequence[int], replicas: int) -> str:
        """Gives these stages more or fewer replicas; returns what will happen, in words.

        Raises:
            BadInput: no such stage, or fewer than one replica.
            Conflict: there is no room for all of them, or a replica is just leaving.
        """
        graph, leaving = self._job.instances.graph, self.leaving
        if going := sorted(unit.sid for unit in graph.units if unit.stage in stages and unit.sid in leaving):
            raise Conflict(f"{', '.join(going)} is just leaving: ask again in a moment")
        added = [unit for stage in stages for unit in added_replicas(graph, stage, replicas)]
        missing = {unit.sid for unit in graph.units} - self._present()
        removed = [unit for stage in stages for unit in removed_replicas(graph, stage, replicas, missing)]
        if added and (why := self._replacement.no_room(added)):
            raise Conflict(f"there is no room for {replicas} replicas now: {why}")
        self._add(added)
        for unit in removed:
            self._let_go(unit.sid)
        said = [
            f"{', '.join(unit.sid for unit in units)} will {verb}"
            for verb, units in (("join", added), ("leave", removed))
            if units
        ]
        return "; ".join(said) or "nothing to do"

    def drain(self, sid: str) -> str:
        """Has an instance leave its node once another one answers elsewhere; returns an obstacle, or ''.

        The caller asks again until it is gone.
        """
        graph = self._job.instances.graph
        unit = next((each for each in graph.units if each.sid == sid), None)
        if unit is None or sid in self.leaving:
            return ""
        if not self._running:
            return "the version is being brought back"
        if sid in self._coming:
            return "it is just starting"
        (successor,) = added_replicas(graph, unit.stage, len(graph.stage(unit.stage)) + 1)
        if why := self._replacement.no_room([successor]):
            return why
        self._successors[successor.sid] = sid
        self._add([successor])
        return ""

    def lost(self, member: Member, why: str) -> None:
        """An instance can't be counted on any more: its unit is started again."""
        if self._job.instances.is_present(member):
            log.warning("instance lost", job=self._job.name, sid=member.sid, reason=why)
            self._job.instances.mark_lost(member)
            self._job.events.recovery(f"{member.sid}: {why}; replaced")
            self._wake.set()

    # --- the loop ---------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Keeps all units staffed until the run ends.

        Raises:
            Parked: the version is to be parked.
            DmscError: the version can't go on; the text says why.
        """
        job, self._running = self._job, True
        while True:
            seen = job.mesh.changes
            self._wake.clear()
            self._look()
            await self._tell()
            if self._parks is not None:
                self._running = False  # whoever withdraws it from now on resumes the job instead
                raise Parked(self._parks[0], for_room=self._parks[1])
            changed = asyncio.ensure_future(job.mesh.until_changed(seen))
            waits: set[asyncio.Future[Any]] = {changed, asyncio.ensure_future(self._wake.wait())}
            try:
                await job.tasks.unless_failed(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))
            finally:
                await cancel(*waits)

    def _look(self) -> None:
        instances, mesh = self._job.instances, self._job.mesh
        for member in instances.present():
            if member.sid not in self._coming and mesh.has_ended(member):
                record = mesh.last_of(member)
                self.lost(member, (record.reason if record else "") or "ended")
        records = [mesh.last_of(member) for member in instances.present()]
        if why := of_different_kinds(record for record in records if record is not None):
            raise BadModel(why)
        for sid in self._of_other_arithmetic():
            self._job.events.changed(f"{sid} leaves: serve.exact is required, and it computes other bits")
            self._let_go(sid)
        present, units = self._present(), {unit.sid for unit in instances.units}
        for sid in [sid for sid in instances.members if sid not in units and sid not in self._leaving]:
            self._let_go(sid)  # it was started after it had been told to leave
        for unit in instances.units:
            if unit.sid not in present and unit.sid not in self._coming and unit.sid not in self._leaving:
                self._bring(unit.sid, instances.members.get(unit.sid))

    def _of_other_arithmetic(self) -> list[str]:
        """Replicas whose bits are others than those of the first of their stage, where that is not wanted."""
        serve = self._job.spec.serve
        if serve is None or serve.exact != "required":
            return []
        first: dict[int, str] = {}
        others, present = [], self._present() - self._leaving
        for unit in self._job.instances.units:
            member = self._job.instances.members.get(unit.sid)
            record = None if member is None or unit.sid not in present else self._job.mesh.last_of(member)
            found = "" if record is None else facts_of(record).get("fingerprint", "")
            if found and first.setdefault(unit.stage, found) != found:
                others.append(unit.sid)
        return others

    async def _tell(self) -> None:
        """The record says whether each stage has an instance, so that people and traffic know."""
        store, present = self._job.store, self._present()
        stages = {unit.stage for unit in self._job.instances.units}
        staffed = {unit.stage for unit in self._job.instances.units if unit.sid in present}
        if bare := sorted(stages - staffed):
            if store.record.state is JobState.RUNNING:
                text = f"stage {', '.join(map(str, bare))} has no instance"
                await store.move(JobState.RECOVERING, text, graph=self._job.instances.graph)
        elif store.record.state is JobState.RECOVERING:
            await store.move(JobState.RUNNING, self.describe(), graph=self._job.instances.graph)
            self._job.queue.again()
        elif store.record.graph is not self._job.instances.graph:
            await store.note(now=True, graph=self._job.instances.graph)
            await store.tell("instances", instances=self._job.instances.views())

    def describe(self) -> str:
        """How many instances answer, in words."""
        return f"serves with {len(self._present())} of {len(self._job.instances.units)} instances"

    def _present(self) -> set[str]:
        return {member.sid for member in self._job.instances.present()} - self._coming.keys()

    def _add(self, units: Sequence[TaskUnit]) -> None:
        if units:
            self._job.instances.graph = with_units(self._job.instances.graph, tuple(units))
            for unit in units:
                self._bring(unit.sid, None)
            self._wake.set()

    def _bring(self, sid: str, before: Member | None) -> None:
        self._coming[sid] = self._job.tasks.spawn(self._brought(sid, before))

    async def _brought(self, sid: str, before: Member | None) -> None:
        try:
            await self._replacement.bring(sid, before)
        finally:
            self._coming.pop(sid, None)
            self._wake.set()
        self._job.events.changed(f"{sid} answers")
        if (former := self._successors.pop(sid, None)) is not None:
            self._let_go(former)

    def _let_go(self, sid: str) -> None:
        """Has a unit leave the job."""
        self._leaving.add(sid)
        if (task := self._coming.pop(sid, None)) is not None:
            task.cancel()
        self._successors = {new: old for new, old in self._successors.items() if sid not in (new, old)}
        self._job.tasks.spawn(self._leave(sid, self._job.instances.members.get(sid)))

    async def _leave(self, sid: str, member: Member | None) -> None:
        """Ends an instance in order: its sessions find another one of its stage."""
        instances, within_s = self._job.instances, self._job.times.run.answer_s
        try:
            agent = None if member is None else instances.agent_of(sid)
            if member is not None and agent is not None:
                instances.mark_lost(member)
                stop = InstanceStop(job=self._job.name, sid=sid, incarnation=member.incarnation)
                try:
                    await self._job.bus.command(
                        STOP_INSTANCE, stop, deadline_s=within_s, while_heard=True, agent=agent
                    )
                except DmscError as error:
                    log.warning("an instance was not stopped", sid=sid, reason=str(error))
            instances.graph = without_units(instances.graph, {sid})
            if instances.members.get(sid) == member:
                instances.members.pop(sid, None)
        finally:
            self._leaving.discard(sid)
            self._wake.set()
        self._job.events.changed(f"{sid} has left")
