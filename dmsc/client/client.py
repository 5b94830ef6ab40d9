"""The client of a mesh's outer door: submit jobs, follow them, fetch weights.

    from dmsc import Client
    with Client() as client:                       # the mesh of ./.dmsc, or $DMSC_GATEWAY and $DMSC_TOKEN
        job = client.submit("examples/stdlib-gpt.yaml")
        print(client.wait(job.job).loss_last)

It raises what `dmsc.AsyncClient` raises.
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
    """The same for scripts and notebooks, without `await`; also inside a running event loop (Jupyter).

    It runs an `AsyncClient` on a thread of its own. Arguments as there; use it with `with`, or `close()` it.
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
        """Twice is fine."""
        if self._runner.running:
            self._runner.call(self._client.close())
            self._runner.stop()

    def ready(self) -> Readiness:
        """Whether the gateway that is asked could answer, and what is missing if not."""
        return self._runner.call(self._client.ready())

    # --- jobs -----------------------------------------------------------------------------------------------

    def submit(self, job: Job, *, idempotency_key: str | None = None) -> JobRecord:
        """Queue a job; returns its record with the id that it was given.

        With an `idempotency_key` of your own, the same submission after a crash of yours is the same job.
        """
        return self._runner.call(self._client.submit(job, idempotency_key=idempotency_key))

    def each_job(self, *, state: str | None = None, user: str | None = None) -> Iterator[JobRecord]:
        """The mesh's jobs, oldest first, fetched as they are needed."""
        return self._runner.iterate(self._client.each_job(state=state, user=user))

    def jobs(self, *, state: str | None = None, user: str | None = None) -> list[JobRecord]:
        """All jobs of the mesh, oldest first."""
        return self._runner.call(self._client.jobs(state=state, user=user))

    def job(self, job: str) -> JobRecord:
        """One job's record. Raises `NotFound`."""
        return self._runner.call(self._client.job(job))

    def load(self, job: str) -> JobLoad:
        """How its instances are doing at this moment: queue, milliseconds per microbatch, latency."""
        return self._runner.call(self._client.load(job))

    def scale(self, job: str, replicas: int, stage: int | None = None) -> str:
        """Gives one stage, or all, this many working replicas; returns what will happen."""
        return self._runner.call(self._client.scale(job, replicas, stage))

    def move(self, job: str, sid: str, stage: int) -> str:
        """Has an instance change its stage at the end of the open step; returns what will happen."""
        return self._runner.call(self._client.move(job, sid, stage))

    def cancel(self, job: str, *, reason: str = "") -> JobRecord:
        """Ask for the end of a job; it is told, and cleaned up after."""
        return self._runner.call(self._client.cancel(job, reason=reason))

    def park(self, job: str, *, reason: str = "") -> JobRecord:
        """Has a job give its slots back, at the end of the open step, and wait until `resume`.

        Raises `Conflict` for one that has not begun, or has ended.
        """
        return self._runner.call(self._client.park(job, reason=reason))

    def resume(self, job: str) -> JobRecord:
        """Has a parked job go on as soon as there is room. Raises `Conflict` for one that is not parked."""
        return self._runner.call(self._client.resume(job))

    # --- the mesh -------------------------------------------------------------------------------------------

    def mesh(self) -> MeshStatus:
        """Services, nodes and jobs at a glance."""
        return self._runner.call(self._client.mesh())

    def overview(self, parts: Sequence[str] = ()) -> dict[str, Any]:
        """What the dashboard shows (docs/dashboard.md), or these parts of it."""
        return self._runner.call(self._client.overview(parts))

    def tap_scope(self) -> TapScope:
        """Which messages of the bus this token's user may tap."""
        return self._runner.call(self._client.tap_scope())

    def clusters(self) -> list[ClusterView]:
        """The clusters: who serves each, and how its instances are."""
        return self._runner.call(self._client.clusters())

    def cluster(self, cluster: str) -> ClusterView:
        """One of them. Raises `NotFound`."""
        return self._runner.call(self._client.cluster(cluster))

    def each_instance(
        self,
        *,
        job: str | None = None,
        cluster: str | None = None,
        stage: int | None = None,
        state: str | None = None,
    ) -> Iterator[ServiceRecord]:
        """The registry's records of instances, by SID, fetched as they are needed."""
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
        """All of them that fit."""
        return self._runner.call(self._client.instances(job=job, cluster=cluster, stage=stage, state=state))

    def instance(self, sid: str) -> ServiceRecord:
        """The registry's record of one instance or service. Raises `NotFound`."""
        return self._runner.call(self._client.instance(sid))

    def routes(self, *, job: str | None = None, cluster: str | None = None) -> list[RouteTable]:
        """The routers' tables: weighted next hops of each stage, for the senders of each cluster."""
        return self._runner.call(self._client.routes(job=job, cluster=cluster))

    def nodes(self) -> list[NodeView]:
        """The node agents, their slots, and what is cordoned there."""
        return self._runner.call(self._client.nodes())

    def node(self, node: str) -> NodeView:
        """One of them, by the SID of its agent. Raises `NotFound`."""
        return self._runner.call(self._client.node(node))

    def cordon(self, node: str, slot: int | None = None, *, reason: str = "") -> Cordons:
        """No new instances on a node, or in one slot of it. What runs there goes on."""
        return self._runner.call(self._client.cordon(node, slot, reason=reason))

    def uncordon(self, node: str, slot: int | None = None) -> Cordons:
        """New instances may go there again. Raises `NotFound` where nothing is cordoned."""
        return self._runner.call(self._client.uncordon(node, slot))

    def drain(self, node: str, *, reason: str = "") -> Cordons:
        """Cordon a node and have its instances move elsewhere; `mesh().cordons` tells how far it is."""
        return self._runner.call(self._client.drain(node, reason=reason))

    # --- faults ---------------------------------------------------------------------------------------------

    def each_fault(self, job: str | None = None, *, state: str | None = None) -> Iterator[FaultRecord]:
        """Each fault as it stands now, oldest first, fetched as they are needed."""
        return self._runner.iterate(self._client.each_fault(job, state=state))

    def faults(self, job: str | None = None, *, state: str | None = None) -> list[FaultRecord]:
        """Each fault as it stands now, oldest first; of one job, or of the whole mesh."""
        return self._runner.call(self._client.faults(job, state=state))

    def fault(self, fault: str) -> FaultRecord:
        """One of them. Raises `NotFound`."""
        return self._runner.call(self._client.fault(fault))

    def follow_faults(self, job: str | None = None, *, start: int = 1) -> Iterator[FaultRecord]:
        """Every record of the fault queue from stream position `start`, then live, without an end."""
        return self._runner.iterate(self._client.follow_faults(job, start=start))

    def strike(self, sid: str, fault: Fault, *, incarnation: str | None = None) -> Struck:
        """Bring a fault upon an instance, as an operator: see what the mesh makes of it in `faults`."""
        return self._runner.call(self._client.strike(sid, fault, incarnation=incarnation))

    def tell_outside_fault(self, victim: str, fault: str, *, idempotency_key: str | None = None) -> None:
        """Put on the audit stream, as an operator, that a process was struck without the mesh's help."""
        told = self._client.tell_outside_fault(victim, fault, idempotency_key=idempotency_key)
        return self._runner.call(told)

    # --- functional modules ---------------------------------------------------------------------------------

    def promote_policy(self, module: str, version: str, *, reason: str = "") -> PolicySwitch:
        """Make a running version of a module the active one; the one that was goes on in shadow."""
        return self._runner.call(self._client.promote_policy(module, version, reason=reason))

    def roll_back_policy(self, module: str, *, reason: str = "") -> PolicySwitch:
        """Make the version active again that was before. Raises `Conflict` where nothing was promoted."""
        return self._runner.call(self._client.roll_back_policy(module, reason=reason))

    def policies(self) -> list[ModuleStatus]:
        """The functional modules that run, and how they fare, by name and version."""
        return self._runner.call(self._client.policies())

    def order_policy(
        self, module: str, op: str, *, version: str | None = None, jobs: Sequence[str] = (), reason: str = ""
    ) -> ModuleLifecycle:
        """Has a module do `op`: activate, shadow, drain, enable or disable (for `jobs`)."""
        return self._runner.call(
            self._client.order_policy(module, op, version=version, jobs=jobs, reason=reason)
        )

    def ask_policy(
        self, module: str, job: str, *, version: str | None = None, inputs: Sequence[Observation] = ()
    ) -> ModuleAnswer:
        """What a module suggests for a job at this moment. Nothing of it is adopted."""
        return self._runner.call(self._client.ask_policy(module, job, version=version, inputs=inputs))

    def observe(self, *observations: Observation) -> None:
        """Tell functional modules what was seen outside the mesh."""
        self._runner.call(self._client.observe(*observations))

    # --- what happens to a job ------------------------------------------------------------------------------

    def events(self, job: str, *, start: int = 1) -> Iterator[JobEvent]:
        """What happened to a job from stream position `start`, then live, until it has ended."""
        return self._runner.iterate(self._client.events(job, start=start))

    def wait(self, job: str, *, timeout_s: float | None = None) -> JobRecord:
        """Until the job has ended; returns its last record. Raises `DeadlineExceeded` after `timeout_s`."""
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
        """The job's checkpoints that exist, the newest first, fetched as they are needed."""
        return self._runner.iterate(self._client.each_checkpoint(job))

    def checkpoints(self, job: str) -> CheckpointList:
        """All of them."""
        return self._runner.call(self._client.checkpoints(job))

    def download_checkpoint(
        self, job: str, folder: Path, step: int | None = None, *, progress: OnProgress | None = None
    ) -> CheckpointManifest:
        """Fetch a checkpoint (docs/checkpoints.md) into `folder`: that of `step`, or the newest."""
        return self._runner.call(self._client.download_checkpoint(job, folder, step, progress=progress))

    def each_dataset(self) -> Iterator[Dataset]:
        """The datasets on the bus, by name, fetched as they are needed."""
        return self._runner.iterate(self._client.each_dataset())

    def datasets(self) -> list[Dataset]:
        """All of them."""
        return self._runner.call(self._client.datasets())

    def upload_dataset(
        self, name: str, source: Path | bytes, *, progress: OnProgress | None = None
    ) -> Dataset:
        """Store a file or bytes as a dataset, which a job names as `data.source`."""
        return self._runner.call(self._client.upload_dataset(name, source, progress=progress))

    def download_dataset(self, name: str, file: Path, *, progress: OnProgress | None = None) -> Path:
        """Fetch a dataset into a file, which appears once it is whole."""
        return self._runner.call(self._client.download_dataset(name, file, progress=progress))

    def delete_dataset(self, name: str) -> None:
        """Remove a dataset, as an operator. Raises `NotFound`."""
        self._runner.call(self._client.delete_dataset(name))
