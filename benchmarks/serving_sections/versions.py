"""Versions that the sections serve, and the mesh that they are served on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.command import say
from benchmarks.harness.jobs import job
from benchmarks.harness.meshes import mesh
from bus import subjects
from bus.connection import Bus
from dmsc.chaos.patience import persistently
from dmsc.chaos.run import Chaos, open_chaos
from dmsc.client.async_client import AsyncClient
from dmsc.state.settings import find_bus, find_gateway
from dmsc.state.state_folder import StateFolder
from schemas.envelope import EntityKind
from schemas.job import JobSpec
from schemas.registry import InstanceState, ServiceRecord
from schemas.services.model_service import ServedVersion

VOCABULARY = 128
"""Of the small models: each token is one character, so that an answer's text is its tokens."""
READY_S = 120.0
LOOK_S = 0.05


def version(
    service: str,
    *,
    stages: int = 1,
    replicas: int | Mapping[str, int] = 1,
    serve: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> JobSpec:
    """A version of a byte GPT with random weights, the same ones for the same sizes.

    Args:
        service: The service's name.
        stages: How many stages it is cut into.
        replicas: Of each stage.
        serve: More of the section `serve`.
        training: More of the section `training`: threads.
        sizes: `layers`, `width`, `context`, `pad_ms`, `model`: as `benchmarks.harness.jobs.job` takes them.
    """
    body = job(
        f"bench-{service}",
        steps=1,
        stages=stages,
        replicas=replicas,
        training={"seed": 5, **(training or {})},
        serve={"service": service, "exact": "required", **(serve or {})},
        **{"model": {"vocabulary": VOCABULARY}, **sizes},
    )
    return JobSpec.model_validate(body)


@dataclass(frozen=True)
class ServingMesh:
    """A mesh, the means to hurt it, and its gateways in turn."""

    folder: StateFolder
    bus: Bus
    chaos: Chaos
    stack: AsyncExitStack

    async def clients(self, count: int) -> list[AsyncClient]:
        """Clients that ask one gateway first, the next one the other, and go on where that one dies."""
        address = find_gateway(state=self.chaos.folder)
        found = []
        for number in range(count):
            turn = number % len(address.urls)
            urls = (*address.urls[turn:], *address.urls[:turn])
            client = AsyncClient(urls, token=address.token, patience_s=self.chaos.times.patience_s)
            found.append(await self.stack.enter_async_context(client))
        return found

    async def active(self, served: ServedVersion) -> list[ServiceRecord]:
        """The instances of a version that answer at this moment."""
        entries = await persistently(lambda: self.bus.bucket(subjects.REGISTRY_RECORD).entries())
        records = [entry.message for entry in entries]
        return [
            record
            for record in records
            if isinstance(record, ServiceRecord)
            and record.job == served.job
            and record.state is InstanceState.ACTIVE
        ]

    async def until_active(self, served: ServedVersion, count: int) -> None:
        """Waits until so many of its instances answer.

        Raises:
            TimeoutError: Not within `READY_S`.
        """
        async with asyncio.timeout(READY_S):
            while len(await self.active(served)) < count:  # noqa: ASYNC110  # it is the registry that one waits for
                await asyncio.sleep(LOOK_S)

    @asynccontextmanager
    async def deployed(self, spec: JobSpec, instances: int) -> AsyncIterator[ServedVersion]:
        """The version, once so many instances of it answer; stopped after a block that ends well."""
        assert spec.serve is not None
        service = spec.serve.service
        await self.chaos.client.deploy(spec)
        shown = ""

        def show(version: ServedVersion) -> None:
            nonlocal shown
            if version.reason != shown:
                say(f"{service}: {version.reason}")
            shown = version.reason

        async with asyncio.timeout(READY_S):
            served = await self.chaos.client.wait_for_version(
                service, spec.serve.version, poll_s=LOOK_S, progress=show
            )
        await self.until_active(served, instances)
        yield served
        await persistently(lambda: self.chaos.client.stop_service(service))


@asynccontextmanager
async def serving_mesh(*options: str, slots: int = 4) -> AsyncIterator[ServingMesh]:
    """A mesh of two clusters on free ports, gone afterwards, without modules.

    It is one of `dmsc up`, whose children are forked: on a busy machine a dozen new interpreters take longer
    than a mesh may take to be ready, and each one that is killed comes back as slowly.

    Args:
        options: More options of `dmsc up`.
        slots: The slots of each of its nodes.
    """
    async with AsyncExitStack() as stack:
        started = mesh(None, "--policy", "none", "--automation", "act", *options, slots=slots)
        folder = StateFolder(await asyncio.to_thread(lambda: stack.enter_context(started)))
        address = find_bus(state=folder.path)
        connected = Bus.connect(address.servers, name="bench", kind=EntityKind.TAP, token=address.token)
        bus = await stack.enter_async_context(connected)
        chaos = await stack.enter_async_context(open_chaos(folder, say))
        yield ServingMesh(folder, bus, chaos, stack)
