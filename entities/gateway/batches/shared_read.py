"""One read of a bucket for all who ask at the same time: it has all users' rows, and anybody may list."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedRead(Generic[T]):
    """Reads one after another, each for all who asked while the one before was under way.

    What was written before somebody asked is in the answer.
    """

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._under_way: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if self._next is None:
            self._next = asyncio.create_task(self._behind(self._under_way))
        return await asyncio.shield(self._next)

    async def _behind(self, former: asyncio.Task[T] | None) -> T:
        if former is not None:
            await asyncio.wait((former,))
        self._under_way, self._next = self._next, None
        return await self._read()
