"""Ctrl-C, SIGTERM, a closed terminal as events of the loop: who is at work decides what the next one does."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Action = Callable[[int], None]
"""Called with how many signals have come to this action so far (1 for the first)."""


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP while a command runs. The innermost `handled_by` decides."""

    def __init__(self, default: Action) -> None:
        self._actions: list[tuple[Action, list[int]]] = [(default, [0])]

    def _arrived(self) -> None:
        action, count = self._actions[-1]
        count[0] += 1
        action(count[0])

    @contextmanager
    def handled_by(self, action: Action) -> Iterator[None]:
        """Until the block ends, signals go to `action`."""
        self._actions.append((action, [0]))
        try:
            yield
        finally:
            self._actions.pop()


@contextmanager
def interrupts(default: Action | None = None) -> Iterator[Interrupts]:
    """Own these signals of the process. By default the first cancels the task that asked for this.

    The second is let pass: cleaning up is under way. The third cancels that, too.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def cancel(count: int) -> None:
        if count != 2:
            task.cancel()

    owner = Interrupts(default or cancel)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: meant to outlive its terminal
        numbers.append(signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, owner._arrived)
    try:
        yield owner
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
