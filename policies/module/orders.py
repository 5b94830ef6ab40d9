"""Orders to a running module (draft §4.2, lifecycle control).

The orchestrator activates it, puts it in shadow, drains it, enables or disables it for a job. Neither
training nor the policy's code is interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from policies.kit.engine import Engine
from policies.module.lifecycle import Lifecycle
from schemas.envelope import Envelope
from schemas.errors import BadInput, Conflict
from schemas.policy import ModuleLifecycle, ModuleOp, ModuleOrder, ModuleState

log = get_logger("module")

ENTERED = {ModuleOp.ACTIVATE: ModuleState.ACTIVE, ModuleOp.SHADOW: ModuleState.SHADOW}


class Orders:
    """Serves one module's orders. The order to drain sets `drained`: the module then retires.

    `entered` is awaited with each state that an order has set. `hang` is the reason why the policy's code
    can't be called again; empty if it can.
    """

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        lifecycle: Lifecycle,
        entered: Callable[[ModuleState], Awaitable[None]],
    ) -> None:
        self._entered = entered
        self.drained = asyncio.Event()
        self.hang = ""
        self._bus = bus
        self._engine = engine
        self._lifecycle = lifecycle

    async def serve(self) -> Subscription:
        return await self._bus.serve(
            subjects.MODULE_ORDER, self.obey, concurrency=1, sid=self._bus.sender.name
        )

    async def obey(self, order: ModuleOrder, envelope: Envelope) -> ModuleLifecycle:
        """Carries out an order; returns the lifecycle after it.

        Raises:
            Conflict: The module is about to end, still starting, or its code hangs.
            BadInput: The order enables or disables without naming a job.
        """
        lifecycle = self._lifecycle
        if lifecycle.state in (ModuleState.DRAINING, ModuleState.RETIRED):
            if order.op is ModuleOp.DRAIN:
                return lifecycle.now
            raise Conflict(f"module {lifecycle.now.module} is {lifecycle.state}: start it again")
        log.info("order", module=lifecycle.now.module, op=order.op, jobs=order.jobs, reason=order.reason)
        if order.op is ModuleOp.DRAIN:
            lifecycle.move(ModuleState.DRAINING, order.reason)
            self.drained.set()
        elif order.op in ENTERED:
            await self._enter(ENTERED[order.op], order.reason)
        elif not order.jobs:
            raise BadInput(f"{order.op}: for which job? name at least one")
        else:
            enabled = order.op is ModuleOp.ENABLE
            for job in order.jobs:
                self._engine.enable(job) if enabled else self._engine.disable(job)
            lifecycle.enabled(*self._engine.jobs())
        return lifecycle.now

    async def _enter(self, state: ModuleState, reason: str) -> None:
        lifecycle = self._lifecycle
        if lifecycle.state is state:
            return
        if lifecycle.state is ModuleState.REGISTERED:
            raise Conflict(f"module {lifecycle.now.module} is still starting: try again in a moment")
        if self.hang:
            raise Conflict(f"module {lifecycle.now.module}: {self.hang}; end its process and start it again")
        self._engine.resume()
        lifecycle.move(state, reason)
        await self._entered(state)
