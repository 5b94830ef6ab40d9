"""The processes of a mesh on this machine: finds, verifies and signals them.

A process is signalled only if its identity is verified: it descends from the mesh's supervisor, which holds
the lock of the state folder; the mesh's own file says what it is; and its start time is unchanged after a
handle on it was opened. On Linux the handle is a pidfd, so that even a pid that was reused in between can't
be hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

import psutil

from dmsc.chaos.plan import Alive, LiveInstance, MeshProcess
from dmsc.state.state_folder import StateFolder
from schemas.envelope import EntityKind
from schemas.errors import BadInput, DmscError
from schemas.registry import InstanceState, ServiceRecord

Tree = tuple[tuple[int, float], ...]
"""The pid and start time of each process."""

ENTITIES = frozenset(
    {
        "service-registry",
        "authorizer",
        "orchestrator",
        "broker",
        "gateway",
        "router",
        "accountant",
        "model-registry",
    }
)


class LocalMesh:
    """The mesh of one state folder. It reads the process table at each call.

    Raises `BadInput` if no mesh runs there, because faults hit processes of this machine only.
    """

    def __init__(self, folder: StateFolder) -> None:
        mesh, owner = folder.mesh(), folder.owner()
        if mesh is None or owner is None:
            raise BadInput(
                f"no mesh runs on {folder.path}: chaos kills processes of a mesh on this machine; start one"
                " with `dmsc up`, name its folder with --state, or let chaos start its own with --private"
            )
        self._folder = folder
        self._owner = psutil.Process(owner)

    def alive(
        self, job: str, records: Iterable[ServiceRecord], standbys: Collection[str] = frozenset()
    ) -> Alive:
        """The mesh's live processes, and the job's active instances whose processes are verified.

        `standbys` has the SIDs of standby replicas; only the job's events contain them, not the registry.
        """
        parts = tuple(self._parts())
        return Alive(parts=parts, instances=tuple(_instances(job, records, parts, standbys)))

    def elsewhere(self, job: str, records: Iterable[ServiceRecord]) -> list[str]:
        """The SIDs of the job's active instances that are no processes of this mesh on this machine."""
        all_records = list(records)
        local = {instance.sid for instance in self.alive(job, all_records).instances}
        return sorted(record.sid for record in _of_job(job, all_records) if record.sid not in local)

    def _parts(self) -> Iterator[MeshProcess]:
        mesh = self._folder.mesh()
        if mesh is None:
            return
        names = {pid: name for name, pid in mesh.children.items()}
        trees = _trees(self._owner)
        for process in self._owner.children():
            name = names.get(process.pid)
            with contextlib.suppress(psutil.Error):
                tree = trees.get(process.pid, ())
                part = None if name is None else _part(process, mesh.commands.get(name), tree)
                if part is not None:
                    yield part


def _trees(owner: psutil.Process) -> dict[int, Tree]:
    """The descendants of each child of the supervisor, by the child's pid.

    They include processes that a node agent's fork server started. The fork server may descend from an
    incubator, which other meshes may share.
    """
    trees = {child.pid: dict.fromkeys(_descendants(child)) for child in owner.children()}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError):
            words = " ".join(process.cmdline()).split()
            agent = int(words[words.index("--agent") + 1])
            if "workers.process.fork_server" in words and agent in trees:
                more = [(process.pid, process.create_time()), *_descendants(process)]
                trees[agent] |= dict.fromkeys(more)
    return {pid: tuple(tree) for pid, tree in trees.items()}


def _part(process: psutil.Process, command: Sequence[str] | None, tree: Tree) -> MeshProcess | None:
    """Describe a child by its `dmsc` arguments (a NATS server has none); None if no fault may hit it."""
    if process.status() == psutil.STATUS_ZOMBIE:
        return None
    started = process.create_time()
    if command is None:
        return MeshProcess(
            name="nats-server", entities=("server",), clusters=(), pid=process.pid, started=started
        )
    clusters = tuple(value for name, value in pairwise(command) if name == "--cluster")
    entities: tuple[str, ...] = ("agent",)
    if command[0] == "join":
        name = f"agent-{clusters[0]}"
    elif command[0] == "run":
        entities = tuple(argument for argument in command[1:] if argument in ENTITIES)
        name = entities[0] if len(entities) == 1 else "control-plane"
        if len(entities) == 1 and clusters:
            name = f"{name}-{clusters[0]}"
    else:
        return None
    return MeshProcess(
        name=name, entities=entities, clusters=clusters, pid=process.pid, started=started, tree=tree
    )


def _descendants(process: psutil.Process) -> Iterator[tuple[int, float]]:
    with contextlib.suppress(psutil.Error):  # the process or a descendant may have ended by now
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                yield child.pid, child.create_time()


def _of_job(job: str, records: Iterable[ServiceRecord]) -> list[ServiceRecord]:
    return [
        record
        for record in records
        if record.kind is EntityKind.INSTANCE and record.job == job and record.state is InstanceState.ACTIVE
    ]


def _instances(
    job: str, records: Iterable[ServiceRecord], parts: Sequence[MeshProcess], standbys: Collection[str]
) -> Iterator[LiveInstance]:
    """The job's instances whose pid in the registry is of a process that their cluster's agent started."""
    for record in _of_job(job, records):
        started = next(
            (
                born
                for part in parts
                if "agent" in part.entities and record.endpoint.cluster in part.clusters
                for pid, born in part.tree
                if pid == record.endpoint.pid
            ),
            None,
        )
        if started is not None:
            yield LiveInstance(
                sid=record.sid,
                incarnation=record.incarnation,
                stage=-1 if record.stage is None else record.stage,
                cluster=record.endpoint.cluster,
                pid=record.endpoint.pid,
                started=started,
                standby=record.sid in standbys,
            )


class ProcessHandle:
    """A handle on one verified process. A signal through it reaches that process or none.

    Raises `DmscError` if the process has ended, or if its pid belongs to another process now.
    """

    def __init__(self, pid: int, started: float) -> None:
        self.pid = pid
        self._descriptor: int | None = None
        try:
            if sys.platform == "linux":
                self._descriptor = os.pidfd_open(pid)
            self._process = psutil.Process(pid)
            if abs(self._process.create_time() - started) > 1e-3:
                raise DmscError(f"pid {pid} is another process by now")
        except (psutil.Error, OSError) as error:
            self.close()
            raise DmscError(f"pid {pid} has ended") from error
        except DmscError:
            self.close()
            raise

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended meanwhile."""
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if sys.platform == "linux" and self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            else:
                self._process.send_signal(number)

    @property
    def gone(self) -> bool:
        """Whether the process has ended; a zombie counts as ended."""
        if self._descriptor is not None:
            return bool(select.select([self._descriptor], [], [], 0)[0])
        try:
            return not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    @property
    def stopped(self) -> bool:
        """Whether the process lives and is stopped."""
        try:
            return not self.gone and self._process.status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    def close(self) -> None:
        """Close the handle. Closing twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


async def inject(
    processes: Sequence[tuple[int, float]],
    *,
    freeze: bool = False,
    notice: bool = False,
    within_s: float = 10.0,
    every_s: float = 0.002,
) -> tuple[float, list[ProcessHandle]]:
    """Kill (or stop) these processes at once, and wait until they have died (or stopped).

    Args:
        processes: The pid and start time of each. The first must exist; others may have ended by themselves.
        freeze: Send SIGSTOP instead of SIGKILL.
        notice: Send SIGTERM instead of SIGKILL.
        within_s: From the signal to the end of the process; freeing tens of gigabytes takes seconds.
        every_s: How often they are looked at.

    Returns:
        The time of the first signal (seconds since the epoch), and open handles of stopped processes.

    Raises:
        DmscError: The fault did not fire: the victim had ended, or it neither died nor stopped.
    """
    handles = [ProcessHandle(*processes[0])]
    for pid, started in processes[1:]:
        with contextlib.suppress(DmscError):
            handles.append(ProcessHandle(pid, started))
    if handles[0].gone:
        for handle in handles:
            handle.close()
        raise DmscError(f"pid {handles[0].pid} had ended by itself")
    at = time.time()
    number = signal.SIGSTOP if freeze else signal.SIGTERM if notice else signal.SIGKILL
    for handle in handles:
        handle.signal(number)
    deadline = time.monotonic() + within_s
    # The mesh may notice and kill a stopped process before it is seen here as stopped; that counts, too.
    while waiting := [handle.pid for handle in handles if not (handle.gone or (freeze and handle.stopped))]:
        if time.monotonic() > deadline:
            for handle in handles:
                handle.close()
            raise DmscError(f"pid {waiting[0]} did not {'stop' if freeze else 'end'} in {within_s:.0f} s")
        await asyncio.sleep(every_s)
    if freeze:
        return at, handles
    for handle in handles:
        handle.close()
    return at, []


def resume(handles: Iterable[ProcessHandle]) -> None:
    """Resume processes that are still stopped. An instance was fenced meanwhile and will end itself."""
    for handle in handles:
        if handle.stopped:
            handle.signal(signal.SIGCONT)
        handle.close()
