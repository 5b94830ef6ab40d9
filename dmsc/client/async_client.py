"""The client of a mesh's outer door for asyncio: what `dmsc.Client` runs on a thread, and the commands use.

Every method raises the errors of `schemas.errors`: `Refused`, `NotFound`, `BadInput`, `Unavailable`…
A gateway that does not answer is passed over for the next one, if the mesh has several; what may not happen
twice carries an idempotency key, so that asking again is safe (docs/gateway.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

from dmsc.client import http_protocol as door
from dmsc.client.access_calls import AccessCalls
from dmsc.client.gateway_requests import Gateways, OnProgress
from dmsc.client.weights_check import check_file, check_weights
from dmsc.state.settings import find_gateway
from schemas.checkpoint import MANIFEST_NAME, CheckpointList, CheckpointManifest, PublishedCheckpoint
from schemas.cluster import Struck
from schemas.data_plane import RouteTable
from schemas.door import Cordons, JobLoad, MeshStatus, TapScope
from schemas.errors import NotFound, Unavailable
from schemas.fault import FaultRecord
from schemas.job import ENDED, JobEvent, JobRecord, JobSpec, WeightsManifest
from schemas.module_status import ModuleAnswer, ModuleStatus
from schemas.observation import Observation
from schemas.pages import (
    CheckpointPage,
    ClusterPage,
    ClusterView,
    Dataset,
    DatasetPage,
    FaultPage,
    InstancePage,
    JobPage,
    NodePage,
    NodeView,
    PolicyPage,
    Readiness,
    RoutePage,
)
from schemas.policy import ModuleLifecycle, PolicySwitch
from schemas.registry import ServiceRecord

Job = str | Path | Mapping[str, Any] | JobSpec
"""A job: a file's path, a mapping, or the model itself."""

Fault = Literal["kill", "freeze", "resume"]


class AsyncClient(AccessCalls):
    """Talks to a mesh's gateways from a coroutine; use it with `async with`.

    Args:
        url: one gateway or several; default: `$DMSC_GATEWAY`, then the mesh of the state folder.
        token: the user's token; default: `$DMSC_TOKEN`, then the state folder's.
        state: the state folder to look into; default: `$DMSC_STATE` or `.dmsc`.
        timeout_s: how long one request may take.
        patience_s: how long a broken event stream is reconnected, and how long a gateway that is too busy
            (429, 503) is asked again, before `Unavailable` is raised.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        state: Path | None = None,
        timeout_s: float = 10.0,
        patience_s: float = 30.0,
    ) -> None:
        address = find_gateway(url, token, state)
        self._door = Gateways(address.urls, address.token, timeout_s=timeout_s, patience_s=patience_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._door.close()

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        return await self._door.ask(method, path, body)

    async def ready(self) -> Readiness:
        """Whether the gateway that is asked could answer, and what is missing if not."""
        try:
            return Readiness.model_validate(await self._door.ask("GET", "/readyz"))
        except Unavailable as error:
            return Readiness(ready=False, waiting=error.fields.get("waiting", {"gateway": error.text}))

    # --- jobs -----------------------------------------------------------------------------------------------

    async def submit(self, job: Job, *, idempotency_key: str | None = None) -> JobRecord:
        """Queue a job; returns its record with the id that it was given.

        With an `idempotency_key` of your own, the same submission after a crash of yours is the same job.
        """
        answer = await self._door.ask("POST", "/v1/jobs", door.as_spec(job), key=idempotency_key)
        return JobRecord.model_validate(answer)

    async def each_job(
        self, *, state: str | None = None, user: str | None = None
    ) -> AsyncIterator[JobRecord]:
        """The mesh's jobs, oldest first, fetched as they are needed."""
        async for page in self._door.pages("/v1/jobs", JobPage, {"state": state, "user": user}):
            for record in page.jobs:
                yield record

    async def jobs(self, *, state: str | None = None, user: str | None = None) -> list[JobRecord]:
        """All jobs of the mesh, oldest first."""
        return [record async for record in self.each_job(state=state, user=user)]

    async def job(self, job: str) -> JobRecord:
        """One job's record. Raises `NotFound`."""
        return JobRecord.model_validate(await self._door.ask("GET", f"/v1/jobs/{_safe(job)}"))

    async def load(self, job: str) -> JobLoad:
        """How its instances are doing at this moment: queue, milliseconds per microbatch, latency."""
        return JobLoad.model_validate(await self._door.ask("GET", f"/v1/jobs/{_safe(job)}/load"))

    async def scale(self, job: str, replicas: int, stage: int | None = None) -> str:
        """Gives one stage, or all, this many working replicas; returns what will happen."""
        params = {"replicas": replicas, "stage": stage}
        answer = await self._door.ask("POST", f"/v1/jobs/{_safe(job)}/scale", params=params)
        return str(answer["note"])

    async def move(self, job: str, sid: str, stage: int) -> str:
        """Has an instance change its stage at the end of the open step; returns what will happen."""
        params = {"sid": sid, "stage": stage}
        answer = await self._door.ask("POST", f"/v1/jobs/{_safe(job)}/move", params=params)
        return str(answer["note"])

    async def cancel(self, job: str, *, reason: str = "") -> JobRecord:
        """Ask for the end of a job; it is told, and cleaned up after."""
        answer = await self._door.ask("POST", f"/v1/jobs/{_safe(job)}/cancel", params={"reason": reason})
        return JobRecord.model_validate(answer)

    async def park(self, job: str, *, reason: str = "") -> JobRecord:
        """Has a job give its slots back, at the end of the open step, and wait until `resume`.

        Raises `Conflict` for one that has not begun, or has ended.
        """
        answer = await self._door.ask("POST", f"/v1/jobs/{_safe(job)}/park", params={"reason": reason})
        return JobRecord.model_validate(answer)

    async def resume(self, job: str) -> JobRecord:
        """Has a parked job go on as soon as there is room. Raises `Conflict` for one that is not parked."""
        answer = await self._door.ask("POST", f"/v1/jobs/{_safe(job)}/resume")
        return JobRecord.model_validate(answer)

    # --- the mesh -------------------------------------------------------------------------------------------

    async def mesh(self) -> MeshStatus:
        """Services, nodes and jobs at a glance."""
        return MeshStatus.model_validate(await self._door.ask("GET", "/v1/mesh"))

    async def overview(self, parts: Sequence[str] = ()) -> dict[str, Any]:
        """What the dashboard shows (docs/dashboard.md), or these parts of it."""
        answer: dict[str, Any] = await self._door.ask("GET", "/v1/overview", params={"part": list(parts)})
        return answer

    async def tap_scope(self) -> TapScope:
        """Which messages of the bus this token's user may tap."""
        return TapScope.model_validate(await self._door.ask("GET", "/v1/tap/scope"))

    async def clusters(self) -> list[ClusterView]:
        """The clusters: who serves each, and how its instances are."""
        pages = self._door.pages("/v1/clusters", ClusterPage)
        return [view async for page in pages for view in page.clusters]

    async def cluster(self, cluster: str) -> ClusterView:
        """One of them. Raises `NotFound`."""
        return ClusterView.model_validate(await self._door.ask("GET", f"/v1/clusters/{_safe(cluster)}"))

    async def each_instance(
        self,
        *,
        job: str | None = None,
        cluster: str | None = None,
        stage: int | None = None,
        state: str | None = None,
    ) -> AsyncIterator[ServiceRecord]:
        """The registry's records of instances, by SID, fetched as they are needed."""
        wanted = {"job": job, "cluster": cluster, "stage": stage, "state": state}
        async for page in self._door.pages("/v1/instances", InstancePage, wanted):
            for record in page.instances:
                yield record

    async def instances(
        self,
        *,
        job: str | None = None,
        cluster: str | None = None,
        stage: int | None = None,
        state: str | None = None,
    ) -> list[ServiceRecord]:
        """All of them that fit."""
        found = self.each_instance(job=job, cluster=cluster, stage=stage, state=state)
        return [record async for record in found]

    async def instance(self, sid: str) -> ServiceRecord:
        """The registry's record of one instance or service. Raises `NotFound`."""
        return ServiceRecord.model_validate(await self._door.ask("GET", f"/v1/instances/{_safe(sid)}"))

    async def routes(self, *, job: str | None = None, cluster: str | None = None) -> list[RouteTable]:
        """The routers' tables: weighted next hops of each stage, for the senders of each cluster."""
        pages = self._door.pages("/v1/routes", RoutePage, {"job": job, "cluster": cluster})
        return [table async for page in pages for table in page.routes]

    async def nodes(self) -> list[NodeView]:
        """The node agents, their slots, and what is cordoned there."""
        return [view async for page in self._door.pages("/v1/nodes", NodePage) for view in page.nodes]

    async def node(self, node: str) -> NodeView:
        """One of them, by the SID of its agent. Raises `NotFound`."""
        return NodeView.model_validate(await self._door.ask("GET", f"/v1/nodes/{_safe(node)}"))

    async def cordon(self, node: str, slot: int | None = None, *, reason: str = "") -> Cordons:
        """No new instances on a node, or in one slot of it. What runs there goes on."""
        return await self._change_node(node, "cordon", slot=slot, reason=reason)

    async def uncordon(self, node: str, slot: int | None = None) -> Cordons:
        """New instances may go there again. Raises `NotFound` where nothing is cordoned."""
        return await self._change_node(node, "uncordon", slot=slot)

    async def drain(self, node: str, *, reason: str = "") -> Cordons:
        """Cordon a node and have its instances move elsewhere; `mesh().cordons` tells how far it is."""
        return await self._change_node(node, "drain", reason=reason)

    async def _change_node(self, node: str, action: str, **params: Any) -> Cordons:
        answer = await self._door.ask("POST", f"/v1/nodes/{_safe(node)}/{action}", params=params)
        return Cordons.model_validate(answer)

    # --- faults ---------------------------------------------------------------------------------------------

    async def each_fault(
        self, job: str | None = None, *, state: str | None = None
    ) -> AsyncIterator[FaultRecord]:
        """Each fault as it stands now, oldest first, fetched as they are needed."""
        async for page in self._door.pages("/v1/faults", FaultPage, {"job": job, "state": state}):
            for fault in page.faults:
                yield fault

    async def faults(self, job: str | None = None, *, state: str | None = None) -> list[FaultRecord]:
        """Each fault as it stands now, oldest first; of one job, or of the whole mesh."""
        return [fault async for fault in self.each_fault(job, state=state)]

    async def fault(self, fault: str) -> FaultRecord:
        """One of them. Raises `NotFound`."""
        return FaultRecord.model_validate(await self._door.ask("GET", f"/v1/faults/{_safe(fault)}"))

    async def follow_faults(self, job: str | None = None, *, start: int = 1) -> AsyncIterator[FaultRecord]:
        """Every record of the fault queue from stream position `start`, then live, without an end.

        Reconnects by itself (also to another gateway) where it left off; each record comes once.
        """
        params = {} if job is None else {"job": job}
        async with aclosing(self._door.follow("/v1/faults/events", FaultRecord, start, params)) as records:
            async for fault in records:
                yield fault

    async def strike(self, sid: str, fault: Fault, *, incarnation: str | None = None) -> Struck:
        """Bring a fault upon an instance, as an operator: see what the mesh makes of it in `faults`."""
        body = {"sid": sid, "fault": fault, "incarnation": incarnation}
        return Struck.model_validate(await self._door.ask("POST", "/v1/chaos/faults", body))

    async def tell_outside_fault(
        self, victim: str, fault: str, *, idempotency_key: str | None = None
    ) -> None:
        """Put on the audit stream, as an operator, that a process was struck without the mesh's help."""
        body = {"victim": victim, "fault": fault}
        await self._door.ask("POST", "/v1/chaos/outside", body, key=idempotency_key)

    # --- functional modules ---------------------------------------------------------------------------------

    async def promote_policy(self, module: str, version: str, *, reason: str = "") -> PolicySwitch:
        """Make a running version of a module the active one; the one that was goes on in shadow."""
        params = {"version": version, "reason": reason}
        answer = await self._door.ask("POST", f"/v1/policies/{_safe(module)}/promote", params=params)
        return PolicySwitch.model_validate(answer)

    async def roll_back_policy(self, module: str, *, reason: str = "") -> PolicySwitch:
        """Make the version active again that was before. Raises `Conflict` where nothing was promoted."""
        path = f"/v1/policies/{_safe(module)}/rollback"
        return PolicySwitch.model_validate(await self._door.ask("POST", path, params={"reason": reason}))

    async def policies(self) -> list[ModuleStatus]:
        """The functional modules that run, and how they fare, by name and version."""
        return [one async for page in self._door.pages("/v1/policies", PolicyPage) for one in page.modules]

    async def order_policy(
        self,
        module: str,
        op: str,
        *,
        version: str | None = None,
        jobs: Sequence[str] = (),
        reason: str = "",
    ) -> ModuleLifecycle:
        """Has a module do `op`: activate, shadow, drain, enable or disable (for `jobs`). Repeating is fine.

        Returns what it then is. Raises `NotFound` where it does not run, `Conflict` where it can't.
        """
        body = {"op": op, "version": version, "jobs": list(jobs), "reason": reason}
        answer = await self._door.ask("POST", f"/v1/policies/{_safe(module)}/orders", body)
        return ModuleLifecycle.model_validate(answer)

    async def ask_policy(
        self,
        module: str,
        job: str,
        *,
        version: str | None = None,
        inputs: Sequence[Observation] = (),
    ) -> ModuleAnswer:
        """What a module suggests for a job at this moment. Nothing of it is adopted."""
        given = [one.model_dump(mode="json") for one in inputs]
        body = {"job": job, "version": version, "inputs": given}
        answer = await self._door.ask("POST", f"/v1/policies/{_safe(module)}/questions", body)
        return ModuleAnswer.model_validate(answer)

    async def observe(self, *observations: Observation) -> None:
        """Tell functional modules what was seen outside the mesh."""
        given = [one.model_dump(mode="json", exclude={"user"}) for one in observations]
        await self._door.ask("POST", "/v1/observations", {"observations": given})

    # --- what happens to a job ------------------------------------------------------------------------------

    async def events(self, job: str, *, start: int = 1) -> AsyncIterator[JobEvent]:
        """What happened to a job from stream position `start`, then live, until it has ended.

        Reconnects by itself (also to another gateway) where it left off; each event comes once.
        """

        async def over() -> bool:
            return (await self.job(job)).state in ENDED

        path = f"/v1/jobs/{_safe(job)}/events"
        async with aclosing(self._door.follow(path, JobEvent, start, over=over)) as events:
            async for event in events:
                yield event
                if event.kind == "state" and event.state in ENDED:
                    return

    async def wait(self, job: str) -> JobRecord:
        """Until the job has ended; its last record. A failed job is not an error here: see `state`."""
        async for _ in self.events(job):
            pass
        return await self.job(job)

    # --- what a job leaves, and what it reads ---------------------------------------------------------------

    async def weights(self, job: str) -> WeightsManifest:
        """The manifest of a finished job's weights. Raises `NotFound` before that."""
        return WeightsManifest.model_validate(await self._door.ask("GET", f"/v1/jobs/{_safe(job)}/weights"))

    async def download_weights(
        self, job: str, folder: Path, *, progress: OnProgress | None = None
    ) -> WeightsManifest:
        """Fetch the safetensors shards and their index (Hugging Face layout) into `folder`.

        Raises `DmscError` if what arrived does not have the job's SHA-256.
        """
        manifest = await self.weights(job)
        for shard in door.shards(manifest):
            target = door.shard_path(folder, shard)
            with door.partial_file(target) as partial:
                await self._door.fetch(f"/v1/jobs/{_safe(job)}/weights/{shard}", partial, shard, progress)
        door.write_index(folder, manifest)
        await asyncio.to_thread(check_weights, folder, manifest)
        return manifest

    async def each_checkpoint(self, job: str) -> AsyncIterator[PublishedCheckpoint]:
        """The job's checkpoints that exist, the newest first, fetched as they are needed."""
        async for page in self._door.pages(f"/v1/jobs/{_safe(job)}/checkpoints", CheckpointPage):
            for one in page.checkpoints:
                yield one

    async def checkpoints(self, job: str) -> CheckpointList:
        """All of them."""
        return CheckpointList(checkpoints=tuple([one async for one in self.each_checkpoint(job)]))

    async def download_checkpoint(
        self, job: str, folder: Path, step: int | None = None, *, progress: OnProgress | None = None
    ) -> CheckpointManifest:
        """Fetch a checkpoint (docs/checkpoints.md) into `folder`: that of `step`, or the newest.

        Raises `DmscError` if there is none, or if what arrived does not have the manifest's SHA-256.
        """
        found = (await self.checkpoints(job)).checkpoints
        one = next((each for each in found if step in (None, each.manifest.version)), None)
        if one is None:
            there = ", ".join(str(each.manifest.version) for each in found) or "none"
            raise NotFound(f"{job} has no such checkpoint; those that exist are of step: {there}", job=job)
        path = f"/v1/jobs/{_safe(job)}/checkpoints/{one.name}"
        for name, file in one.manifest.files.items():
            target = door.file_below(folder, name)
            with door.partial_file(target) as partial:
                await self._door.fetch(f"{path}/{name}", partial, name, progress)
            await asyncio.to_thread(check_file, target, file)
        door.file_below(folder, MANIFEST_NAME).write_bytes(one.manifest.to_json())
        return one.manifest

    async def each_dataset(self) -> AsyncIterator[Dataset]:
        """The datasets on the bus, by name, fetched as they are needed."""
        async for page in self._door.pages("/v1/datasets", DatasetPage):
            for dataset in page.datasets:
                yield dataset

    async def datasets(self) -> list[Dataset]:
        """All of them."""
        return [dataset async for dataset in self.each_dataset()]

    async def upload_dataset(
        self, name: str, source: Path | bytes, *, progress: OnProgress | None = None
    ) -> Dataset:
        """Store a file or bytes as a dataset, which a job names as `data.source`."""
        answer = await self._door.send(f"/v1/datasets/{_safe(name)}", source, name, progress)
        return Dataset.model_validate(answer)

    async def download_dataset(self, name: str, file: Path, *, progress: OnProgress | None = None) -> Path:
        """Fetch a dataset into a file, which appears once it is whole."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with door.partial_file(file) as partial:
            await self._door.fetch(f"/v1/datasets/{_safe(name)}", partial, name, progress)
        return file

    async def delete_dataset(self, name: str) -> None:
        """Remove a dataset, as an operator. Raises `NotFound`."""
        await self._door.ask("DELETE", f"/v1/datasets/{_safe(name)}")


def _safe(name: str) -> str:
    """As one part of a path."""
    return quote(name, safe="")
