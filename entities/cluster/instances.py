"""Starts, watches and stops the instances of a node agent, and reports their ends to the registry.

An exit that nobody ordered is a fault and reported at once. Nothing is ever restarted here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.wire.correlation import current, current_cause
from entities.cluster.cache_folders import cache_owner
from entities.cluster.context import NodeContext
from entities.cluster.core import Exit, LocalIncarnation, ProcessLedger, explain_exit
from entities.cluster.fork_server_client import Spawned, probe_process
from entities.cluster.job_code.code_folders import CodeFolders
from entities.cluster.store_folders import StoreFolders, renewal_of, write_for_instance
from schemas.cluster import InstanceStart, InstanceStarted, Slot
from schemas.envelope import EntityKind
from schemas.errors import DmscError, Fenced, NotFound
from schemas.registry import Capability, Endpoint, InstanceState, ServiceRecord, StateChange
from schemas.signals import Registration
from schemas.slot_conditions import node_folder, script_file
from schemas.task_graph import UnitKind

log = get_logger("cluster")

STOPPED_CHECKS = 2
"""Checks in a row that must find a process stopped until it counts as such. Load never stops a process."""


class NodeInstances:
    """The instances in this node's slots.

    `on_change` is called when a slot was taken or became free, and when no instance is left.
    """

    def __init__(
        self,
        context: NodeContext,
        stores: StoreFolders,
        code: CodeFolders,
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._code = code
        self._config = context.config
        self._processes = context.processes
        self._stores = stores
        self._start_task = context.start_task
        self._on_change = on_change
        self._spawns: dict[str, asyncio.Task[Spawned | DmscError]] = {}
        self._stopped: Counter[tuple[str, str]] = Counter()
        self.ledger = ProcessLedger()

    def offer(self, slots: tuple[Slot, ...]) -> None:
        """Replace the slots that the node offers."""
        self._commit(self.ledger.with_slots(slots))

    async def start(self, order: InstanceStart) -> InstanceStarted:
        """Start a unit; a repetition is answered with the process that runs already.

        Raises:
            Refused, Conflict, Fenced: see `ProcessLedger.admit`.
            BadInput: its SID is none of its job, so that it can have no credential.
            Unavailable: the fork server is away.
        """
        ledger, instance = self.ledger.admit(order, self._config.sid)
        if instance is not None:
            token = self._context.credential(instance.sid, instance.job)
            self._commit(ledger)
            slot = None if instance.slot is None else self.ledger.slots[instance.slot]
            capability = Capability() if slot is None else slot.capability()
            scripts = self._script_folder()
            number = instance.slot
            script = None if scripts is None or number is None else script_file(scripts, number)
            payload = {
                **self._context.payload,
                "agent": self._config.sid,
                "address": self._config.address,
                "ports": list(self._config.ports) if self._config.ports else None,
                "token": token,
                "start": order.model_dump(mode="json"),
                "device": capability.device,
                "capability": capability.model_dump(mode="json"),
                "script": None if script is None else str(script),
                "correlation": current(),
                "cause": current_cause(),
                "store": str(self._stores.folder(instance.job, instance.sid)),
                "renewal": renewal_of(instance.incarnation),
            }
            self._spawns[instance.sid] = self._start_task(self._spawn(instance, payload, order, scripts))
        child = await asyncio.shield(self._spawns[order.unit.sid])
        if isinstance(child, DmscError):
            raise child
        return InstanceStarted(sid=order.unit.sid, incarnation=order.incarnation, pid=child.pid.result())

    def renew_credentials(self) -> int:
        """Write new credentials to the instances' folders, read on their next connect; return the count."""
        count = 0
        for instance in self.ledger.instances.values():
            text = self._context.credential(instance.sid, instance.job)
            folder = self._stores.folder(instance.job, instance.sid)
            if text is not None and write_for_instance(folder, renewal_of(instance.incarnation), text):
                count += 1
        return count

    async def _spawn(
        self,
        instance: LocalIncarnation,
        payload: dict[str, Any],
        order: InstanceStart,
        scripts: Path | None,
    ) -> Spawned | DmscError:
        """Spawn an instance that was admitted, and watch for its end."""
        reach = self._context.files.of_job(instance.job, order.spec)
        store = self._stores.folder(instance.job, instance.sid)
        with contextlib.suppress(OSError):  # then the instance runs without a store and logs that
            store.mkdir(mode=0o700, parents=True, exist_ok=True)
        cache = self._cache(instance, order)
        payload["cache"] = None if cache is None else str(cache)
        try:
            await self._processes.wait_ready(self._config.times.start_ready_s)
            code = await self._code.folder(instance.job, order.spec.code)
            child = await self._processes.spawn(
                _name(instance),
                f"{self._config.worker_package}.instance",
                payload,
                log_path=self._config.logs / f"{instance.sid}.log",
                title=_title(order),
                threads=order.spec.training.compute_threads,
                needs=_needs(order),
                read=reach.read if scripts is None else (*reach.read, str(scripts)),
                write=(str(store), *([] if cache is None else [str(cache)]), *reach.write),
                code=code,
            )
        except DmscError as error:
            self._context.caches.close(_name(instance))
            self._commit(self.ledger.withdraw(instance))
            self._spawns.pop(instance.sid, None)
            return error
        self._commit(self.ledger.spawned(instance, child.pid.result()))
        log.info("instance started", node=self._config.sid, sid=instance.sid, pid=child.pid.result())
        self._start_task(self._watch(instance, child))
        return child

    def _script_folder(self) -> Path | None:
        """The folder with the scripts of this node's slots, if these are emulated."""
        config = self._config
        if config.emulation is None:
            return None
        folder = node_folder(config.emulation, config.cluster, config.node)
        folder.mkdir(parents=True, exist_ok=True)  # an instance never sees what is missing when it starts
        return folder

    def _cache(self, instance: LocalIncarnation, order: InstanceStart) -> Path | None:
        """The part of the node's cache for an instance that reads data; None: it has none."""
        if order.unit.kind is not UnitKind.DATA:
            return None
        return self._context.caches.open(_name(instance), cache_owner(order.user, instance.job))

    async def _watch(self, instance: LocalIncarnation, child: Spawned) -> None:
        self._settle(instance, await asyncio.shield(child.exit))

    async def watch_for_stopped(self, judge: Callable[[LocalIncarnation], None]) -> None:
        """Report instances whose process the system shows as stopped, until cancelled.

        `judge` hears of each before the registry does.
        """
        while True:
            await asyncio.sleep(self._config.times.process_check_s)
            running = {
                (instance.sid, instance.incarnation): instance
                for instance in self.ledger.instances.values()
                if instance.pid is not None
            }
            for key, instance in running.items():
                assert instance.pid is not None
                observation = probe_process(instance.pid)
                self._stopped[key] = self._stopped[key] + 1 if observation.state == "stopped" else 0
                if self._stopped[key] == STOPPED_CHECKS:
                    evidence = str(observation)
                    log.warning(
                        "instance stopped", node=self._config.sid, sid=instance.sid, evidence=evidence
                    )
                    judge(instance)
                    change = StateChange(
                        sid=instance.sid,
                        incarnation=instance.incarnation,
                        state=InstanceState.FAULTED,
                        reason=evidence,
                    )
                    self._start_task(self._report(instance, change))
            self._stopped = Counter({key: count for key, count in self._stopped.items() if key in running})

    def _settle(self, instance: LocalIncarnation, exit: Exit) -> None:
        """Free an ended instance's slot and report its end to the registry, once."""
        change = self._release(instance, exit)
        if change is not None:
            self._start_task(self._report(instance, change))

    async def _report(self, instance: LocalIncarnation, change: StateChange) -> None:
        """Report an instance's end to the registry, whether or not it was registered."""
        try:
            await self._context.send(subjects.INSTANCE_STATE, change, agent=self._config.sid, sid=change.sid)
        except Fenced:
            pass  # it deregistered by itself, or was replaced
        except NotFound:
            if change.state is InstanceState.FAULTED:  # it died before it could register: register it
                await self._register_fault(instance, change)
        except DmscError as error:
            log.warning(
                "registry refused a state", sid=instance.sid, state=change.state.value, error=error.text
            )

    async def _register_fault(self, instance: LocalIncarnation, change: StateChange) -> None:
        record = ServiceRecord(
            sid=instance.sid,
            prefix=f"train/{instance.job}/{instance.unit.part}",
            kind=EntityKind.INSTANCE,
            incarnation=instance.incarnation,
            state=change.state,
            endpoint=Endpoint(cluster=self._config.cluster, node=self._config.node, pid=instance.pid or 0),
            input_schema=instance.unit.input_schema,
            output_schema=instance.unit.output_schema,
            tags=instance.unit.tags,
            job=instance.job,
            stage=instance.unit.stage,
            reason=change.reason,
        )
        try:
            await self._context.send(
                subjects.INSTANCE_RECORD,
                Registration(record=record),
                agent=self._config.sid,
                sid=instance.sid,
            )
        except DmscError as error:
            log.warning("registry refused a fault", sid=instance.sid, error=error.text)

    def _release(self, instance: LocalIncarnation, exit: Exit) -> StateChange | None:
        present = self.ledger.find(instance.sid, instance.incarnation)
        if present is None:
            return None
        state, reason = explain_exit(present, exit)
        self._spawns.pop(instance.sid, None)
        self._context.caches.close(_name(present))
        self._commit(self.ledger.release(present, reason))
        level = log.warning if state is InstanceState.FAULTED else log.info
        level("instance ended", node=self._config.sid, sid=instance.sid, state=state.value, reason=reason)
        return StateChange(sid=instance.sid, incarnation=instance.incarnation, state=state, reason=reason)

    async def end(self, instance: LocalIncarnation, grace_s: float) -> None:
        """Stop an instance as ordered; returns once its process is gone and its slot is free."""
        self._commit(self.ledger.order_end(instance))
        child = await asyncio.shield(self._spawns[instance.sid])
        if isinstance(child, Spawned):
            self._settle(instance, await self._processes.stop(child, grace_s))

    async def end_all(self, grace_s: float) -> tuple[StateChange, ...]:
        """Stop all remaining instances concurrently; return the state changes to report to the registry.

        Nothing may start or watch instances any more: the agent's own tasks have ended.
        """
        spawns = [spawn for spawn in self._spawns.values() if spawn.done() and not spawn.cancelled()]
        children = {child.name: child for spawn in spawns if isinstance(child := spawn.result(), Spawned)}
        remaining = tuple(self.ledger.instances.values())
        for instance in remaining:
            self.ledger = self.ledger.order_end(instance)
        stops = (self._last_exit(children.get(_name(instance)), grace_s) for instance in remaining)
        exits = await asyncio.gather(*stops, return_exceptions=True)
        changes = [
            self._release(instance, exit if isinstance(exit, Exit) else Exit())
            for instance, exit in zip(remaining, exits, strict=True)
        ]
        return tuple(change for change in changes if change is not None)

    async def report_last(self, bus: Bus, changes: Iterable[StateChange]) -> None:
        """Report the instances' ends at the agent's own, if the registry listens."""
        last_s, agent = self._config.times.last_reports_s, self._config.sid
        reports = (
            bus.command(subjects.INSTANCE_STATE, change, deadline_s=last_s, agent=agent, sid=change.sid)
            for change in changes
        )
        await asyncio.gather(*reports, return_exceptions=True)

    async def _last_exit(self, child: Spawned | None, grace_s: float) -> Exit:
        if child is None:  # still being spawned: it ends with the fork server
            return Exit()
        return await self._processes.stop(child, grace_s)

    def _commit(self, ledger: ProcessLedger) -> None:
        emptied = bool(self.ledger.instances) and not ledger.instances  # the last may be one without a slot
        changed = emptied or ledger.slots != self.ledger.slots
        self.ledger = ledger
        if changed:
            self._on_change()


def _name(instance: LocalIncarnation) -> str:
    return f"{instance.sid}.{instance.incarnation}"


def _title(order: InstanceStart) -> str:
    unit = order.unit
    role = unit.part.replace("/", "=")
    return f"instance job={order.job} {role} replica={unit.replica} incarnation={order.incarnation}"


def _needs(order: InstanceStart) -> tuple[str, ...]:
    """Modules that such an instance will use and that take long to import."""
    spec = order.spec
    saves = spec.training.checkpoint_every != 0 or spec.resume_from is not None
    return ("workers.state.checkpoint_files",) if saves and order.unit.kind is UnitKind.STAGE else ()
