"""Has the orchestrator empty a machine's node before it is given back: the one place that knows how.

The node leaves with a deadline (ADR-0170): it gets nothing new, its instances move elsewhere, and its agent
ends once it is empty, or at the deadline. The name of its cordon goes with it, since no machine has it again.
"""

from __future__ import annotations

import contextlib

from bus import subjects
from bus.connection import Bus
from schemas.cluster import MOST_NOTICE, LeaveNotice
from schemas.errors import NotFound
from schemas.names import agent_name


class NodeEmptying:
    """Has nodes of machines leave. `by`: in whose name."""

    def __init__(self, bus: Bus, by: str, *, answer_s: float = 10.0) -> None:
        self._bus = bus
        self._by = by
        self._answer_s = answer_s

    async def begin(self, cluster: str, machine: str, reason: str, within_s: float) -> None:
        """The node leaves within so many seconds; again is no error, and of two deadlines the sooner counts.

        Raises:
            DmscError: the orchestrator does not answer.
        """
        notice = LeaveNotice(
            node=agent_name(cluster, machine),
            deadline_s=min(max(0.0, within_s), MOST_NOTICE),
            source="other",
            reason=reason[:500],
            by=self._by,
        )
        with contextlib.suppress(NotFound):
            await self._bus.command(subjects.LEAVE_NODE, notice, deadline_s=self._answer_s)
