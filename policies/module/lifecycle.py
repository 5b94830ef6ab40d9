"""Lifecycle control (draft §4.2): a module's state, checked against its table, told to the orchestrator."""

from __future__ import annotations

import asyncio
import contextlib

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from schemas.envelope import Envelope
from schemas.errors import DmscError, IllegalTransition
from schemas.leadership import Leadership
from schemas.policy import MODULE_TRANSITIONS, ModuleLifecycle, ModuleState

log = get_logger("module")


class Lifecycle:
    """Tells each state in order, and the last one again and again and to every new leader.

    Args:
        bus: the module's connection.
        described: name, version, subscriptions and jobs of the module, in state registered.
        every_s: seconds between two repetitions.
        answer_s: seconds to wait for the orchestrator's acknowledgement before going on without.
    """

    def __init__(self, bus: Bus, described: ModuleLifecycle, *, every_s: float, answer_s: float) -> None:
        self.now = described
        self._bus = bus
        self._every_s = every_s
        self._answer_s = answer_s
        self._waiting: asyncio.Queue[ModuleLifecycle] = asyncio.Queue()
        self._waiting.put_nowait(described)
        self._unheard = False
        bus.on_reconnect(self._again)

    @property
    def state(self) -> ModuleState:
        return self.now.state

    def move(self, state: ModuleState, reason: str = "") -> None:
        """Enter a state.

        Raises:
            IllegalTransition: the table does not have it; the text has where it came from.
        """
        if state not in MODULE_TRANSITIONS[self.state]:
            raise IllegalTransition(
                f"module {self.now.module}: {self.state.value} → {state.value} is not allowed",
                module=self.now.module,
                state=self.state.value,
            )
        self.now = self.now.model_copy(update={"state": state, "reason": reason})
        self._waiting.put_nowait(self.now)

    def enabled(self, jobs: tuple[str, ...], without: tuple[str, ...]) -> None:
        """For which jobs it now is; told like a state."""
        self.now = self.now.model_copy(update={"jobs": jobs, "without": without})
        self._waiting.put_nowait(self.now)

    async def told(self) -> None:
        """All states so far were acknowledged, or nobody was there to do it."""
        await self._waiting.join()

    async def run(self) -> None:
        """Tell until cancelled."""
        with contextlib.suppress(DmscError):  # without it the next repetition tells the new leader
            await self._bus.subscribe(subjects.LEADER, self._new_leader)
        while True:
            try:
                async with asyncio.timeout(self._every_s):
                    lifecycle = await self._waiting.get()
            except TimeoutError:
                await self._tell(self.now)
            else:
                try:
                    await self._tell(lifecycle)
                finally:
                    self._waiting.task_done()

    async def _tell(self, lifecycle: ModuleLifecycle) -> None:
        try:
            await self._bus.command(
                subjects.MODULE_LIFECYCLE,
                lifecycle,
                deadline_s=self._answer_s,
                owner=lifecycle.owner,
                module=lifecycle.module,
            )
            self._unheard = False
        except DmscError as error:
            if not self._unheard:
                log.warning(
                    "the orchestrator does not acknowledge the module, going on",
                    module=lifecycle.module,
                    state=lifecycle.state.value,
                    reason=error.text,
                )
            self._unheard = True

    async def _new_leader(self, message: Leadership, envelope: Envelope) -> None:
        await self._again()

    async def _again(self) -> None:
        self._waiting.put_nowait(self.now)
