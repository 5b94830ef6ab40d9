"""Counts the transitions that the step machine's state variables take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from entities.orchestrator.transaction.states import STATE_VARIABLES, transitions

Arrow = tuple[str, str, str]
"""State variable, transition, and the state that it starts from."""


def all_arrows() -> set[Arrow]:
    return {
        (name, method, state.value)
        for name, lifecycle in STATE_VARIABLES.items()
        for method, table in transitions(lifecycle).items()
        for state in table
    }


@contextmanager
def counted_arrows() -> Iterator[Counter[Arrow]]:
    """While it is open, each transition that any machine takes is counted."""
    counts: Counter[Arrow] = Counter()

    def counting(name: str, method: str, enter: Callable[[Any], None]) -> Callable[[Any], None]:
        def count(lifecycle: Any) -> None:
            arrow = (name, method, lifecycle.state.value)
            enter(lifecycle)
            counts[arrow] += 1

        count.table = enter.table  # type: ignore[attr-defined]
        return count

    originals = [
        (lifecycle, method, getattr(lifecycle, method), name)
        for name, lifecycle in STATE_VARIABLES.items()
        for method in transitions(lifecycle)
    ]
    for lifecycle, method, enter, name in originals:
        setattr(lifecycle, method, counting(name, method, enter))
    try:
        yield counts
    finally:
        for lifecycle, method, enter, _ in originals:
            setattr(lifecycle, method, enter)
