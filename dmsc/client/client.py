"""The synchronous client of a mesh's HTTP API: submits jobs, follows them, fetches weights.

    from dmsc import Client
    with Client() as client:                       # the mesh of ./.dmsc, or $DMSC_GATEWAY and $DMSC_TOKEN
        job = client.submit("examples/stdlib-gpt.yaml")
        print(client.wait(job.job).loss_last)

It raises the same errors as `dmsc.AsyncClient`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dmsc.client.async_client import AsyncClient, Fault, Job
from dmsc.client.gateway_requests import OnProgress
from dmsc.client.loop_thread import LoopThread
from schemas.checkpoint import CheckpointList, CheckpointManifest, PublishedCheckpoint
from schemas.cluster import Struck
from schemas.data_plane import RouteTable
from schemas.door import Cordons, JobLoad, MeshStatus, TapScope
from schemas.fault import FaultRecord
from schemas.job import JobEvent, JobRecord, WeightsManifest
from schemas.module_status import ModuleAnswer, ModuleStatus
from schemas.observation import Observation
from schemas.pages import ClusterView, Dataset, NodeView, Readiness
from schemas.policy import ModuleLifecycle, PolicySwitch
from schemas.registry import ServiceRecord


class Client:
    """The client for scripts and notebooks: `AsyncClient` without `await`.

    It runs an `AsyncClient` on its own thread, so it also works inside a running event loop (Jupyter). It
    takes the same arguments. Use it with `with`, or call `close()` at the end.
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
        self._client = AsyncClient(url, token=token, state=state, timeout_s=timeout_s, patience_s=patience_s)
        self._runner = LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. Closing twice is fine."""
        if self._runner.running:
            self._runner.call(self._client.close())
            self._runner.stop()

    def ready(self) -> Readiness:
        """Whether the gateway is ready, and what is missing if not."""
        return self._runner.call(self._client.ready())

    # --- jobs -----------------------------------------------------------------------------------------------

    def submit(self, job: Job, *, idempotency_key: str | None = None) -> JobRecord:
        """Queue a job and return its record, which has the job's id.

        If you pass your own `idempotency_key` and submit again after a crash, you get the same job.
        """
        return self._runner.call(self._client.submit(job, idempotency_key=idempotency_key))

    def each_job(self, *, state: str | None = None, user: str | None = None) -> Iterator[JobRecord]:
        """The mesh's jobs, oldest first, fetched page by page as needed."""
        return self._runner.iterate(self._client.each_job(state=state, user=user))

    def jobs(self, *, state: str | None = None, user: str | None = None) -> list[JobRecord]:
        """All jobs of the mesh, oldest first."""
        return self._runner.call(self._client.jobs(state=state, user=user))

    def job(self, job: str) -> JobRecord:
        """One job's record. Raises `NotFound`."""
        return self._runner.call(self._client.job(job))

    def load(self, job: str) -> JobLoad:
        """The present load of a job's instances: queue, milliseconds per microbatch, latency."""
        return self._runner.call(self._client.load(job))

    def scale(self, job: str, replicas: int, stage: int | None = None) -> str:
        """Set the number of working replicas of one stage, or of all; return what will happen, in words."""
        return self._runner.call(self._client.scale(job, replicas, stage))

    def move(self, job: str, sid: str, stage: int) -> str:
        """Move an instance to another stage at the end of the open step; return in words what will happen."""
        return self._runner.call(self._client.move(job, sid, stage))

    def cancel(self, job: str, *, reason: str = "") -> JobRecord:
        """Request the cancellation of a job; the mesh stops its instances and cleans up."""
        return self._runner.call(self._client.cancel(job, reason=reason))

    def park(self, job: str, *, reason: str = "") -> JobRecord:
        """Pause a job at the end of its open step and free its slots, until `resume`.

        Raises `Conflict` if the job has not begun or has ended.
        """
        return self._runner.call(self._client.park(job, reason=reason))

    def resume(self, job: str) -> JobRecord:
        """Continue a parked job as soon as slots are free. Raises `Conflict` if it is not parked."""
        return self._runner.call(self._client.resume(job))

    # --- the mesh -------------------------------------------------------------------------------------------

    def mesh(self) -> MeshStatus:
        """An overview of services, nodes and jobs."""
        return self._runner.call(self._client.mesh())

    def overview(self, parts: Sequence[str] = ()) -> dict[str, Any]:
        """What the dashboard shows (docs/dashboard.md), or these parts of it."""
        return self._runner.call(self._client.overview(parts))

    def tap_scope(self) -> TapScope:
        """The messages of the bus that this token's user may tap."""
        return self._runner.call(self._client.tap_scope())

    def clusters(self) -> list[ClusterView]:
        """The clusters, each with its services and the states of its instances."""
        return self._runner.call(self._client.clusters())

    def cluster(self, cluster: str) -> ClusterView:
        """One cluster. Raises `NotFound`."""
        return self._runner.call(self._client.cluster(cluster))

    def each_instance(
        self,
        *,
        job: str | None = None,
        cluster: str | None = None,
        stage: int | None = None,
        state: str | None = None,
    ) -> Iterator[ServiceRecord]:
        """The registry's records of instances, by SID, fetched page by page as needed."""
        return self._runner.iterate(
            self._client.each_instance(job=job, cluster=cluster, stage=stage, state=state)
        )

    def instances(
        self,
        *,
        job: str | None = None,
        cluster: str | None = None,
        stage: int | None = None,
        state: str | None = None,
    ) -> list[ServiceRecord]:
        """All matching records of instances, by SID."""
        return self._runner.call(self._client.instances(job=job, cluster=cluster, stage=stage, state=state))

    def instance(self, sid: str) -> ServiceRecord:
        """The registry's record of one instance or service. Raises `NotFound`."""
        return self._runner.call(self._client.instance(sid))

    def routes(self, *, job: str | None = None, cluster: str | None = None) -> list[RouteTable]:
        """The routers' tables: the weighted next hops of each stage, for senders of each cluster."""
        return self._runner.call(self._client.routes(job=job, cluster=cluster))

    def nodes(self) -> list[NodeView]:
        """The nodes, with their slots and cordons."""
        return self._runner.call(self._client.nodes())

    def node(self, node: str) -> NodeView:
        """One node, by the SID of its agent. Raises `NotFound`."""
        return self._runner.call(self._client.node(node))

    def cordon(self, node: str, slot: int | None = None, *, reason: str = "") -> Cordons:
        """Place no new instances on a node, or in one of its slots; instances that run there continue."""
        return self._runner.call(self._client.cordon(node, slot, reason=reason))

    def uncordon(self, node: str, slot: int | None = None) -> Cordons:
        """Allow new instances on a node or slot again. Raises `NotFound` if it is not cordoned."""
        return self._runner.call(self._client.uncordon(node, slot))

    def drain(self, node: str, *, reason: str = "") -> Cordons:
        """Cordon a node and move its instances to other nodes; `mesh().cordons` shows the progress."""
        return self._runner.call(self._client.drain(node, reason=reason))

    # --- faults ---------------------------------------------------------------------------------------------

    def each_fault(self, job: str | None = None, *, state: str | None = None) -> Iterator[FaultRecord]:
        """Each fault's latest record, oldest fault first, fetched page by page as needed."""
        return self._runner.iterate(self._client.each_fault(job, state=state))

    def faults(self, job: str | None = None, *, state: str | None = None) -> list[FaultRecord]:
        """Each fault's latest record, oldest fault first; of one job, or of the whole mesh."""
        return self._runner.call(self._client.faults(job, state=state))

    def fault(self, fault: str) -> FaultRecord:
        """One fault's latest record. Raises `NotFound`."""
        return self._runner.call(self._client.fault(fault))

    def follow_faults(self, job: str | None = None, *, start: int = 1) -> Iterator[FaultRecord]:
        """The records of the fault queue from stream position `start`, then live, without an end."""
        return self._runner.iterate(self._client.follow_faults(job, start=start))

    def strike(self, sid: str, fault: Fault, *, incarnation: str | None = None) -> Struck:
        """Inject a fault into an instance, as an operator; `faults` shows how the mesh handles it."""
        return self._runner.call(self._client.strike(sid, fault, incarnation=incarnation))

    def tell_outside_fault(self, victim: str, fault: str, *, idempotency_key: str | None = None) -> None:
        """Record on the audit stream, as an operator, that a fault was injected from outside the mesh."""
        request = self._client.tell_outside_fault(victim, fault, idempotency_key=idempotency_key)
        return self._runner.call(request)

    # --- functional modules ---------------------------------------------------------------------------------

    def promote_policy(self, module: str, version: str, *, reason: str = "") -> PolicySwitch:
        """Make a running version of a module the active one; the former one continues in shadow."""
        return self._runner.call(self._client.promote_policy(module, version, reason=reason))

    def roll_back_policy(self, module: str, *, reason: str = "") -> PolicySwitch:
        """Make the previously active version active again. Raises `Conflict` if nothing was promoted."""
        return self._runner.call(self._client.roll_back_policy(module, reason=reason))

    def policies(self) -> list[ModuleStatus]:
        """The running functional modules with their states and counts, by name and version."""
        return self._runner.call(self._client.policies())

    def order_policy(
        self, module: str, op: str, *, version: str | None = None, jobs: Sequence[str] = (), reason: str = ""
    ) -> ModuleLifecycle:
        """Order a module to activate, shadow, drain, enable or disable (the latter two for `jobs`)."""
        return self._runner.call(
            self._client.order_policy(module, op, version=version, jobs=jobs, reason=reason)
        )

    def ask_policy(
        self, module: str, job: str, *, version: str | None = None, inputs: Sequence[Observation] = ()
    ) -> ModuleAnswer:
        """Ask a module what it would suggest for a job now. The answer is not adopted."""
        return self._runner.call(self._client.ask_policy(module, job, version=version, inputs=inputs))

    def observe(self, *observations: Observation) -> None:
        """Send observations from outside the mesh to functional modules."""
        self._runner.call(self._client.observe(*observations))

    # --- what happens to a job ------------------------------------------------------------------------------

    def events(self, job: str, *, start: int = 1) -> Iterator[JobEvent]:
        """The events of a job from stream position `start`, then live, until the job has ended."""
        return self._runner.iterate(self._client.events(job, start=start))

    def wait(self, job: str, *, timeout_s: float | None = None) -> JobRecord:
        """Wait until the job has ended; return its last record.

        Raises `DeadlineExceeded` after `timeout_s`. A failed job raises nothing: see `state`.
        """
        return self._runner.call(self._client.wait(job), timeout_s=timeout_s)

    # --- what a job leaves, and what it reads ---------------------------------------------------------------

    def weights(self, job: str) -> WeightsManifest:
        """The manifest of a finished job's weights. Raises `NotFound` before that."""
        return self._runner.call(self._client.weights(job))

    def download_weights(
        self, job: str, folder: Path, *, progress: OnProgress | None = None
    ) -> WeightsManifest:
        """Fetch the safetensors shards and their index (Hugging Face layout) into `folder`."""
        return self._runner.call(self._client.download_weights(job, folder, progress=progress))

    def each_checkpoint(self, job: str) -> Iterator[PublishedCheckpoint]:
        """The job's existing checkpoints, newest first, fetched page by page as needed."""
        return self._runner.iterate(self._client.each_checkpoint(job))

    def checkpoints(self, job: str) -> CheckpointList:
        """All existing checkpoints of a job, newest first."""
        return self._runner.call(self._client.checkpoints(job))

    def download_checkpoint(
        self, job: str, folder: Path, step: int | None = None, *, progress: OnProgress | None = None
    ) -> CheckpointManifest:
        """Fetch a checkpoint (docs/checkpoints.md) into `folder`: the one of `step`, or the newest."""
        return self._runner.call(self._client.download_checkpoint(job, folder, step, progress=progress))

    def each_dataset(self) -> Iterator[Dataset]:
        """The datasets on the bus, by name, fetched page by page as needed."""
        return self._runner.iterate(self._client.each_dataset())

    def datasets(self) -> list[Dataset]:
        """All datasets on the bus, by name."""
        return self._runner.call(self._client.datasets())

    def upload_dataset(
        self, name: str, source: Path | bytes, *, progress: OnProgress | None = None
    ) -> Dataset:
        """Store a file or bytes as a dataset, which a job can name as `data.source`."""
        return self._runner.call(self._client.upload_dataset(name, source, progress=progress))

    def download_dataset(self, name: str, file: Path, *, progress: OnProgress | None = None) -> Path:
        """Fetch a dataset into a file, which appears only when it is complete."""
        return self._runner.call(self._client.download_dataset(name, file, progress=progress))

    def delete_dataset(self, name: str) -> None:
        """Remove a dataset, as an operator. Raises `NotFound`."""
        self._runner.call(self._client.delete_dataset(name))
