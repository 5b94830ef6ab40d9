"""What is offered to a receiver, and the state of its delivery (`workers.links.hop_exchange`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from schemas.data_plane import HopDirection, MicrobatchNotice
from schemas.limits import REPEAT_FIRST_S
from schemas.step import Member
from workers.links.link_table import LinkSlot
from workers.links.tensor_link import Verdict

Answer = Literal["accepted", "held", "stale", "later"]


@dataclass(kw_only=True, slots=True, eq=False)
class TensorTransfer:
    """Tensors for `receiver`, and their place in the training.

    The tensors may have any dtypes, shapes and devices; they must not change until the transfer ends. The
    other fields are as in `MicrobatchNotice`.
    """

    direction: HopDirection
    receiver: Member
    stage: int
    step: int
    attempt: int = 0
    microbatch: int = 0
    evaluate: bool = False
    round: int = 0
    transfer: int = 0
    learning_rate: float | None = None
    replaced: int = 0
    tensors: Sequence[Tensor] = ()


class Alarm:
    """Wakes the one task that waits for it, when it is set or at a time.

    One timer serves many waits: one that was set for an earlier time wakes its task too early, which then
    looks around and waits again. Almost all waits end long before their time.
    """

    __slots__ = ("_set", "_timer", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None

    def set(self, _: object = None) -> None:
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._set = False

    async def wait(self, timeout_s: float) -> None:
        """Returns once it is set, after `timeout_s`, or for no reason."""
        if self._set:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + timeout_s
        if self._timer is None or self._timer.when() > at:
            self.end()
            self._timer = loop.call_at(at, self._ring)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _ring(self) -> None:
        self._timer = None
        self.set()

    def end(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass(slots=True, eq=False)
class Posting:
    """A transfer that is posted on a link, and the notice that is repeated for it."""

    slot: LinkSlot
    notice: MicrobatchNotice
    sending: asyncio.Future[Verdict]
    pause_s: float = REPEAT_FIRST_S
    due: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return self.slot.name, self.notice.tag


@dataclass(slots=True, eq=False)
class OpenOffer:
    """A transfer to be delivered, and the state of its delivery."""

    transfer: TensorTransfer
    answer: Answer | None = None
    answered_at: float = 0.0
    withdrawn_at: float | None = None
    urgent: bool = False
    posting: Posting | None = None
    wake: Alarm = field(default_factory=Alarm)

    def withdraw(self) -> None:
        if self.withdrawn_at is None:
            self.withdrawn_at = time.monotonic()
            self.wake.set()
