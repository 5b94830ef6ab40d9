"""Stands in for a node agent whose instances serve: it measures any model, and they are ready at once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.mesh.registration import RegistrationClient
from schemas.base import Message
from schemas.cluster import (
    Analyse,
    ForgetTopology,
    InstanceStart,
    InstanceStarted,
    InstanceStop,
    NodeStatus,
    Slot,
)
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack
from schemas.registry import Endpoint, InstanceState, ServiceRecord
from schemas.task_graph import LayerProfile, ModelTopology
from tests.integration.entities.conftest import Dial

TELLS = {"kind": "generate", "exact": "true", "context": "64", "vocabulary": "256", "fingerprint": "f0"}


class ServingAgent:
    """`tells`: what instances say of themselves. `fails`: why those that start now end at once.

    `instances`: those that live, by SID; `started`: all orders.
    """

    def __init__(self, bus: Bus, dial: Dial, name: str = "a-n", slots: int = 4) -> None:
        self.tells: dict[str, str] = dict(TELLS)
        self.fails = ""
        self.instances: dict[str, RegistrationClient] = {}
        self.started: list[InstanceStart] = []
        self._bus, self._dial, self._name, self._slots = bus, dial, name, slots
        self._stack = AsyncExitStack()

    async def serve(self) -> None:
        for row, handler in (
            (subjects.ANALYSE, self._analyse),
            (subjects.START_INSTANCE, self._start),
            (subjects.STOP_INSTANCE, self._stop),
            (subjects.FORGET_TOPOLOGY, self._forget),
        ):
            await self._bus.serve(row, handler, agent=self._name)
        await self.tell()

    async def tell(self) -> None:
        """Its state, to whoever leads."""
        cluster, node = self._name.split("-")
        busy = {order.slot: order.unit.sid for order in self.started if order.unit.sid in self.instances}
        slots = tuple(
            Slot(index=index, device="cpu", memory_bytes=1 << 32, busy_with=busy.get(index))
            for index in range(self._slots)
        )
        status = NodeStatus(
            sid=self._name,
            cluster=cluster,
            node=node,
            incarnation="i",
            slots=slots,
            address="127.0.0.1",
            warm=True,
        )
        await self._bus.command(subjects.NODE_STATUS, status, sid=self._name)

    async def kill(self, sid: str) -> None:
        """Ends an instance as its agent sees it: the registry knows that it has failed."""
        presence = self.instances.pop(sid)
        await presence.tell(InstanceState.FAULTED, "killed by signal 9")
        await self.tell()

    async def _analyse(self, order: Analyse, envelope: Envelope) -> Ack:
        layer: dict[str, Any] = {"kind": "x", "parameters": 1, "parameter_bytes": 4, "activation_bytes": 0}
        measured = {"forward_ms": 1.0, "backward_ms": 0.0, "output": (), "output_bytes": 4}
        topology = ModelTopology(
            job=order.job,
            cluster="a",
            node="n",
            layers=tuple(
                LayerProfile(index=index, name=f"layer{index}", **layer, **measured) for index in range(4)
            ),
            parameters=4,
            input_bytes=4,
            data_tokens=0,
            code_digest="",
        )
        self._later(subjects.TOPOLOGY, topology, agent=self._name, job=order.job)
        return Ack()

    def _later(self, row: Any, message: Message, **tokens: str) -> None:
        self._task = asyncio.create_task(self._bus.command(row, message, **tokens))

    async def _start(self, order: InstanceStart, envelope: Envelope) -> InstanceStarted:
        self.started.append(order)
        bus = await self._dial(order.unit.sid, EntityKind.INSTANCE)
        record = ServiceRecord(
            sid=order.unit.sid,
            prefix=f"train/{order.job}/stage/{order.unit.stage}",
            kind=EntityKind.INSTANCE,
            incarnation=order.incarnation,
            state=InstanceState.PENDING,
            endpoint=Endpoint(cluster="a", node="n"),
            tags=(*order.unit.tags, *(f"serve.{name}={value}" for name, value in self.tells.items())),
            job=order.job,
            stage=order.unit.stage,
        )
        presence = RegistrationClient(bus, record)
        await presence.__aenter__()
        if self.fails:
            await presence.tell(InstanceState.FAULTED, self.fails)
        else:
            self.instances[order.unit.sid] = presence
            await presence.tell(InstanceState.ACTIVE, "ready")
        await self.tell()
        return InstanceStarted(sid=order.unit.sid, incarnation=order.incarnation, pid=1)

    async def _stop(self, order: InstanceStop, envelope: Envelope) -> Ack:
        presence = self.instances.get(order.sid)
        if presence is None or presence.record.incarnation != order.incarnation:
            return Ack(note="not there")
        del self.instances[order.sid]
        await presence.__aexit__(None, None, None)
        await self.tell()
        return Ack()

    async def _forget(self, order: ForgetTopology, envelope: Envelope) -> Ack:
        return Ack()
