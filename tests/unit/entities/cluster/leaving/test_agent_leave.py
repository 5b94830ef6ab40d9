"""When a node agent that leaves ends: once nothing runs there and the mesh knows, or at the deadline."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from entities.cluster.config import ClusterConfig
from entities.cluster.leaving.agent_leave import AgentLeave
from schemas.cluster import LeaveNotice
from schemas.errors import BusUnreachable, Unavailable

LONG_S = 3600.0


class Node:
    """A node agent's leave, with an orchestrator that answers, or fails with these errors first."""

    def __init__(self, *errors: Exception, busy: bool = False) -> None:
        self.errors = [*errors]
        self.notices: list[LeaveNotice] = []
        self.heard = asyncio.Event()
        self.busy = busy
        bus: Any = SimpleNamespace(sender=SimpleNamespace(incarnation="i1"), command=self._command)
        self.leave = AgentLeave(bus, ClusterConfig(cluster="b", node="n"), lambda: self.busy)
        self.offering = asyncio.get_running_loop().create_future()

    async def _command(self, row: object, notice: LeaveNotice, **options: Any) -> None:
        self.notices.append(notice)
        if self.errors:
            raise self.errors.pop(0)
        self.heard.set()

    async def order(self, deadline_s: float, incarnation: str | None = "i1") -> None:
        envelope: Any = None
        order = LeaveNotice(node="b-n", deadline_s=deadline_s, by="olga", incarnation=incarnation)
        await self.leave.order(order, envelope)

    def empties(self) -> None:
        self.busy = False
        self.leave.look()

    async def ends(self) -> None:
        await self.leave.ends(self.offering)
        assert self.offering.cancelled()


async def test_an_empty_node_ends_once_the_orchestrator_knows() -> None:
    node = Node()
    node.leave.begin(LONG_S, "SIGTERM", known=False)
    await node.ends()
    (notice,) = node.notices
    assert (notice.node, notice.source, notice.incarnation) == ("b-n", "signal", "i1")
    assert 0 < notice.deadline_s <= LONG_S


async def test_a_busy_one_ends_once_its_last_instance_has_left() -> None:
    node = Node(busy=True)
    node.leave.begin(LONG_S, "SIGTERM", known=False)
    ending = asyncio.create_task(node.ends())
    await node.heard.wait()
    node.leave.look()  # an instance came or went, and others are left
    await asyncio.sleep(0)
    assert not ending.done()
    node.empties()
    await ending


async def test_at_the_deadline_it_ends_whoever_is_left() -> None:
    node = Node(busy=True)
    node.leave.begin(0.0, "SIGTERM", known=False)
    await node.ends()
    assert node.busy


@pytest.mark.parametrize("error", [Unavailable("nobody leads"), BusUnreachable("gone")])
async def test_where_nobody_hears_it_an_empty_node_goes_all_the_same(error: Exception) -> None:
    node = Node(error)
    node.leave.begin(LONG_S, "SIGTERM", known=False)
    await node.ends()
    assert not node.heard.is_set()


async def test_an_order_of_the_orchestrator_is_not_told_back() -> None:
    node = Node(busy=True)
    await node.order(LONG_S)
    assert node.leave.under_way
    node.busy = False
    await node.ends()
    assert node.notices == []


async def test_an_order_for_another_incarnation_changes_nothing() -> None:
    node = Node()
    await node.order(LONG_S, incarnation="i0")
    assert not node.leave.under_way


async def test_of_several_deadlines_the_soonest_counts_and_is_told() -> None:
    node = Node(busy=True)
    await node.order(LONG_S)
    node.leave.begin(30.0, "SIGTERM", known=False)
    node.leave.begin(2 * LONG_S, "SIGTERM", known=False)
    ending = asyncio.create_task(node.ends())
    await node.heard.wait()
    node.empties()
    await ending
    (notice,) = node.notices
    assert notice.deadline_s <= 30.0


async def test_what_ends_offering_the_node_is_raised() -> None:
    node = Node(busy=True)
    node.offering.set_exception(Unavailable("torch is missing"))
    with pytest.raises(Unavailable, match="torch is missing"):
        await node.leave.ends(node.offering)
