"""Lifecycle control (draft §4.2): a module's state, checked against its table, sent to the orchestrator."""

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
    """Sends each state in order, and repeats the last one regularly and to every new leader.

    Args:
        bus: The module's connection.
        described: Name, version, subscriptions and jobs of the module, in state registered.
        every_s: Seconds between two repetitions.
        answer_s: Seconds to wait for the orchestrator's acknowledgement before going on without it.
    """

    def __init__(self, bus: Bus, described: ModuleLifecycle, *, every_s: float, answer_s: float) -> None:
        self.now = described
        self._bus = bus
        self._every_s = every_s
        self._answer_s = answer_s
        self._waiting: asyncio.Queue[ModuleLifecycle] = asyncio.Queue()
        self._waiting.put_nowait(described)
        self._unacknowledged = False
        bus.on_reconnect(self._repeat)

    @property
    def state(self) -> ModuleState:
        return self.now.state

    def move(self, state: ModuleState, reason: str = "") -> None:
        """Enters a state.

        Raises:
            IllegalTransition: The table does not allow it; the text names the present state.
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
        """Sets the jobs for which it is enabled and those for which not; sent like a state."""
        self.now = self.now.model_copy(update={"jobs": jobs, "without": without})
        self._waiting.put_nowait(self.now)

    def drifts(self, reason: str) -> None:
        """Sets why what it learnt no longer fits, empty if it does; sent like a state."""
        self.now = self.now.model_copy(update={"drift": reason})
        self._waiting.put_nowait(self.now)

    async def acknowledged(self) -> None:
        """Returns once all states so far were acknowledged, or no orchestrator answered in time."""
        await self._waiting.join()

    async def run(self) -> None:
        """Sends states until cancelled."""
        with contextlib.suppress(DmscError):  # without it, the next repetition reaches the new leader
            await self._bus.subscribe(subjects.LEADER, self._new_leader)
        while True:
            try:
                async with asyncio.timeout(self._every_s):
                    lifecycle = await self._waiting.get()
            except TimeoutError:
                await self._send(self.now)
            else:
                try:
                    await self._send(lifecycle)
                finally:
                    self._waiting.task_done()

    async def _send(self, lifecycle: ModuleLifecycle) -> None:
        try:
            await self._bus.command(
                subjects.MODULE_LIFECYCLE,
                lifecycle,
                deadline_s=self._answer_s,
                owner=lifecycle.owner,
                module=lifecycle.module,
            )
            self._unacknowledged = False
        except DmscError as error:
            if not self._unacknowledged:
                log.warning(
                    "the orchestrator does not acknowledge the module, going on",
                    module=lifecycle.module,
                    state=lifecycle.state.value,
                    reason=error.text,
                )
            self._unacknowledged = True

    async def _new_leader(self, message: Leadership, envelope: Envelope) -> None:
        await self._repeat()

    async def _repeat(self) -> None:
        self._waiting.put_nowait(self.now)
