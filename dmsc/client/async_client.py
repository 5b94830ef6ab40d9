"""The asyncio client of a mesh's HTTP API. The commands use it, and `dmsc.Client` runs it on a thread.

Every method raises the errors of `schemas.errors`: `Refused`, `NotFound`, `BadInput`, `Unavailable`…
If a gateway does not answer, the next one is asked, if the mesh has several. A request that must not happen
twice carries an idempotency key, so that it can be repeated safely (docs/gateway.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from dmsc.authoring.code_folder import PackedCode
from dmsc.client import http_protocol
from dmsc.client.calls.access_calls import AccessCalls, segment
from dmsc.client.calls.account_calls import AccountCalls
from dmsc.client.calls.array_calls import ArrayCalls
from dmsc.client.calls.backflow_calls import BackflowCalls
from dmsc.client.calls.batch_calls import BatchCalls
from dmsc.client.calls.code_calls import JOBS
from dmsc.client.calls.generation_calls import GenerationCalls
from dmsc.client.calls.machine_calls import MachineCalls
from dmsc.client.calls.model_calls import ModelCalls
from dmsc.client.calls.policy_calls import PolicyCalls
from dmsc.client.calls.service_calls import ServiceCalls
from dmsc.client.calls.shape_calls import ShapeCalls
from dmsc.client.calls.train_calls import TrainCalls
from dmsc.client.data.data_calls import DataCalls
from dmsc.client.data.feed_calls import FeedCalls
from dmsc.client.gateway_requests import Gateways, OnProgress
from dmsc.client.weights_check import check_file, check_weights
from dmsc.state.settings import find_gateway
from schemas.checkpoint import MANIFEST_NAME, CheckpointList, CheckpointManifest, PublishedCheckpoint
from schemas.cluster import LeaveSource, Struck
from schemas.curve import StepCurve
from schemas.data_plane import RouteTable
from schemas.errors import BadJob, NotFound, Unavailable
from schemas.fault import FaultRecord
from schemas.gateway_api import Cordons, JobLoad, MeshStatus, TapScope
from schemas.job import ENDED, JobEvent, JobRecord, JobSpec, WeightsManifest
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
    Readiness,
    RoutePage,
)
from schemas.plans import PlanBody, PlanMade
from schemas.queue import QueueStatus, Reservations, ReservationSpec, SlotsReserved
from schemas.registry import ServiceRecord
from schemas.usage import Prices

Job = str | Path | Mapping[str, Any] | JobSpec
"""A job to submit: the path of a job file, a mapping, or a `JobSpec`."""

Fault = Literal["kill", "freeze", "resume"]


class AsyncClient(
    ArrayCalls,
    TrainCalls,
    ShapeCalls,
    DataCalls,
    ServiceCalls,
    GenerationCalls,
    BackflowCalls,
    BatchCalls,
    AccessCalls,
    FeedCalls,
    PolicyCalls,
    AccountCalls,
    ModelCalls,
    MachineCalls,
):
    """Sends requests to a mesh's gateways from a coroutine; use it with `async with`.

    Args:
        url: One or several gateways. Default: `$DMSC_GATEWAY`, then the mesh of the state folder.
        token: The user's token. Default: `$DMSC_TOKEN`, then the state folder's.
        state: The state folder. Default: `$DMSC_STATE` or `.dmsc`.
        timeout_s: How long one request may take.
        patience_s: How long the client reconnects a broken event stream, and repeats requests to a gateway
            that is too busy (429, 503), before it raises `Unavailable`.
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
        self._gateways = Gateways(address.urls, address.token, timeout_s=timeout_s, patience_s=patience_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._gateways.close()

    async def ready(self) -> Readiness:
        """Whether the gateway is ready, and what is missing if not."""
        try:
            return await self._get(Readiness, "/readyz")
        except Unavailable as error:
            return Readiness(ready=False, waiting=error.fields.get("waiting", {"gateway": error.text}))

    # --- jobs -----------------------------------------------------------------------------------------------

    async def submit(
        self, job: Job, *, idempotency_key: str | None = None, code: PackedCode | None = None
    ) -> JobRecord:
        """Queue a job and return its record, which has the job's id.

        The folder that it names as `code` is uploaded first, unless the mesh has it already. `code` is that
        folder as it was packed before, for jobs that must all have the same. If you pass your own
        `idempotency_key` and submit again after a crash, you get the same job.
        """
        document = http_protocol.as_spec(job)
        if document["array"] is not None:
            raise BadJob("array: this file stands for many jobs; submit_array takes it")
        return await self._submit_with_code(JobRecord, JOBS, document, idempotency_key, code)

    async def each_job(
        self, *, state: str | None = None, user: str | None = None
    ) -> AsyncIterator[JobRecord]:
        """The mesh's jobs, oldest first, fetched page by page as needed."""
        async for page in self._gateways.pages("/v1/jobs", JobPage, {"state": state, "user": user}):
            for record in page.jobs:
                yield record

    async def jobs(self, *, state: str | None = None, user: str | None = None) -> list[JobRecord]:
        """All jobs of the mesh, oldest first."""
        return [record async for record in self.each_job(state=state, user=user)]

    async def job(self, job: str) -> JobRecord:
        """One job's record. Raises `NotFound`."""
        return await self._get(JobRecord, f"/v1/jobs/{segment(job)}")

    async def load(self, job: str) -> JobLoad:
        """The present load of a job's instances: queue, milliseconds per microbatch, latency."""
        return await self._get(JobLoad, f"/v1/jobs/{segment(job)}/load")

    async def cancel(self, job: str, *, reason: str = "") -> JobRecord:
        """Request the cancellation of a job; the mesh stops its instances and cleans up."""
        return await self._post(JobRecord, f"/v1/jobs/{segment(job)}/cancel", reason=reason)

    async def park(self, job: str, *, reason: str = "") -> JobRecord:
        """Pause a job at the end of its open step, or hold a waiting one; raises `Conflict` if it ended."""
        return await self._post(JobRecord, f"/v1/jobs/{segment(job)}/park", reason=reason)

    async def resume(self, job: str, *, stages: int | None = None, replicas: int | None = None) -> JobRecord:
        """Continue a parked job as soon as slots are free; with another shape, to the same bits.

        Raises `Conflict` if it is not parked.
        """
        path = f"/v1/jobs/{segment(job)}/resume"
        return await self._post(JobRecord, path, stages=stages, replicas=replicas)

    async def prioritise(self, job: str, priority: int) -> JobRecord:
        """Give a job another class of priority in the queue; raises `Conflict` if it has ended."""
        return await self._post(JobRecord, f"/v1/jobs/{segment(job)}/prioritise", priority=priority)

    # --- the mesh -------------------------------------------------------------------------------------------

    async def plan(self, question: PlanBody) -> PlanMade:
        """What a job would get on the mesh's slots, and what a step would take; nothing is started.

        Without `model` and `like` a node measures the model, which may take longer than `timeout_s`.
        """
        return await self._gateways.ask_for(
            PlanMade, "POST", "/v1/plans", question.model_dump(mode="json", exclude_unset=True)
        )

    async def queue(self, job: str | None = None) -> QueueStatus:
        """The waiting jobs in order; of one also its expected start. Raises `Conflict` if it runs."""
        return await self._get(QueueStatus, "/v1/queue" if job is None else f"/v1/queue/{segment(job)}")

    async def reserve(self, spec: ReservationSpec) -> list[SlotsReserved]:
        """Keep slots from one time until another; returns all reservations.

        Raises `Conflict` if too many of them are kept for others at that time.
        """
        body = spec.model_dump(mode="json")
        return list((await self._post(Reservations, "/v1/queue/reservations", body)).reservations)

    async def reservations(self) -> list[SlotsReserved]:
        """The reservations that have not ended, by their start."""
        return list((await self._get(Reservations, "/v1/queue/reservations")).reservations)

    async def cancel_reservation(self, name: str) -> list[SlotsReserved]:
        """Cancel a reservation; returns those that are left."""
        path = f"/v1/queue/reservations/{segment(name)}"
        return list((await self._gateways.ask_for(Reservations, "DELETE", path)).reservations)

    async def mesh(self) -> MeshStatus:
        """An overview of services, nodes and jobs."""
        return await self._get(MeshStatus, "/v1/mesh")

    async def overview(self, parts: Sequence[str] = ()) -> dict[str, Any]:
        """What the dashboard shows (docs/dashboard.md), or these parts of it."""
        answer: dict[str, Any] = await self._gateways.ask("GET", "/v1/overview", params={"part": list(parts)})
        return answer

    async def tap_scope(self) -> TapScope:
        """The messages of the bus that this token's user may tap."""
        return await self._get(TapScope, "/v1/tap/scope")

    async def clusters(self) -> list[ClusterView]:
        """The clusters, each with its services and the states of its instances."""
        pages = self._gateways.pages("/v1/clusters", ClusterPage)
        return [view async for page in pages for view in page.clusters]

    async def cluster(self, cluster: str) -> ClusterView:
        """One cluster. Raises `NotFound`."""
        return await self._get(ClusterView, f"/v1/clusters/{segment(cluster)}")

    async def each_instance(
        self,
        *,
        job: str | None = None,
        cluster: str | None = None,
        stage: int | None = None,
        state: str | None = None,
    ) -> AsyncIterator[ServiceRecord]:
        """The registry's records of instances, by SID, fetched page by page as needed."""
        query = {"job": job, "cluster": cluster, "stage": stage, "state": state}
        async for page in self._gateways.pages("/v1/instances", InstancePage, query):
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
        """All matching records of instances, by SID."""
        records = self.each_instance(job=job, cluster=cluster, stage=stage, state=state)
        return [record async for record in records]

    async def instance(self, sid: str) -> ServiceRecord:
        """The registry's record of one instance or service. Raises `NotFound`."""
        return await self._get(ServiceRecord, f"/v1/instances/{segment(sid)}")

    async def routes(self, *, job: str | None = None, cluster: str | None = None) -> list[RouteTable]:
        """The routers' tables: the weighted next hops of each stage, for senders of each cluster."""
        pages = self._gateways.pages("/v1/routes", RoutePage, {"job": job, "cluster": cluster})
        return [table async for page in pages for table in page.routes]

    async def nodes(self) -> list[NodeView]:
        """The nodes, with their slots and cordons."""
        return [view async for page in self._gateways.pages("/v1/nodes", NodePage) for view in page.nodes]

    async def node(self, node: str) -> NodeView:
        """One node, by the SID of its agent. Raises `NotFound`."""
        return await self._get(NodeView, f"/v1/nodes/{segment(node)}")

    async def cordon(self, node: str, slot: int | None = None, *, reason: str = "") -> Cordons:
        """Place no new instances on a node, or in one of its slots; instances that run there continue."""
        return await self._change_node(node, "cordon", slot=slot, reason=reason)

    async def uncordon(self, node: str, slot: int | None = None) -> Cordons:
        """Allow new instances on a node or slot again. Raises `NotFound` if it is not cordoned."""
        return await self._change_node(node, "uncordon", slot=slot)

    async def drain(self, node: str, *, reason: str = "") -> Cordons:
        """Cordon a node and move its instances to other nodes; `mesh().cordons` shows the progress."""
        return await self._change_node(node, "drain", reason=reason)

    async def leave(
        self, node: str, *, deadline_s: float = 30.0, source: LeaveSource = "person", reason: str = ""
    ) -> Cordons:
        """Have a node leave: its instances move to others within so many seconds, then its agent ends.

        `source`: who says that its machine goes away. `mesh().cordons` shows the progress.
        """
        return await self._change_node(node, "leave", deadline_s=deadline_s, source=source, reason=reason)

    async def _change_node(self, node: str, action: str, **params: Any) -> Cordons:
        return await self._post(Cordons, f"/v1/nodes/{segment(node)}/{action}", **params)

    # --- faults ---------------------------------------------------------------------------------------------

    async def each_fault(
        self, job: str | None = None, *, state: str | None = None
    ) -> AsyncIterator[FaultRecord]:
        """Each fault's latest record, oldest fault first, fetched page by page as needed."""
        async for page in self._gateways.pages("/v1/faults", FaultPage, {"job": job, "state": state}):
            for fault in page.faults:
                yield fault

    async def faults(self, job: str | None = None, *, state: str | None = None) -> list[FaultRecord]:
        """Each fault's latest record, oldest fault first; of one job, or of the whole mesh."""
        return [fault async for fault in self.each_fault(job, state=state)]

    async def fault(self, fault: str) -> FaultRecord:
        """One fault's latest record. Raises `NotFound`."""
        return await self._get(FaultRecord, f"/v1/faults/{segment(fault)}")

    async def follow_faults(self, job: str | None = None, *, start: int = 1) -> AsyncIterator[FaultRecord]:
        """The records of the fault queue from stream position `start`, then live, without an end.

        It reconnects by itself (also to another gateway) and continues; each record comes once.
        """
        params = {} if job is None else {"job": job}
        async with aclosing(
            self._gateways.follow("/v1/faults/events", FaultRecord, start, params)
        ) as records:
            async for fault in records:
                yield fault

    async def strike(self, sid: str, fault: Fault, *, incarnation: str | None = None) -> Struck:
        """Inject a fault into an instance, as an operator; `faults` shows how the mesh handles it."""
        body = {"sid": sid, "fault": fault, "incarnation": incarnation}
        return await self._post(Struck, "/v1/chaos/faults", body)

    async def tell_outside_fault(
        self, victim: str, fault: str, *, idempotency_key: str | None = None
    ) -> None:
        """Record on the audit stream, as an operator, that a fault was injected from outside the mesh."""
        body = {"victim": victim, "fault": fault}
        await self._gateways.ask("POST", "/v1/chaos/outside", body, key=idempotency_key)

    # --- what happens to a job ------------------------------------------------------------------------------

    async def events(self, job: str, *, start: int = 1) -> AsyncIterator[JobEvent]:
        """The events of a job from stream position `start`, then live, until the job has ended.

        It reconnects by itself (also to another gateway) and continues; each event comes once.
        """

        async def has_ended() -> bool:
            return (await self.job(job)).state in ENDED

        path = f"/v1/jobs/{segment(job)}/events"
        async with aclosing(self._gateways.follow(path, JobEvent, start, over=has_ended)) as events:
            async for event in events:
                yield event
                if event.kind == "state" and event.state in ENDED:
                    return

    async def curve(self, job: str, *, start: int = 1, points: int = 2_000) -> StepCurve:
        """Losses, validations and other figures of a job by step, from stream position `start`.

        `start` is `next` of an earlier answer. A long curve is thinned to about `points` steps.
        """
        query = {"start": start, "points": points}
        return await self._gateways.ask_for(StepCurve, "GET", f"/v1/jobs/{segment(job)}/curve", params=query)

    async def prices(self) -> Prices:
        """What a slot-hour and a kilowatt-hour cost at this mesh."""
        return await self._get(Prices, "/v1/prices")

    async def wait(self, job: str) -> JobRecord:
        """Wait until the job has ended; return its last record. A failed job raises nothing: see `state`."""
        async for _ in self.events(job):
            pass
        return await self.job(job)

    # --- what a job leaves, and what it reads ---------------------------------------------------------------

    async def weights(self, job: str) -> WeightsManifest:
        """The manifest of a finished job's weights. Raises `NotFound` before that."""
        return await self._get(WeightsManifest, f"/v1/jobs/{segment(job)}/weights")

    async def download_weights(
        self, job: str, folder: Path, *, progress: OnProgress | None = None
    ) -> WeightsManifest:
        """Fetch the safetensors shards and their index (Hugging Face layout) into `folder`.

        Raises `DmscError` if the files do not have the SHA-256 of the job's manifest.
        """
        manifest = await self.weights(job)
        for shard in http_protocol.shards(manifest):
            target = http_protocol.shard_path(folder, shard)
            with http_protocol.partial_file(target) as partial:
                await self._gateways.fetch(
                    f"/v1/jobs/{segment(job)}/weights/{shard}", partial, shard, progress
                )
        http_protocol.write_index(folder, manifest)
        await asyncio.to_thread(check_weights, folder, manifest)
        return manifest

    async def each_checkpoint(self, job: str) -> AsyncIterator[PublishedCheckpoint]:
        """The job's existing checkpoints, newest first, fetched page by page as needed."""
        async for page in self._gateways.pages(f"/v1/jobs/{segment(job)}/checkpoints", CheckpointPage):
            for checkpoint in page.checkpoints:
                yield checkpoint

    async def checkpoints(self, job: str) -> CheckpointList:
        """All existing checkpoints of a job, newest first."""
        return CheckpointList(
            checkpoints=tuple([checkpoint async for checkpoint in self.each_checkpoint(job)])
        )

    async def download_checkpoint(
        self, job: str, folder: Path, step: int | None = None, *, progress: OnProgress | None = None
    ) -> CheckpointManifest:
        """Fetch a checkpoint (docs/checkpoints.md) into `folder`: the one of `step`, or the newest.

        Raises `DmscError` if there is none, or if the files do not have the SHA-256 of the manifest.
        """
        existing = (await self.checkpoints(job)).checkpoints
        chosen = next(
            (checkpoint for checkpoint in existing if step in (None, checkpoint.manifest.version)), None
        )
        if chosen is None:
            steps = ", ".join(str(checkpoint.manifest.version) for checkpoint in existing) or "none"
            raise NotFound(f"{job} has no such checkpoint; those that exist are of step: {steps}", job=job)
        path = f"/v1/jobs/{segment(job)}/checkpoints/{chosen.name}"
        for name, file in chosen.manifest.files.items():
            target = http_protocol.file_below(folder, name)
            with http_protocol.partial_file(target) as partial:
                await self._gateways.fetch(f"{path}/{name}", partial, name, progress)
            await asyncio.to_thread(check_file, target, file)
        http_protocol.file_below(folder, MANIFEST_NAME).write_bytes(chosen.manifest.to_json())
        return chosen.manifest

    async def each_dataset(self) -> AsyncIterator[Dataset]:
        """The datasets on the bus, by name, fetched page by page as needed."""
        async for page in self._gateways.pages("/v1/datasets", DatasetPage):
            for dataset in page.datasets:
                yield dataset

    async def datasets(self) -> list[Dataset]:
        """All datasets on the bus, by name."""
        return [dataset async for dataset in self.each_dataset()]

    async def upload_dataset(
        self, name: str, source: Path | bytes, *, progress: OnProgress | None = None
    ) -> Dataset:
        """Store a file or bytes as a dataset, which a job can name as `data.source`."""
        answer = await self._gateways.send(f"/v1/datasets/{segment(name)}", source, name, progress)
        return Dataset.model_validate(answer)

    async def download_dataset(self, name: str, file: Path, *, progress: OnProgress | None = None) -> Path:
        """Fetch a dataset into a file, which appears only when it is complete."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with http_protocol.partial_file(file) as partial:
            await self._gateways.fetch(f"/v1/datasets/{segment(name)}", partial, name, progress)
        return file

    async def delete_dataset(self, name: str) -> None:
        """Remove a dataset, as an operator. Raises `NotFound`."""
        await self._gateways.ask("DELETE", f"/v1/datasets/{segment(name)}")
