"""The instances of a node agent: started in a slot, watched, stopped; their ends told to the registry.

An exit that nobody ordered is a fault and reported as such at once; nothing is ever restarted here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

from bus import subjects
from bus.logs import get_logger
from bus.subject import Subject
from bus.wire.correlation import current, current_cause
from entities.cluster.core import Exit, LocalIncarnation, ProcessLedger, explain_exit
from entities.cluster.file_reach import reach_of
from entities.cluster.fork_server_client import ForkServerClient, Spawned, probe_process
from entities.cluster.store_folders import StoreFolders, renewal_of, write_for_instance
from schemas.base import Message
from schemas.cluster import InstanceStart, InstanceStarted, Slot
from schemas.envelope import EntityKind
from schemas.errors import DmscError, Fenced, NotFound
from schemas.registry import Endpoint, InstanceState, ServiceRecord, StateChange
from schemas.signals import Registration
from schemas.task_graph import UnitKind
from schemas.urls import UrlRules

log = get_logger("cluster")

LOOK_S = 0.2
"""How often processes are looked at: a stopped one does not say so, and misses beats only much later."""
STOPPED_LOOKS = 2
"""Looks in a row at which a process is stopped before it counts as such. Load never stops a process."""

_START_WAIT_S = 30.0  # a start waits this long for a fork server that is being restarted

StartTask = Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]
"""Runs work beside the agent's other tasks."""


class CommandSender(Protocol):
    """Sends a command that should arrive even if its receiver is being restarted; raises what it refuses."""

    async def __call__(self, row: Subject, message: Message, **tokens: str) -> None: ...


class NodeInstances:
    """Everything that runs in this node's slots.

    Args:
        processes: where they run.
        agent: SID of the node agent.
        module: what their process runs.
        place: the part of their payload that is the same for all: cluster, node, addresses, servers.
        logs: folder of their log files.
        stores: folders of their local stores.
        credential: what shows the bus that one is SID of job; arguments: these two.
        start: owner of the tasks that watch them.
        tell: how the registry learns of their ends.
        on_change: called when a slot was taken or became free.
        closed: files and folders that no job is given.
        rules: what else of a job's URLs it is not given; None: nothing.
    """

    def __init__(
        self,
        processes: ForkServerClient,
        *,
        agent: str,
        module: str,
        place: dict[str, Any],
        logs: Path,
        stores: StoreFolders,
        credential: Callable[[str, str], str | None],
        start: StartTask,
        tell: CommandSender,
        on_change: Callable[[], None],
        closed: Sequence[str] = (),
        rules: UrlRules | None = None,
    ) -> None:
        self._rules = rules
        self._closed = closed
        self._processes = processes
        self._agent = agent
        self._module = module
        self._place = place
        self._logs = logs
        self._stores = stores
        self._credential = credential
        self._start_task = start
        self._tell = tell
        self._on_change = on_change
        self._births: dict[str, asyncio.Task[Spawned | DmscError]] = {}
        self._stopped: Counter[tuple[str, str]] = Counter()
        self.ledger = ProcessLedger()

    def offer(self, slots: tuple[Slot, ...]) -> None:
        """These are the node's slots now."""
        self._commit(self.ledger.with_slots(slots))

    async def start(self, order: InstanceStart) -> InstanceStarted:
        """Start a unit; repeated, it answers with the process that runs already.

        Raises:
            Refused, Conflict, Fenced: see `ProcessLedger.admit`.
            Unavailable: the fork server is away.
        """
        ledger, held = self.ledger.admit(order, self._agent)
        if held is not None:
            self._commit(ledger)
            device = "cpu" if held.slot is None else self.ledger.slots[held.slot].device
            payload = {
                **self._place,
                "token": self._credential(held.sid, held.job),
                "start": order.model_dump(mode="json"),
                "device": device,
                "correlation": current(),
                "cause": current_cause(),
                "store": str(self._stores.folder(held.job, held.sid)),
                "renewal": renewal_of(held.incarnation),
            }
            self._births[held.sid] = self._start_task(self._bear(held, payload, order))
        child = await asyncio.shield(self._births[order.unit.sid])
        if isinstance(child, DmscError):
            raise child
        return InstanceStarted(sid=order.unit.sid, incarnation=order.incarnation, pid=child.pid.result())

    def renew_credentials(self) -> int:
        """Puts new credentials into the instances' own folders, where they look when they dial; how many."""
        count = 0
        for held in self.ledger.held.values():
            text = self._credential(held.sid, held.job)
            folder = self._stores.folder(held.job, held.sid)
            if text is not None and write_for_instance(folder, renewal_of(held.incarnation), text):
                count += 1
        return count

    async def _bear(
        self, held: LocalIncarnation, payload: dict[str, Any], order: InstanceStart
    ) -> Spawned | DmscError:
        """Spawn an instance that was admitted; its end is watched from here on."""
        reached = reach_of(held.job, order.spec, closed=self._closed, rules=self._rules)
        store = self._stores.folder(held.job, held.sid)
        with contextlib.suppress(OSError):  # then it does without, and says so
            store.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            await self._processes.wait_ready(_START_WAIT_S)
            child = await self._processes.spawn(
                f"{held.sid}.{held.incarnation}",
                self._module,
                payload,
                log_path=self._logs / f"{held.sid}.log",
                threads=order.spec.training.compute_threads,
                needs=_needs(order),
                read=reached.read,
                write=(str(store), *reached.write),
            )
        except DmscError as error:
            self._commit(self.ledger.withdraw(held))
            self._births.pop(held.sid, None)
            return error
        self._commit(self.ledger.spawned(held, child.pid.result()))
        log.info("instance started", node=self._agent, sid=held.sid, pid=child.pid.result())
        self._start_task(self._watch(held, child))
        return child

    async def _watch(self, held: LocalIncarnation, child: Spawned) -> None:
        self._settle(held, await asyncio.shield(child.exit))

    async def look_for_stopped(self) -> None:
        """Tells the registry of instances whose process the system shows as stopped. Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            held = {
                (one.sid, one.incarnation): one for one in self.ledger.held.values() if one.pid is not None
            }
            for key, one in held.items():
                assert one.pid is not None
                sight = probe_process(one.pid)
                self._stopped[key] = self._stopped[key] + 1 if sight.state == "stopped" else 0
                if self._stopped[key] == STOPPED_LOOKS:
                    log.warning("instance stopped", node=self._agent, sid=one.sid, evidence=str(sight))
                    change = StateChange(
                        sid=one.sid,
                        incarnation=one.incarnation,
                        state=InstanceState.FAULTED,
                        reason=str(sight),
                    )
                    self._start_task(self._report(one, change))
            self._stopped = Counter({key: count for key, count in self._stopped.items() if key in held})

    def _settle(self, held: LocalIncarnation, exit: Exit) -> None:
        """Free an ended instance's place and have the registry told, once."""
        change = self._release(held, exit)
        if change is not None:
            self._start_task(self._report(held, change))

    async def _report(self, held: LocalIncarnation, change: StateChange) -> None:
        """Tell the registry how an instance ended, whatever it knew of it."""
        try:
            await self._tell(subjects.INSTANCE_STATE, change, agent=self._agent, sid=change.sid)
        except Fenced:
            pass  # it took leave by itself, or was replaced
        except NotFound:
            if change.state is InstanceState.FAULTED:  # it died before it could register: do that for it
                await self._register_fault(held, change)
        except DmscError as error:
            log.warning("registry refused a state", sid=held.sid, state=change.state.value, error=error.text)

    async def _register_fault(self, held: LocalIncarnation, change: StateChange) -> None:
        record = ServiceRecord(
            sid=held.sid,
            prefix=f"train/{held.job}/{'data' if held.slot is None else f'stage/{held.unit.stage}'}",
            kind=EntityKind.INSTANCE,
            incarnation=held.incarnation,
            state=change.state,
            endpoint=Endpoint(cluster=self._place["cluster"], node=self._place["node"], pid=held.pid or 0),
            input_schema=held.unit.input_schema,
            output_schema=held.unit.output_schema,
            tags=held.unit.tags,
            job=held.job,
            stage=held.unit.stage,
            reason=change.reason,
        )
        try:
            await self._tell(
                subjects.INSTANCE_RECORD, Registration(record=record), agent=self._agent, sid=held.sid
            )
        except DmscError as error:
            log.warning("registry refused a fault", sid=held.sid, error=error.text)

    def _release(self, held: LocalIncarnation, exit: Exit) -> StateChange | None:
        present = self.ledger.find(held.sid, held.incarnation)
        if present is None:
            return None
        state, reason = explain_exit(present, exit)
        self._births.pop(held.sid, None)
        self._commit(self.ledger.release(present, reason))
        level = log.warning if state is InstanceState.FAULTED else log.info
        level("instance ended", node=self._agent, sid=held.sid, state=state.value, reason=reason)
        return StateChange(sid=held.sid, incarnation=held.incarnation, state=state, reason=reason)

    async def end(self, held: LocalIncarnation, grace_s: float) -> None:
        """Stop an instance as ordered; returns once its process is gone and its slot is free."""
        self._commit(self.ledger.order_end(held))
        child = await asyncio.shield(self._births[held.sid])
        if isinstance(child, Spawned):
            self._settle(held, await self._processes.stop(child, grace_s))

    async def end_all(self, grace_s: float) -> tuple[StateChange, ...]:
        """Stop whatever is left, all at once, and return what the registry should hear of it.

        Nothing may start or watch instances any more: the agent's own tasks have ended.
        """
        births = [birth for birth in self._births.values() if birth.done() and not birth.cancelled()]
        children = {child.name: child for birth in births if isinstance(child := birth.result(), Spawned)}
        left = tuple(self.ledger.held.values())
        for held in left:
            self.ledger = self.ledger.order_end(held)
        stopping = (self._last_exit(children.get(f"{held.sid}.{held.incarnation}"), grace_s) for held in left)
        exits = await asyncio.gather(*stopping, return_exceptions=True)
        ends = [
            self._release(held, exit if isinstance(exit, Exit) else Exit())
            for held, exit in zip(left, exits, strict=True)
        ]
        return tuple(change for change in ends if change is not None)

    async def _last_exit(self, child: Spawned | None, grace_s: float) -> Exit:
        if child is None:  # still being born: it goes with the fork server
            return Exit()
        return await self._processes.stop(child, grace_s)

    def _commit(self, ledger: ProcessLedger) -> None:
        changed = ledger.slots != self.ledger.slots
        self.ledger = ledger
        if changed:
            self._on_change()


def _needs(order: InstanceStart) -> tuple[str, ...]:
    """What such an instance will use that takes long to import."""
    spec = order.spec
    saves = spec.training.checkpoint_every != 0 or spec.resume_from is not None
    return ("workers.state.checkpoint_files",) if saves and order.unit.kind is UnitKind.STAGE else ()
