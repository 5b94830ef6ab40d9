"""Has the orchestrator empty a machine's node before it is given back: the one place that knows how.

Today that is a drain: the node gets nothing new, and its instances move elsewhere. A leave with a deadline
takes its place here.
"""

from __future__ import annotations

import contextlib

from bus import subjects
from bus.connection import Bus
from schemas.errors import NotFound
from schemas.gateway_api import CordonPlace, UncordonPlace
from schemas.names import agent_name


class NodeEmptying:
    """Orders about nodes of machines. `by`: in whose name."""

    def __init__(self, bus: Bus, by: str, *, answer_s: float = 10.0) -> None:
        self._bus = bus
        self._by = by
        self._answer_s = answer_s

    async def begin(self, cluster: str, machine: str, reason: str) -> None:
        """The node gets nothing new, and is emptied; again is no error.

        Raises:
            DmscError: the orchestrator does not answer.
        """
        place = CordonPlace(node=agent_name(cluster, machine), reason=reason[:500], user=self._by, drain=True)
        with contextlib.suppress(NotFound):
            await self._bus.command(subjects.CORDON_PLACE, place, deadline_s=self._answer_s)

    async def forget(self, cluster: str, machine: str) -> None:
        """Nothing is kept about a node that is gone, whose name never comes again.

        Raises:
            DmscError: the orchestrator does not answer.
        """
        place = UncordonPlace(node=agent_name(cluster, machine), user=self._by)
        with contextlib.suppress(NotFound):
            await self._bus.command(subjects.UNCORDON_PLACE, place, deadline_s=self._answer_s)
