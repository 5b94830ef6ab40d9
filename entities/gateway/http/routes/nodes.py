"""Nodes and their cordons: list them, and, for operators, cordon, drain and uncordon a node; and machines."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import (
    HttpBearer,
    IdempotencyKey,
    MachineName,
    NodeName,
    PageAsked,
    PoolName,
    Reason,
    answer,
)
from schemas.cluster import MOST_NOTICE, LeaveSource
from schemas.errors import Ack, NotFound
from schemas.gateway_api import Cordons, MeshStatus
from schemas.machines.commands import MachinesStatus
from schemas.machines.pools import MOST_MACHINES
from schemas.pages import NodePage, NodeView

Slot = Annotated[int | None, Query(ge=0, le=100_000, description="one slot; default: the whole node")]

DeadlineS = Annotated[float, Query(ge=0, le=MOST_NOTICE, description="seconds until the machine may be gone")]


def nodes(context: HttpContext) -> APIRouter:
    """The routes below `/v1/nodes`, and `/v1/mesh`."""
    router = APIRouter(prefix="/v1")
    jobs = context.jobs

    @router.get("/mesh", response_model=MeshStatus, tags=["mesh"])
    async def mesh(bearer: HttpBearer) -> Response:
        """Services, nodes, jobs and cordons at a glance, as the leading orchestrator sees them."""
        return answer(await bearer.run(jobs.mesh()))

    @router.get("/nodes", response_model=NodePage, tags=["nodes"])
    async def list_nodes(bearer: HttpBearer, page: PageAsked) -> Response:
        """The node agents, their slots and their cordons."""
        return page.of(NodePage, _views(await bearer.run(jobs.mesh())), lambda view: (view.status.sid,))

    @router.get("/nodes/{node}", response_model=NodeView, tags=["nodes"])
    async def read(node: NodeName, bearer: HttpBearer) -> Response:
        """One node, by the SID of its agent."""
        for view in _views(await bearer.run(jobs.mesh())):
            if view.status.sid == node:
                return answer(view)
        raise NotFound(f"there is no node {node}; GET /v1/nodes lists them")

    @router.post("/nodes/{node}/cordon", response_model=Cordons, tags=["nodes"])
    async def cordon(
        node: NodeName, bearer: HttpBearer, keyed: IdempotencyKey, slot: Slot = None, reason: Reason = ""
    ) -> Response:
        """Keep new instances off this node, or off one of its slots."""
        return await context.command(keyed, bearer, jobs.cordon(node, slot, reason))

    @router.post("/nodes/{node}/drain", response_model=Cordons, tags=["nodes"])
    async def drain(
        node: NodeName, bearer: HttpBearer, keyed: IdempotencyKey, reason: Reason = ""
    ) -> Response:
        """Cordon a node and move its instances elsewhere. Answers at once; `/v1/mesh` shows the progress."""
        return await context.command(keyed, bearer, jobs.cordon(node, None, reason, drain=True))

    @router.post("/nodes/{node}/leave", response_model=Cordons, tags=["nodes"])
    async def leave(
        node: NodeName,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        deadline_s: DeadlineS = 30.0,
        source: LeaveSource = "person",
        reason: Reason = "",
    ) -> Response:
        """Have a node leave by a deadline: its instances move, then its agent ends. Answers at once."""
        return await context.command(keyed, bearer, jobs.leave(node, deadline_s, reason, source))

    @router.post("/nodes/{node}/uncordon", response_model=Cordons, tags=["nodes"])
    async def uncordon(
        node: NodeName, bearer: HttpBearer, keyed: IdempotencyKey, slot: Slot = None
    ) -> Response:
        """Let new instances start there again."""
        return await context.command(keyed, bearer, jobs.uncordon(node, slot))

    return router


def machines(context: HttpContext) -> APIRouter:
    """The routes below `/v1/machines`."""
    router = APIRouter(prefix="/v1/machines", tags=["machines"])
    asked = context.machines

    @router.get("", response_model=MachinesStatus)
    async def status(bearer: HttpBearer) -> Response:
        """Pools, their machines and what they cost, and what the provisioner would do now."""
        return answer(await bearer.run(asked.status()))

    @router.post("/{machine}/release", response_model=Ack)
    async def release(
        machine: MachineName, bearer: HttpBearer, keyed: IdempotencyKey, reason: Reason = ""
    ) -> Response:
        """Empty a machine and give it back. Answers at once; `/v1/machines` shows the progress."""
        return await context.command(keyed, bearer, asked.release(machine, reason))

    @router.post("/pools/{pool}/order", response_model=MachinesStatus)
    async def order(
        pool: PoolName,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        count: Annotated[int, Query(ge=1, le=MOST_MACHINES, description="so many machines")] = 1,
        reason: Reason = "",
    ) -> Response:
        """Order machines of a pool, whatever the demand; its caps and its budget hold."""
        return await context.command(keyed, bearer, asked.order(pool, count, reason, keyed.key))

    @router.post("/pools/{pool}/reset", response_model=Ack)
    async def reset(pool: PoolName, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Forget a pool's failures, so that it orders again at once."""
        return await context.command(keyed, bearer, asked.reset(pool))

    return router


def _views(status: MeshStatus) -> list[NodeView]:
    links = {record.sid: record.links for record in status.services}
    return [
        NodeView(
            status=node,
            cordons=tuple(cordon for cordon in status.cordons if cordon.agent == node.sid),
            links=links.get(node.sid, ()),
        )
        for node in status.nodes
    ]
