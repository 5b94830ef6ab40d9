"""A mesh whose every process the test owns: servers, entities and agents, killed and started one by one.

`dmsc up` starts again what dies, the server included, at once; here only the test does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from bus import subjects
from bus.connection import Bus
from bus.messaging import streams
from bus.messaging.key_value import Change
from bus.server.embedded import EmbeddedServer
from bus.subject_row import Subject
from schemas.arrays import JobArray
from schemas.envelope import EntityKind
from schemas.errors import NoResponders, Overloaded, Unavailable
from schemas.gateway_api import DoorRequest, JobList, MeshStatus
from schemas.job import ENDED, JobEvent, JobRecord, JobSpec
from schemas.leadership import Leadership
from schemas.registry import InstanceState, ServiceRecord
from tests.patience import PATIENCE_S
from tests.waiting import eventually
from tests.warm_processes import WarmProcess, incubator, start_module

USER_MODELS = Path(__file__).parent / "user_models"
"""On every mesh's code path, as a user would put a folder of their own there."""
TOKEN = "a-test-token"
OTHER_TOKEN = "another-test-token"
CLUSTERS = ("a", "b")


def users_file(folder: Path) -> Path:
    """Two researchers: `rita`, whose token is `TOKEN`, and `ana` with `OTHER_TOKEN`."""
    users = [
        {"name": name, "role": "researcher", "token_sha256": hashlib.sha256(token.encode()).hexdigest()}
        for name, token in (("rita", TOKEN), ("ana", OTHER_TOKEN))
    ]
    path = folder / "tokens.yaml"
    path.write_text(yaml.safe_dump({"users": users}))
    return path


@dataclass
class OwnMesh:
    """Servers and processes by name. Entities: `registry`, `authorizer`, `gateway-a`, … as in `commands`."""

    folder: Path
    servers: list[EmbeddedServer]
    replicas: int = 1
    slots: int = 3
    nodes: Mapping[str, tuple[str, list[str]]] = field(default_factory=dict)
    """Where a cluster's agent is to run, if not here: its address, and the words before its command."""
    addresses: Mapping[str, list[str]] = field(default_factory=dict)
    """Addresses of the bus that a process is started with, if not those of all `servers`."""
    processes: dict[str, subprocess.Popen[bytes] | WarmProcess] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def last_words(self, name: str) -> str:
        """The end of a process's log."""
        return (self.folder / f"{name}.log").read_text()[-2000:]

    def start(self, name: str, command: Sequence[str] = ()) -> int:
        """Starts a process, or the same one again; returns its pid. It does not outlive this one."""
        self.commands.setdefault(name, list(command))
        environment = {
            **os.environ,
            **incubator(),
            "DMSC_BUS": ",".join(self.addresses.get(name, self.urls)),
            "DMSC_LOGS": str(self.folder / "logs"),
            "DMSC_REPLICAS": str(self.replicas),
            "DMSC_CODE_PATH": str(USER_MODELS),
            "DMSC_ALLOW_URL": "*",
            "DMSC_FAULT_ANSWER": str(PATIENCE_S),  # of modules that answer; a busy machine may take its time
            "DMSC_TRUST_RESEARCHERS": "1",  # the gates of `user_models/gated.py` are Unix sockets
        }
        log, prefix = self.folder / f"{name}.log", self._where(name)[1]
        process: subprocess.Popen[bytes] | WarmProcess
        if prefix:
            command = [*prefix, sys.executable, "-m", "dmsc", *self.commands[name]]
            with log.open("ab") as out:
                process = subprocess.Popen(
                    [*command, "--parent", str(os.getpid())], env=environment, stdout=out, stderr=out
                )
        else:
            process = start_module(
                "dmsc", tuple(self.commands[name]), cwd=Path(), environment=environment, out=log
            )
        self.processes[name] = process
        return process.pid

    def _where(self, name: str) -> tuple[str, list[str]]:
        return self.nodes.get(name.removeprefix("agent-"), ("127.0.0.1", []))

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to a process that lives; returns its pid."""
        process = self.processes[name]
        assert process.poll() is None, f"{name} has already ended with {process.returncode}"
        process.send_signal(how)
        if how is signal.SIGKILL:
            process.wait(PATIENCE_S)
        return process.pid

    def retire(self, name: str) -> None:
        """Ends a process and forgets it: no test starts it again."""
        process = self.processes.pop(name)
        del self.commands[name]
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)

    def alive(self) -> dict[str, int]:
        """Name and pid of every process that lives."""
        return {name: process.pid for name, process in self.processes.items() if process.poll() is None}

    def start_all(self, *orchestrators: str) -> None:
        tokens = users_file(self.folder)
        for cluster in CLUSTERS:
            place = ["--cluster", cluster, "--node", "n", "--address", self._where(f"agent-{cluster}")[0]]
            self.start(f"agent-{cluster}", ["join", *place, "--slots", str(self.slots)])
        self.start("registry", ["run", "service-registry"])
        self.start("authorizer", ["run", "authorizer", "--tokens", str(tokens)])
        for name in orchestrators:
            self.start(name, ["run", "orchestrator"])
        for cluster in CLUSTERS:
            self.start(f"router-{cluster}", ["run", "router", "--cluster", cluster])
            self.start(f"gateway-{cluster}", ["run", "gateway", "--cluster", cluster])

    def stop_all(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @contextlib.contextmanager
    def running(self, *orchestrators: str) -> Iterator[Self]:
        """All of it until the end of the block; one orchestrator, `smo-1`, unless others are named."""
        try:
            self.start_all(*orchestrators or ("smo-1",))
            yield self
        finally:
            self.stop_all()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Witness]:
        """A client at the NATS door that also sees what is on the bus."""
        client = Bus.connect(self.urls, name="rita", kind=EntityKind.CLIENT, connect_timeout_s=PATIENCE_S)
        async with client as bus:
            # once: again is the registry's to do
            await streams.provision(bus.connection, replicas=self.replicas)
            witness = Witness(bus, self)
            watch = await bus.bucket(subjects.REGISTRY_RECORD).watch(witness.registered)
            try:
                yield witness
            finally:
                await watch.stop()


@dataclass
class Witness:
    """Submits, follows, and looks at records. `processes`: every one that ever ran a unit, by job and SID."""

    bus: Bus
    mesh: OwnMesh
    processes: dict[str, dict[str, set[int]]] = field(default_factory=dict)

    async def registered(self, change: Change) -> None:
        record = change.message
        if isinstance(record, ServiceRecord) and record.job is not None:
            units = self.processes.setdefault(record.job, {})
            units.setdefault(record.sid, set()).add(record.endpoint.pid)

    async def ask(
        self, action: str, *, token: str = TOKEN, **fields: object
    ) -> JobList | JobArray | MeshStatus:
        request = DoorRequest(token=token, action=action, **fields)
        row = subjects.DOOR
        answer = await self.bus.command(row, request, deadline_s=PATIENCE_S, action=action.split(".")[1])
        assert isinstance(answer, JobList | JobArray | MeshStatus)
        return answer

    async def ready(self) -> MeshStatus:
        """Waits until everybody is registered and warm."""
        orchestrators = sum(command[:2] == ["run", "orchestrator"] for command in self.mesh.commands.values())
        entities = {f"{kind}-{cluster}" for kind in ("gateway", "router") for cluster in CLUSTERS}
        status: MeshStatus | None = None

        async def complete() -> MeshStatus | None:
            nonlocal status
            dead = self.mesh.processes.keys() - self.mesh.alive().keys()
            assert not dead, "\n".join(f"{name} ended: {self.mesh.last_words(name)}" for name in dead)
            try:
                found = await self.ask("mesh.read")
            except Unavailable:
                return None
            assert isinstance(found, MeshStatus)
            status = found
            active = {one.sid for one in found.services if one.state is InstanceState.ACTIVE}
            standing = [one for one in found.services if one.kind is EntityKind.ORCHESTRATOR]
            warm = sum(node.warm for node in found.nodes) == len(CLUSTERS)
            present = entities | {"authorizer", "orchestrator"} <= active
            return found if present and warm and len(standing) == orchestrators else None

        ready: MeshStatus = await eventually(complete, lambda: f"not ready: {status}", 0.05)
        return ready

    async def leader(self) -> Leadership:
        """The lease of the orchestrator that leads."""
        entry = await self.bus.bucket(subjects.LEADERSHIP).get(leader=True, role="orchestrator")
        assert entry is not None
        assert isinstance(entry.message, Leadership)
        return entry.message

    async def until_next_term(self, before: Leadership) -> Leadership:
        """Returns once an orchestrator has the lead in a later term."""
        lease = await self.until_value(
            subjects.LEADERSHIP, lambda lease: lease.term > before.term, role="orchestrator"
        )
        assert isinstance(lease, Leadership)
        return lease

    async def bus_gone(self) -> None:
        """Waits until this client, too, has noticed that the bus is away."""
        await eventually(lambda: not self.bus.connected)

    async def submit(self, spec: JobSpec, *, token: str = TOKEN) -> str:
        """Patient with an authorizer that is on its way back."""
        answer: object = None
        async with asyncio.timeout(PATIENCE_S):
            while answer is None:
                try:
                    answer = await self.ask("job.submit", token=token, spec=spec)
                except NoResponders:
                    await asyncio.sleep(0.05)
                except Overloaded as error:  # asked too often in vain: the gateway says when to come again
                    await asyncio.sleep(float(error.fields["retry_after_s"]))
        assert isinstance(answer, JobList)
        return answer.jobs[0].job

    async def record(self, job: str) -> JobRecord:
        """The job's record as the bucket has it."""
        while True:
            try:
                entry = await self.bus.bucket(subjects.JOB_RECORD).get(leader=True, job=job)
            except Unavailable:
                await asyncio.sleep(0.1)
                continue
            assert entry is not None, job
            assert isinstance(entry.message, JobRecord)
            return entry.message

    async def until_value(self, row: Subject, holds: Callable[[Any], bool], **tokens: str) -> Any:
        """The first value of a key, or of a bucket's keys, that something holds of."""
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def changed(change: Change) -> None:
            if change.message is not None and holds(change.message) and not found.done():
                found.set_result(change.message)

        watch = await self.bus.bucket(row).watch(changed, **tokens)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await found
        finally:
            await watch.stop()

    async def until_event(self, job: str, fits: Callable[[JobEvent], bool]) -> JobEvent:
        """The job's first event like that."""
        async with asyncio.timeout(PATIENCE_S):
            async for event in self.events(job):
                if fits(event):
                    return event
        pytest.fail(f"{job} ended before: {(await self.record(job)).reason}")

    async def events(self, job: str) -> AsyncIterator[JobEvent]:
        """From the start, until the job has ended."""
        async with contextlib.aclosing(
            self.bus.history(subjects.JOB_EVENT, follow=True, job=job)
        ) as recorded:
            async for item in recorded:
                assert isinstance(item.message, JobEvent)
                yield item.message
                if item.message.kind == "state" and item.message.state in ENDED:
                    return

    async def until_step(self, job: str, step: int) -> None:
        await self.until_event(job, lambda event: event.result is not None and event.result.step >= step)

    async def until_published(self, job: str) -> None:
        """Returns once a checkpoint is written."""
        await self.until_event(job, lambda event: event.kind == "checkpoint" and "written in" in event.text)

    async def ended(self, job: str) -> JobRecord:
        async for _ in self.events(job):
            pass
        return await self.record(job)

    async def gaps(self, job: str) -> tuple[float, float]:
        """Seconds: the longest time between two committed steps, and the median one."""
        times = [event.at async for event in self.events(job) if event.result is not None]
        between = [later - earlier for earlier, later in itertools.pairwise(times)]
        return max(between), statistics.median(between)
