"""`InstanceJudge`: takes the samples of a node's instances, and reports what is stalled or slow (§5.5)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import psutil

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.cluster.context import NodeContext
from entities.cluster.core import LocalIncarnation, broken_dependencies, judge_process
from entities.cluster.fork_server_client import last_lines, probe_process, work_of
from entities.cluster.instances import NodeInstances
from entities.cluster.judgement.chain_detector import ChainDetector, InstanceCondition, InstanceProbe
from entities.presence.instance_subscriptions import InstanceSubscriptions
from schemas.cluster import Judge, Judgement, Slot
from schemas.envelope import Envelope
from schemas.errors import DmscError
from schemas.fault import Chain, ClusterReport
from schemas.task_graph import ModelTopology, UnitKind
from schemas.telemetry import InstanceSample

log = get_logger("cluster")

LOG_LINES = 12
"""Of a judged instance, in the answer."""


class InstanceJudge:
    """What the agent says of its instances.

    Args:
        bus: the bus.
        context: the agent's.
        instances: the node's.
        topology: of a job that this node analysed, or None.
        on_change: called when a slot's condition has changed.
        on_sample: called with each sample of an instance.
    """

    def __init__(
        self,
        bus: Bus,
        context: NodeContext,
        instances: NodeInstances,
        topology: Callable[[str], ModelTopology | None],
        on_change: Callable[[], None],
        on_sample: Callable[[InstanceSample], None],
    ) -> None:
        self._config = context.config
        self._context = context
        self._instances = instances
        self._topology = topology
        self._on_change = on_change
        self._on_each = on_sample
        self._detector = ChainDetector(context.config.chains)
        self._feed = InstanceSubscriptions(bus, subjects.INSTANCE_SAMPLE, self._on_sample)
        self._slots: dict[int, tuple[InstanceCondition, float]] = {}
        """Of those that are not well: the condition of the last instance in it, and until when it counts."""
        self._sids: frozenset[str] = frozenset()
        self._stopped: set[str] = set()
        self._telling: dict[str, asyncio.Task[None]] = {}
        """What is being told, by SID: that repeats until it is taken, and only the newest word counts."""

    async def run(self) -> None:
        """Follows the node's instances until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._feed.run(self._staged))
            try:
                while True:
                    await asyncio.sleep(self._config.times.chain_check_s)
                    self._review()
            finally:
                await self._feed.stop()

    def _staged(self) -> list[LocalIncarnation]:
        instances = self._instances.ledger.instances.values()
        return [each for each in instances if each.unit.kind is UnitKind.STAGE]

    def refresh(self) -> None:
        """Instances may have come or gone."""
        sids = frozenset(each.sid for each in self._staged())
        if sids != self._sids:
            self._sids = sids
            self._feed.refresh()

    async def _on_sample(self, sample: InstanceSample, envelope: Envelope) -> None:
        instance = self._instances.ledger.find(sample.sid, sample.incarnation)
        if instance is not None:
            expected_ms = self._expected_ms(instance, sample.stage_cost_ms)
            self._detector.observe(sample, expected_ms, asyncio.get_running_loop().time())
            self._on_each(sample)

    def _expected_ms(self, instance: LocalIncarnation, cost_ms: float) -> float:
        """Of a microbatch, by the plan: the analysis' time, at this slot's speed and share of the cores.

        `cost_ms`: of the layers that it has now, as it says; 0: those that it was started with.
        """
        requirements, slot = instance.unit.requirements, self._slot_of(instance)
        if slot is None:
            return 0.0
        speed = slot.speed.get("stage", 1.0)
        if slot.emulated:  # only padded layers know of its speed
            speed = min(speed, 1.0)
        return (cost_ms or requirements.cost_ms) * requirements.measured_speed / speed * self._crowding(slot)

    def _slot_of(self, instance: LocalIncarnation) -> Slot | None:
        slots = self._instances.ledger.slots
        return next((slot for slot in slots if slot.index == instance.slot), None)

    def _crowding(self, slot: Slot) -> float:
        """How many share a core, where slots are the processor's and more is to run than there are cores.

        The system's load counts, too: other agents of the machine, and other programs.
        """
        if slot.kind != "cpu":
            return 1.0
        threads = sum(each.unit.requirements.compute_threads for each in self._staged())
        return max(1.0, max(threads, psutil.getloadavg()[0]) / (os.cpu_count() or 1))

    def _review(self) -> None:
        now = asyncio.get_running_loop().time()
        staged = {each.sid: each for each in self._staged() if each.pid is not None}
        probes = {sid: self._probe(each) for sid, each in staged.items() if not each.ordered}
        changed = self._detector.review(now, probes)
        for sid, condition in changed.items():
            instance = staged.get(sid) or self._last(sid)
            if instance is not None:
                self._tell(instance, condition)
        self._stopped.intersection_update(staged)
        self._mark_slots(staged, now)

    def _probe(self, instance: LocalIncarnation) -> InstanceProbe:
        assert instance.pid is not None
        state = probe_process(instance.pid).state
        if state != "stopped":
            self._stopped.discard(instance.sid)
        elif instance.sid not in self._stopped:  # seen once: a debugger looks, perhaps
            state = "running"
        return InstanceProbe(state=state, work=work_of(instance.pid))

    def _last(self, sid: str) -> LocalIncarnation | None:
        """The last incarnation that ended here."""
        ended = self._instances.ledger.ended
        return next((instance for instance, _ in reversed(ended) if instance.sid == sid), None)

    def stopped(self, instance: LocalIncarnation) -> None:
        """The system shows the instance's process as stopped: that is said at once."""
        self._stopped.add(instance.sid)
        self._review()

    def repeat(self) -> None:
        """Another orchestrator leads: it is told again of what is not well."""
        for instance in self._staged():
            condition = self._detector.of(instance.sid, instance.incarnation)
            if condition is not None and condition.condition != "well":
                self._tell(instance, condition)

    def _tell(self, instance: LocalIncarnation, condition: InstanceCondition) -> None:
        """Reports a condition, instead of what has not been taken yet of the same instance."""
        sid = instance.sid
        if (before := self._telling.get(sid)) is not None:
            before.cancel()

        def told(task: asyncio.Task[None]) -> None:
            if self._telling.get(sid) is task:
                del self._telling[sid]

        task = self._telling[sid] = self._context.start_task(self._report(instance, condition))
        task.add_done_callback(told)

    async def _report(self, instance: LocalIncarnation, condition: InstanceCondition) -> None:
        level = log.info if condition.condition == "well" else log.warning
        level("instance judged", sid=instance.sid, condition=condition.condition, evidence=condition.evidence)
        config = self._config
        report = ClusterReport(
            agent=config.sid,
            cluster=config.cluster,
            node=config.node,
            job=instance.job,
            sid=instance.sid,
            incarnation=instance.incarnation,
            condition=condition.condition,
            scope=condition.scope,
            kind=condition.kind,
            chain=self._chain(instance, condition),
            slowness=condition.slowness,
            evidence=condition.evidence,
        )
        try:
            await self._context.send(subjects.CLUSTER_REPORT, report, agent=config.sid, sid=instance.sid)
        except DmscError as error:
            log.warning("judgement not taken", sid=instance.sid, error=error.text)

    def _chain(self, instance: LocalIncarnation, condition: InstanceCondition) -> Chain:
        broken: tuple[str, ...] = ()
        if condition.condition == "stalled" and condition.scope != "none":
            broken = broken_dependencies(instance, self._topology(instance.job))
        return Chain(
            stage=instance.unit.stage,
            replica=instance.unit.replica,
            waiting=self._detector.waiting(instance.sid),
            waits_for=self._detector.waits_for(instance.sid),
            broken=broken,
        )

    # --- slots ---------------------------------------------------------------------------------------------
    def _mark_slots(self, staged: dict[str, LocalIncarnation], now: float) -> None:
        """Notes how the slots do: one that was slow stays so for a while after its instance has left."""
        before = self._marks()
        until = now + self._config.times.slow_slot_s
        for sid, instance in staged.items():
            condition = self._detector.of(sid, instance.incarnation)
            if instance.slot is None or condition is None:
                continue
            if condition.condition != "well" and condition.scope != "none":
                self._slots[instance.slot] = (condition, until)
            elif self._detector.does_well(sid) or self._holds_no_slowness(instance.slot):
                self._slots.pop(instance.slot, None)
        held = {instance.slot for instance in staged.values()}
        for slot, (condition, end) in list(self._slots.items()):
            if now > end or (slot not in held and condition.condition == "stalled"):
                del self._slots[slot]
        if self._marks() != before:
            self._on_change()

    def _holds_no_slowness(self, slot: int) -> bool:
        return slot in self._slots and self._slots[slot][0].condition != "underperforming"

    def _marks(self) -> dict[int, tuple[str, float]]:
        return {
            slot: (condition.condition, _share(condition)) for slot, (condition, _) in self._slots.items()
        }

    def marked(self, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        """The slots with their conditions, for the node's status."""
        marks = self._marks()
        return tuple(
            slot.model_copy(update={"condition": marks[slot.index][0], "performance": marks[slot.index][1]})
            if slot.index in marks
            else slot
            for slot in slots
        )

    # --- questions -----------------------------------------------------------------------------------------
    async def judge(self, question: Judge, envelope: Envelope) -> Judgement:
        """How an instance is, and how far its fault reaches (§5.5)."""
        instance = self._instances.ledger.find(question.sid, question.incarnation)
        judgement = judge_process(
            question.sid,
            question.incarnation,
            ledger=self._instances.ledger,
            observation=probe_process(instance.pid)
            if instance is not None and instance.pid is not None
            else None,
            warm=self._context.processes.ready is not None,
            topology=self._topology(question.job) if question.job is not None else None,
        )
        tail = await asyncio.to_thread(last_lines, self._config.logs / f"{question.sid}.log", LOG_LINES)
        judged = judgement.model_copy(update={"log": tail, "waiting": self._detector.waiting(question.sid)})
        if judgement.process == "stopped":
            return judged.model_copy(update={"condition": "stalled"})
        condition = self._detector.of(question.sid, question.incarnation)
        if judgement.process != "running" or condition is None or instance is None:
            return judged
        if condition.condition != "stalled" or condition.scope == "none":  # it waits: nothing is wrong here
            slow = condition.condition == "underperforming"
            peers = self._detector.broken_links(question.sid, asyncio.get_running_loop().time())
            broken = tuple(f"{question.sid} -> {peer}: its links there fail" for peer in peers)
            name = "underperforming" if slow else "well"
            return judged.model_copy(update={"condition": name, "broken": broken})
        update = {
            "condition": "stalled",
            "scope": condition.scope,
            "kind": condition.kind,
            "evidence": condition.evidence,
            "broken": broken_dependencies(instance, self._topology(instance.job)),
        }
        return judged.model_copy(update=update)


def _share(condition: InstanceCondition) -> float:
    """Of a slot's speed that counts on; in twentieths, so that it does not change with each sample."""
    if condition.condition != "underperforming":
        return 1.0
    return max(0.05, round(20 / condition.slowness) / 20)
