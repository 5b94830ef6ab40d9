"""Turns SIGINT, SIGTERM and SIGHUP into events of the loop; the running part decides what a signal does."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Action = Callable[[int], None]
"""Called at each signal with the number of signals that this action has got (1 for the first)."""


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP while a command runs. The innermost `handled_by` block decides."""

    def __init__(self, default: Action) -> None:
        self._actions: list[tuple[Action, list[int]]] = [(default, [0])]
        self.last: int | None = None
        """The number of the signal that came last."""

    def _on_signal(self, number: int) -> None:
        self.last = number
        action, count = self._actions[-1]
        count[0] += 1
        action(count[0])

    @contextmanager
    def handled_by(self, action: Action) -> Iterator[None]:
        """Send signals to `action` until the block ends."""
        self._actions.append((action, [0]))
        try:
            yield
        finally:
            self._actions.pop()


@contextmanager
def interrupts(default: Action | None = None) -> Iterator[Interrupts]:
    """Handle these signals of the process for the block.

    By default the first signal cancels the current task. The second is ignored, because the task is cleaning
    up. The third cancels the clean-up, too.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def cancel(count: int) -> None:
        if count != 2:
            task.cancel()

    owner = Interrupts(default or cancel)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, owner._on_signal, number)
    try:
        yield owner
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
