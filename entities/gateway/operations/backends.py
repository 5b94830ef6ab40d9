"""The gateway's requests to other entities: a circuit breaker per entity, and one retry budget for all."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from bus.connection import Bus
from bus.logs import get_logger
from bus.subject_row import Reply, Request, Subject
from entities.gateway.operations.breaker import Breaker, BreakerConfig, BreakerState, RetryBudget
from entities.gateway.operations.operation import Operation
from entities.metrics import BREAKER_OPENED, BREAKER_STATE, BUDGET_REFUSED, MetricReading
from schemas.envelope import EntityKind, Envelope
from schemas.errors import BusUnreachable, Overloaded, Unavailable
from schemas.signals import AccessDecision

log = get_logger("gateway")

GUARDED = (EntityKind.ORCHESTRATOR, EntityKind.SERVICE_REGISTRY, EntityKind.AUTHORIZER)
"""The entities with a breaker: every client needs them. Node agents and modules have none: they are many, and
one that is away says nothing about the others."""

_LEVEL = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class Asks(Protocol):
    """Sends a request and waits for the answer: the bus itself, or `Backends` in front of it."""

    async def request(
        self,
        row: Subject[Request, Reply],
        message: Request,
        *,
        timeout_s: float = 5.0,
        repeat_s: float | None = None,
        absent_s: float = 0.0,
        **tokens: Any,
    ) -> Reply: ...


class Backends:
    """Like `Bus.request` and `Bus.command`, but raises `Overloaded` while the entity's breaker is open."""

    def __init__(self, bus: Bus, gateway: str, config: BreakerConfig | None = None) -> None:
        self._bus = bus
        self._gateway = gateway
        self._breakers = {kind: Breaker(config) for kind in GUARDED}
        self._budget = RetryBudget()

    async def request(
        self,
        row: Subject[Request, Reply],
        message: Request,
        *,
        timeout_s: float = 5.0,
        repeat_s: float | None = None,
        absent_s: float = 0.0,
        cause: Envelope | str | None = None,
        **tokens: Any,
    ) -> Reply:
        async with self._watched(row):
            return await self._bus.request(
                row, message, timeout_s=timeout_s, repeat_s=repeat_s, absent_s=absent_s, cause=cause, **tokens
            )

    async def command(
        self,
        row: Subject[Request, Reply],
        message: Request,
        *,
        deadline_s: float = 30.0,
        cause: Envelope | str | None = None,
        always: bool = False,
        **tokens: Any,
    ) -> Reply:
        """Sends a command. `always`: send it although the breaker is open, because it frees resources."""
        async with self._watched(row, always=always):
            self._budget.earn()
            return await self._bus.command(
                row,
                message,
                deadline_s=deadline_s,
                cause=cause,
                may_repeat=lambda: self._budget.spend(time.monotonic()),
                **tokens,
            )

    def operation(
        self,
        action: str,
        resource: str,
        row: Subject[Request, Reply],
        message: Callable[[AccessDecision], Request],
        deadline_s: float,
        *,
        frees: bool = False,
    ) -> Operation[Reply]:
        """The operation that sends the command that `message` makes of the bearer's access."""

        async def act(access: AccessDecision) -> Reply:
            return await self.command(row, message(access), deadline_s=deadline_s, always=frees)

        return Operation(action, resource, act, frees)

    def state(self, kind: EntityKind) -> BreakerState:
        return self._breakers[kind].state

    @asynccontextmanager
    async def _watched(self, row: Subject, *, always: bool = False) -> AsyncIterator[None]:
        kind = next((each for each in GUARDED if each in row.receivers), None)
        if kind is None or (always and self.state(kind) is not BreakerState.CLOSED):
            yield
            return
        breaker = self._breakers[kind]
        wait_s = breaker.admit(time.monotonic())
        if wait_s is not None:
            raise Overloaded(
                f"the {kind} has not answered for a while; it is asked again in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )
        ok: bool | None = True
        before = breaker.state
        try:
            yield
        except BusUnreachable:
            ok = None  # raised at once, and says nothing about the entity
            raise
        except Unavailable as error:
            ok = error.answered  # what it says itself, such as that one user asks too much, is no outage
            raise
        except Exception:
            raise  # the entity answered
        except BaseException:
            ok = None  # cancelled: the client has left
            raise
        finally:
            breaker.record(ok, time.monotonic())
            if breaker.state is not before:
                log.warning("breaker", entity=str(kind), state=str(breaker.state), gateway=self._gateway)

    def readings(self) -> Iterator[MetricReading]:
        for kind, breaker in self._breakers.items():
            yield BREAKER_STATE(_LEVEL[breaker.state], gateway=self._gateway, entity=str(kind))
            yield BREAKER_OPENED(breaker.opened, gateway=self._gateway, entity=str(kind))
        yield BUDGET_REFUSED(self._budget.refused, gateway=self._gateway)
