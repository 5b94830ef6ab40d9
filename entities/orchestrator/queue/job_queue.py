"""The one owner of the queue during a term: it has all jobs decided about at once (ADR-0073).

A job that waits takes a `QueueTurn`, and is told of its slots or of its reason. `decide` runs on a thread; if
anything has changed meanwhile, its decision is dropped and another one made. All that it needs is in the
jobs' records and in the registrations of nodes, so that a new leader decides alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from bus.logs import get_logger
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.queue.mesh_slots import SlotFacts, slot_facts, slot_name
from entities.queue.decision import Cause, QueueDecision
from entities.queue.queue_rules import QueueRules
from entities.queue.queued_job import ActiveJob, QueuedJob
from entities.queue.scheduling import QueueSurroundings, decide
from schemas.errors import DmscError
from schemas.task_graph import Placement, TaskGraph

log = get_logger("orchestrator")


class RunningJob(Protocol):
    """What one job's run has to show to the queue."""

    @property
    def name(self) -> str:
        """Its id."""

    @property
    def placements(self) -> Sequence[Placement]:
        """Where its units run, or are to run."""

    @property
    def waiting(self) -> QueuedJob | None:
        """What it asks for; None if it does not wait for room."""

    @property
    def active(self) -> ActiveJob:
        """What it holds, but for the slots."""

    @property
    def finds_room(self) -> bool:
        """Whether it is about to place an instance that it lost."""


class QueueTurn:
    """A waiting job's place in the queue. `plan`: places it now, and so takes its slots, or says why not."""

    def __init__(self, plan: Callable[[], TaskGraph | NoRoom]) -> None:
        self.plan = plan
        self._news: asyncio.Queue[TaskGraph | NoRoom | DmscError] = asyncio.Queue()
        self._said: NoRoom | None = None

    async def news(self) -> TaskGraph | NoRoom:
        """Its placement, or why it goes on waiting, each time that the reason is another one.

        Raises:
            DmscError: the job can't be planned at all.
        """
        news = await self._news.get()
        if isinstance(news, DmscError):
            raise news
        return news

    def take(self) -> bool:
        """Has the job take its slots; returns whether it did."""
        try:
            news = self.plan()
        except DmscError as error:
            self._news.put_nowait(error)
            return False
        self.tell(news)
        return not isinstance(news, NoRoom)

    def tell(self, news: TaskGraph | NoRoom) -> None:
        """Tells the job where it is placed, or why it waits."""
        if news != self._said:
            self._said = news if isinstance(news, NoRoom) else None
            self._news.put_nowait(news)


class JobQueue:
    """Decides which jobs of one term start. `runs`: the jobs that have not ended, by id."""

    def __init__(self, mesh: MeshView, runs: Mapping[str, RunningJob], rules: QueueRules) -> None:
        self._mesh = mesh
        self._runs = runs
        self._rules = rules
        self._turns: dict[str, QueueTurn] = {}
        self._entered = asyncio.Event()

    @contextlib.contextmanager
    def turn(self, job: str, plan: Callable[[], TaskGraph | NoRoom]) -> Iterator[QueueTurn]:
        """A job enters the queue, until it leaves the context."""
        self._turns[job] = turn = QueueTurn(plan)
        self._entered.set()
        try:
            yield turn
        finally:
            if self._turns.get(job) is turn:
                del self._turns[job]

    def again(self) -> None:
        """Decides again, though neither mesh nor queue has changed: a job has found how it fits."""
        self._entered.set()

    def occupied(self, job: str) -> dict[str, list[Placement]]:
        """Slots promised to all jobs but this one, by node agent."""
        taken: dict[str, list[Placement]] = defaultdict(list)
        for run in self._runs.values():
            if run.name == job:
                continue
            for place in run.placements:
                agent = self._mesh.agent_of(place.cluster, place.node)
                if agent is not None and place.slot >= 0:
                    taken[agent].append(place)
        return taken

    async def run(self) -> None:
        """Decides whenever something has changed and a job waits, until cancelled."""
        while True:
            self._entered.clear()
            seen = self._mesh.changes
            again_at = await self._decided() if self._turns else None
            await self._until_changed(seen, again_at)

    async def _until_changed(self, seen: int, again_at: float | None) -> None:
        """Returns once the mesh or the queue has changed, or it is time to decide again."""
        wait_s = None if again_at is None else max(0.0, again_at - time.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                entered = asyncio.create_task(self._entered.wait())
                changed = asyncio.create_task(self._mesh.until_changed(seen))
                try:
                    await asyncio.wait({entered, changed}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    entered.cancel()
                    changed.cancel()

    async def _decided(self) -> float | None:
        """Makes one decision and has it carried out; returns when time alone will change it."""
        while True:
            facts, now = self._facts(), time.time()
            around = QueueSurroundings(table=facts.table, rules=self._rules)
            decision = await asyncio.to_thread(decide, facts.queue, facts.running, around, now)
            if facts.as_decided(self._facts()):
                break
        self._carry_out(decision)
        return decision.next_at

    def _facts(self) -> SlotFacts:
        """All that a decision depends on, as it is now."""
        return slot_facts(
            self._mesh.nodes.values(),
            self._mesh.cordons.places(),
            {
                slot_name(agent, place.slot): run.name
                for run in self._runs.values()
                for place in run.placements
                if place.slot >= 0 and (agent := self._mesh.agent_of(place.cluster, place.node)) is not None
            },
            [waiting for run in self._runs.values() if (waiting := run.waiting) is not None],
            {run.name: run.active for run in self._runs.values() if run.waiting is None},
        )

    def _carry_out(self, decision: QueueDecision) -> None:
        """Places those that start, one after the other, and tells the others why they wait.

        A job that is still being analysed keeps its slots free by being among those that start.
        """
        urgent = any(run.finds_room for run in self._runs.values())
        for admission in decision.admissions:
            turn = self._turns.get(admission.job)
            if turn is None:
                continue
            if urgent:
                turn.tell(NoRoom("behind a running job that replaces an instance"))
            elif turn.take():
                log.info("job admitted", job=admission.job, reason=admission.reason)
        for job, hold in decision.holds.items():
            if (turn := self._turns.get(job)) is None:
                continue
            if hold.cause is Cause.NEVER:  # the planner knows more about why
                turn.take()
            else:
                turn.tell(NoRoom(hold.reason))
