"""A service's own registration (draft §4.3, Type 1): announced, kept alive, and withdrawn at the end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from bus import subjects
from bus.logs import get_logger
from bus.tasks import TaskSet
from bus.wire.correlation import stand_alone
from schemas.errors import DmscError, Fenced, IllegalTransition, Unavailable
from schemas.registry import (
    INSTANCE_TRANSITIONS,
    Culprit,
    Heartbeat,
    InstanceState,
    ServiceRecord,
    StateChange,
)
from schemas.signals import Registration, RegistrationLease

if TYPE_CHECKING:
    from bus.connection import Bus

log = get_logger("bus.mesh.registration")


@dataclass(frozen=True, kw_only=True)
class RegistrationTimes:
    """Times of a registration, in seconds."""

    register_s: float = 30.0
    """How long to wait for an answer of the registry, in heard time (`bus.nats.liveness`)."""
    again_s: float = 1.0
    """Pause before registering again with a registry that could not write because its store is full."""
    farewell_s: float = 1.0
    """How long the deregistration may take; otherwise the registration expires."""


class RegistrationClient:
    """`async with RegistrationClient(bus, record) as registration:` registers and stays registered.

    It sends heartbeats every `lease.heartbeat_s`, and the whole record every `lease.expiry_s` and after a
    reconnect, which repairs a registry that has lost it. On exit the state becomes `gone`. When the registry
    says that a newer incarnation has taken the name, `fenced` is set and the heartbeats end.
    """

    lease: RegistrationLease

    def __init__(
        self,
        bus: Bus,
        record: ServiceRecord,
        *,
        register_s: float | None = None,
        times: RegistrationTimes = RegistrationTimes(),
    ) -> None:
        """`register_s` is the deadline of the first registration, if another one than later."""
        self.record = with_metrics(record, bus.metrics_url)
        self._bus = bus
        self._times = times
        self._register_s = times.register_s if register_s is None else register_s
        self._tasks = TaskSet()
        self._again = asyncio.Event()
        self._forget_callback: Callable[[], None] = lambda: None
        self.fenced = asyncio.Event()

    async def __aenter__(self) -> RegistrationClient:
        self.lease = await self._register(self._register_s)
        self._forget_callback = self._bus.on_reconnect(self._on_reconnect)
        self._tasks.create(self._send_heartbeats(), name=f"heartbeat {self.record.sid}")
        self._tasks.create(self._renew_registration(), name=f"registration {self.record.sid}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget_callback()
        await self._tasks.close()
        if self.record.state in (InstanceState.GONE, InstanceState.FAULTED):
            return  # a fault stays readable until the record is released or replaced
        with contextlib.suppress(DmscError, TimeoutError):
            async with asyncio.timeout(self._times.farewell_s):
                await self.change(InstanceState.GONE, "stopped" if error is None else "ended")

    async def change(
        self, state: InstanceState, reason: str = "", *, fault: str = "", culprit: Culprit | None = None
    ) -> None:
        """Changes this incarnation's state and reports it to the registry.

        `fault` is the code of the error that ends this incarnation, if a new one would meet it again;
        `culprit` is the microbatch that was processed then.

        Raises:
            IllegalTransition: the lifecycle does not allow the change.
            Unavailable: the registry does not answer or can't write; the next registration carries the state.
        """
        now = self.record.state
        if state is not now and state not in INSTANCE_TRANSITIONS[now]:
            raise IllegalTransition(
                f"{self.record.sid}: {now} → {state} is not allowed", sid=self.record.sid, state=now
            )
        self.record = self.record.model_copy(
            update={"state": state, "reason": reason, "fault": fault, "culprit": culprit}
        )
        await self._bus.command(
            subjects.STATE_CHANGE,
            StateChange(
                sid=self.record.sid,
                incarnation=self.record.incarnation,
                state=state,
                reason=reason,
                fault=fault,
                culprit=culprit,
            ),
            while_heard=True,
            sid=self.record.sid,
        )

    async def tell(self, state: InstanceState, reason: str) -> None:
        """Like `change`; if the registry can't take the change now, a registration carries it soon.

        Raises:
            IllegalTransition: the lifecycle does not allow the change.
        """
        try:
            await self.change(state, reason)
        except Unavailable as error:
            log.warning("state not reported yet", sid=self.record.sid, state=state, reason=error.text)
            self._again.set()

    async def update(self, **fields: Any) -> None:
        """Replaces fields of the record (capability, tags, schemas, …) and registers it again."""
        self.record = self.record.model_copy(update=fields)
        self.lease = await self._register(self._register_s)

    async def _register(self, deadline_s: float) -> RegistrationLease:
        """Registers, and repeats it as long as the registry answers that it can't write now.

        Raises:
            NoResponders, DeadlineExceeded: the registry does not answer.
        """
        while True:
            announcement = Registration(record=self.record)
            try:
                lease: RegistrationLease = await self._bus.command(
                    subjects.REGISTRATION,
                    announcement,
                    deadline_s=deadline_s,
                    while_heard=True,
                    sid=self.record.sid,
                )
                break
            except Unavailable as error:
                if not error.answered:
                    raise
                log.info("not registered yet", sid=self.record.sid, reason=error.text)
            await asyncio.sleep(self._times.again_s)
        if lease.route_id != self.record.route_id:
            self.record = self.record.model_copy(update={"route_id": lease.route_id})
        return lease

    async def _on_reconnect(self) -> None:
        self._again.set()

    async def _renew_registration(self) -> None:
        stand_alone()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.lease.expiry_s):
                    await self._again.wait()
            self._again.clear()
            try:
                self.lease = await self._register(min(self._register_s, self._times.register_s))
            except DmscError as error:
                log.warning("registration failed", sid=self.record.sid, reason=error.text)
                if isinstance(error, Fenced):
                    self.fenced.set()
                    return
                await asyncio.sleep(min(1.0, self.lease.heartbeat_s))
                if error.retryable:
                    self._again.set()

    async def _send_heartbeats(self) -> None:
        stand_alone()
        record, digest = self.record, digest_of(self.record)
        while not self.fenced.is_set():
            if record is not self.record:
                record, digest = self.record, digest_of(self.record)
            beat = Heartbeat(
                sid=record.sid, incarnation=record.incarnation, state=record.state, digest=digest
            )
            with contextlib.suppress(DmscError):  # disconnected: a lease is longer than a reconnect takes
                if self._bus.connected:  # a buffered heartbeat would be outdated when it arrives
                    await self._bus.publish(subjects.HEARTBEAT, beat, sid=record.sid)
            await asyncio.sleep(self.lease.heartbeat_s)


def with_metrics(record: ServiceRecord, url: str) -> ServiceRecord:
    """The record with the URL of its process's metrics, if there is one."""
    if not url:
        return record
    return record.model_copy(update={"endpoint": record.endpoint.model_copy(update={"metrics": url})})


def digest_of(record: ServiceRecord) -> str:
    """Eight hex digits of the record that the sender has registered, without the fields that the registry
    sets."""
    own = record.model_copy(update={"route_id": 0, "reason": "", "fault": "", "culprit": None})
    return hashlib.blake2b(own.model_dump_json().encode(), digest_size=4).hexdigest()
