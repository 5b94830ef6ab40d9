"""A job whose loss can't be staffed goes on in fewer stages, and in all once there is room (ADR-0090).

The number of stages changes where the job has no instances: after it was parked for want of room, and before
it is placed again. So all that it takes is a checkpoint, which is read by full names.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator

from bus.logs import get_logger
from entities.orchestrator.job_state.context import JobContext, settle
from entities.orchestrator.membership.job_changes import STAGES, JobChanges
from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.queue.granted_plan import GrantFacts, plan_granted
from entities.orchestrator.queue.mesh_slots import reshaped, slots_of
from entities.planner.planning_process import beside_the_loop
from schemas.actions import CUT, REPLICAS
from schemas.automation import OWN_LOOP, Automation, lower
from schemas.changes import Forecast, JobChange
from schemas.cluster import NodeStatus
from schemas.errors import BadInput, BadJob, DmscError, Fenced
from schemas.job import FormerShape, JobSpec
from schemas.task_graph import ModelTopology, TaskGraph

log = get_logger("orchestrator")


def smaller_shapes(spec: JobSpec) -> Iterator[JobSpec]:
    """The job with fewer stages, or fewer replicas, most slots first; of equally many, most stages."""
    parallel = spec.parallel
    fixed = parallel.replica_range is None
    most = min(parallel.replicas_per_stage()) if fixed else 1
    shapes = [
        (stages, replicas) for stages in range(1, parallel.stages + 1) for replicas in range(1, most + 1)
    ]
    for stages, replicas in sorted(shapes, key=lambda shape: (-shape[0] * shape[1], -shape[0])):
        try:
            smaller = reshaped(spec, stages, replicas if fixed else None)
        except BadInput:  # what else it says of its stages does not fit to so many
            continue
        if slots_of(smaller.parallel) < slots_of(parallel):
            yield smaller


class FewerStages:
    """The number of stages of one run of a job.

    Args:
        job: The job.
        changes: The account of its changes.
        model: Returns the analysed model; None: it is not known now.
        give_way: Has the job park at the end of the open step, and go on as soon as there is room.
    """

    def __init__(
        self,
        job: JobContext,
        changes: JobChanges,
        model: Callable[[], Awaitable[ModelTopology | None]],
        give_way: Callable[[str], bool],
    ) -> None:
        self._job = job
        self._times = job.times.recut
        self._changes = changes
        self._model = model
        self._give_way = give_way
        self._told = ""
        self._began_at = 0
        self._settled_at: float | None = None
        self._cost_s = self._times.usual_cost_s
        self._left_at: float | None = None
        self._looked_at: frozenset[tuple[str, int]] = frozenset()  # the free slots at the last look

    @property
    def _mode(self) -> Automation:
        return lower(self._job.mesh.automation, self._job.store.record.automated)

    # --- before it is placed ------------------------------------------------------------------------------
    def kept_shape(self) -> FormerShape | None:
        """What the record of a job keeps that parks because a loss could not be staffed.

        With it the next run looks for a smaller shape, under another orchestrator, too.
        """
        present, former = self._job.spec, self._job.store.record.former_shape
        if former is None and self._may_shrink(present):
            return FormerShape(parallel=present.parallel)
        return former

    async def settle(self, topology: ModelTopology) -> None:
        """Gives the job the largest shape that there is room for now, up to the one that it had.

        If there is room for none, it waits for room in the shape that it has, and `look_again` goes on.

        Args:
            topology: its analysed model.
        """
        present, former = self._job.spec, self._job.store.record.former_shape
        if former is None:
            return
        if former.parallel == present.parallel and not self._may_shrink(present):
            await self._job.store.note(former_shape=None)  # a person has switched automation meanwhile
            return
        change = self._changes.account.open
        goes_back = change is not None and change.direction.endswith(STAGES)
        self._left_at = former.left_at if goes_back else None
        await self._until_left()
        await self._choose(topology, former)

    async def look_again(self, topology: ModelTopology, forget: Callable[[], None]) -> None:
        """Chooses anew whenever slots come, go or become free, while the job waits for room; until cancelled.

        Args:
            topology: its analysed model.
            forget: called when it has another shape: what was found out about the former one is forgotten.
        """
        seen = self._looked_at
        while (former := self._job.store.record.former_shape) is not None:
            if not await self._until_another(self._idle, seen):
                continue
            seen, spec = self._idle(), self._job.spec
            if self._job.instances.deployed is not None or not self._may_shrink(_in_shape(spec, former)):
                continue
            try:
                await self._choose(topology, former)
            except Fenced:
                raise
            except DmscError as error:  # the bus is away: the next change of slots is another chance
                log.info("no other shape yet", job=self._job.name, reason=error.text)
            if self._job.spec is not spec:
                forget()

    def _idle(self) -> frozenset[tuple[str, int]]:
        """The free slots of the mesh that are not cordoned."""
        mesh = self._job.mesh
        free = (
            (node.sid, slot.index)
            for node in mesh.open_nodes()
            for slot in node.slots
            if slot.busy_with is None
        )
        return mesh.open_places().intersection(free)

    async def _choose(self, topology: ModelTopology, former: FormerShape) -> None:
        """Takes the largest shape that there is room for, unless the job has got its slots meanwhile."""
        record, present, self._looked_at = self._job.store.record, self._job.spec, self._idle()
        whole = _in_shape(present, former)
        found = await self._largest(whole, topology)
        if self._job.instances.deployed is not None or self._job.spec is not present:
            return  # it got its slots, or a person gave it another shape
        chosen, graph = (present, None) if found is None else found
        kept = None if chosen is whole else FormerShape(parallel=whole.parallel)
        if kept is not None and self._left_at is not None:
            self._changes.disturbed()  # the room was taken meanwhile, which says nothing of that shape
        if chosen.parallel == present.parallel and kept == former:
            return
        await settle(self._job, chosen, former_shape=kept)
        now, before = chosen.parallel.stages, present.parallel.stages
        if chosen.parallel != present.parallel:
            step_ms = graph.forecast.step_ms if graph is not None and graph.forecast else None
            expected = "" if step_ms is None else f"; a step is expected to take {step_ms:.0f} ms"
            because = f"for {record.reason}" if kept else "there is room again"
            each = chosen.parallel.replicas_per_stage()[0]
            replicas = "" if now != before else f" with {each} replicas each"
            text = f"{before} → {now}{STAGES}{replicas}, {because}{expected}"
            await self._job.store.tell("recovery", text=text)
            self._settled_at = time.monotonic()

    def _may_shrink(self, spec: JobSpec) -> bool:
        """Whether another number of stages is the orchestrator's to choose, and gives the same bits."""
        if self._mode is not Automation.ACT:
            return False
        fixed = spec.plan.cuts is not None or not spec.parallel.rebalance
        return self._job.store.record.exact and not fixed and slots_of(spec.parallel) > 1

    async def _largest(self, whole: JobSpec, topology: ModelTopology) -> tuple[JobSpec, TaskGraph] | None:
        nodes = self._job.mesh.open_nodes()
        free = sum(slot.busy_with is None for node in nodes for slot in node.slots)
        for spec in (whole, *smaller_shapes(whole)):
            if slots_of(spec.parallel) <= free:
                graph = await self._planned(spec, topology, nodes)
                if isinstance(graph, TaskGraph):
                    return spec, graph
        return None

    async def _planned(
        self, spec: JobSpec, topology: ModelTopology, nodes: list[NodeStatus]
    ) -> TaskGraph | NoRoom:
        job, within = self._job, spec.parallel.replica_range
        facts = GrantFacts(
            job=job.name,
            spec=spec,
            topology=topology,
            replicas=1 if within is None else within.least,
            only=None,
            slots=None,
            nodes=nodes,
            occupied=job.queue.occupied(job.name),
            cordoned=job.mesh.cordons.places(),
            bits_class=job.store.record.bits_class,
            records=dict(job.mesh.records),
            found={},
            refused={},
            searching=True,
        )
        try:
            return (await beside_the_loop(plan_granted, facts)).graph
        except BadJob as refused:
            return NoRoom(refused.text)

    async def _until_left(self) -> None:
        """Returns once nothing runs any more in the slots that the job had."""
        graph = self._job.store.record.graph
        own = set() if graph is None else {(at.cluster, at.node, at.slot) for at in graph.placements}

        def have_left() -> bool:
            return not any(
                slot.busy_with is not None and (node.cluster, node.node, slot.index) in own
                for node in self._job.mesh.open_nodes()
                for slot in node.slots
            )

        await self._job.mesh.until(have_left, self._times.left_s)

    # --- while it trains ----------------------------------------------------------------------------------
    def began(self) -> None:
        """The job trains, in the shape that it has: what its return has cost is known."""
        former, self._began_at = self._job.store.record.former_shape, self._job.store.record.step
        if self._settled_at is not None:
            self._cost_s = 2 * (time.monotonic() - self._settled_at)  # parked first, then placed again
        if self._left_at is not None:
            self._changes.account.lost(time.time() - self._left_at)
            self._left_at = None
        if former is None:
            return
        if former.parallel == self._job.spec.parallel:  # no other was found, and room for this one came
            self._job.tasks.spawn(self._job.store.note(former_shape=None))
        else:
            self._job.tasks.spawn(self._until_back())

    async def _until_back(self) -> None:
        """Waits for room for the former shape, and has the job go back to it, if that is worth it."""
        job = self._job
        while (former := job.store.record.former_shape) is not None:
            whole = _in_shape(job.spec, former)
            if not await self._until_free(slots_of(whole.parallel)):
                continue
            try:
                if await self._goes_back(whole):
                    return
            except Fenced:
                raise
            except DmscError as error:  # the bus, or an agent that measures the model
                log.info("stages do not come back yet", job=job.name, reason=error.text)
            await self._until_another(self._free, self._free())

    async def _until_free(self, slots: int) -> bool:
        return await self._job.mesh.until(lambda: self._free() >= slots, self._times.look_s)

    async def _until_another(self, read: Callable[[], object], seen: object) -> bool:
        """Waits until `read` tells of others than those `seen`. False: it is time for a look anyway."""
        return await self._job.mesh.until(lambda: read() != seen, self._times.look_s)

    def _own(self) -> set[tuple[str, str, int]]:
        return {(at.cluster, at.node, at.slot) for at in self._job.instances.placements}

    def _free(self) -> int:
        """Slots that are free, or the job's own."""
        own = self._own()
        return sum(
            slot.busy_with is None or (node.cluster, node.node, slot.index) in own
            for node in self._job.mesh.open_nodes()
            for slot in node.slots
        )

    def _nodes(self) -> list[NodeStatus]:
        """The open nodes, with the slots free that the job has itself."""
        own = self._own()
        return [
            node.model_copy(
                update={
                    "slots": tuple(
                        slot.model_copy(update={"busy_with": None})
                        if (node.cluster, node.node, slot.index) in own
                        else slot
                        for slot in node.slots
                    )
                }
            )
            for node in self._job.mesh.open_nodes()
        ]

    async def _goes_back(self, whole: JobSpec) -> bool:
        job, account = self._job, self._changes.account
        before, after = job.spec.parallel.stages, whole.parallel.stages
        what, reverse = f"{before} → {after}{STAGES}", f"{after} → {before}{STAGES}"
        pinned = [pin.knob for pin in job.store.record.pins if pin.knob in (REPLICAS, CUT)]
        if pinned:  # what a person has set holds for the shape that it has
            await self._tell(f"{what} are possible again, but a person has set: {', '.join(pinned)}")
            return False
        topology = await self._model()
        present, now_s = job.instances.graph.forecast, account.step_s
        known = job.store.record.step - self._began_at >= account.rules.min_steps
        if topology is None or present is None or now_s is None or not known:
            return False
        graph = await self._planned(whole, topology, self._nodes())
        if isinstance(graph, NoRoom) or graph.forecast is None:
            return False
        forecast = Forecast.of(
            now_s,
            now_s * graph.forecast.step_ms / present.step_ms,
            cost_s=self._cost_s,
            steps_left=job.store.record.last_step - job.store.record.step,
        )
        present_sids = {unit.sid for unit in job.instances.graph.units}
        why = account.obstacle() or account.unwise("scale", what, reverse, forecast)
        if not why and self._mode is not Automation.ACT:
            why = "would have been done" if self._mode is Automation.ADVISE else "automation is off"
        if why:
            await self._tell(f"{what} are possible again, but: {why}")
            return False
        began = self._changes.begin(
            JobChange(
                kind="scale",
                what=what,
                direction=what,
                reverse=reverse,
                newcomers=tuple(sorted({unit.sid for unit in graph.units} - present_sids)),
                step=job.store.record.step,
                by=OWN_LOOP,
                forecast=forecast,
            )
        )
        log.info("stages come back", job=job.name, change=began.what)
        former = job.store.record.former_shape
        assert former is not None
        await job.store.note(now=True, former_shape=former.model_copy(update={"left_at": time.time()}))
        if self._give_way(f"{what}: a step is expected to take {forecast.step_after_s:.3f} s"):
            return True
        await job.store.note(now=True, former_shape=former)  # it does not go back now
        self._changes.disturbed()
        return False

    async def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            await self._job.store.reason(text)


def _in_shape(spec: JobSpec, former: FormerShape) -> JobSpec:
    return spec.model_copy(update={"parallel": former.parallel})
