"""Sums of parameters that several stages share: each stage's is sent to the others, and all are added.

A replica gets the sum of each other stage from one of its replicas, over the ordinary links. All sums are
int64, so that the total has the same bits everywhere, as if the layers were in one stage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from schemas.data_plane import MicrobatchNotice
from schemas.errors import Conflict
from schemas.step import Member, StepPrepare, TiedStage
from workers.links.hop_exchange import TensorTransfer

Key = tuple[int, int]
"""(step, attempt)."""


class TiedSums:
    """The exchange of one instance.

    Args:
        member: This instance.
        stage: Its stage.
        send: Sends a transfer, in the background.
    """

    def __init__(self, member: Member, stage: int, send: Callable[[TensorTransfer], None]) -> None:
        self._member = member
        self._stage = stage
        self._send = send
        self._own: dict[int, Tensor] = {}  # other stage → what this one sends it
        self._own_key: Key | None = None
        self._sent: set[Member] = set()
        self._came: dict[tuple[Key, int], Tensor] = {}
        self._news = asyncio.Event()

    def arrived(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        """Takes the sum of another stage."""
        key = (notice.step, notice.attempt)
        self._came = {other: sums for other, sums in self._came.items() if other[0] >= key}
        self._came[key, notice.stage] = tensors[0]
        self._news.set()

    def woken(self) -> None:
        """Has a waiting `add` look whether it is still wanted."""
        self._news.set()

    async def add(
        self,
        order: StepPrepare,
        flat: Tensor,
        shared: Callable[[TiedStage], list[slice]],
        wanted: Callable[[], bool],
    ) -> None:
        """Sends this stage's part of `flat` to all tied stages, and adds theirs.

        Args:
            order: The order to prepare.
            flat: (parameters,) the stage's sum over its replicas; changed in place.
            shared: The parts of `flat` that are shared with another stage.
            wanted: Whether the order is still in force.

        Raises:
            Conflict: The order is not in force any more.
        """
        key = (order.step, order.attempt)
        parts = {tied.stage: shared(tied) for tied in order.tied}
        self._own = {stage: torch.cat([flat[part] for part in own]) for stage, own in parts.items()}
        self._own_key, self._sent = key, set()
        self.send_again(order)
        while any((key, stage) not in self._came for stage in parts):
            if not wanted():
                raise Conflict(f"prepare of step {order.step}/{order.attempt} was given up")
            self._news.clear()
            await self._news.wait()
        for stage, own in parts.items():
            sums = self._came[key, stage]
            for part, came in zip(
                own, torch.split(sums, [part.stop - part.start for part in own]), strict=True
            ):
                flat[part] += came

    def send_again(self, order: StepPrepare) -> None:
        """Sends what is there to those members of the order that have not been sent it yet."""
        if self._own_key != (order.step, order.attempt):
            return
        place, senders = order.members.index(self._member), len(order.members)
        for tied in order.tied:
            for index, receiver in enumerate(tied.members):
                if index % senders != place or receiver in self._sent:
                    continue
                self._sent.add(receiver)
                self._send(
                    TensorTransfer(
                        direction="tied",
                        receiver=receiver,
                        stage=self._stage,
                        step=order.step,
                        attempt=order.attempt,
                        tensors=(self._own[tied.stage],),
                    )
                )
