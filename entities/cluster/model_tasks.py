"""Short-lived workers of a node agent: the analysis of a job's model (draft §5.3), and the closing sample.

The control plane has no torch, so a child of the fork server loads the model, does the work and ends.
Whatever happens to that worker, the orchestrator gets an answer: the topology, or one line that says why
there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import stat
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from bus import subjects
from bus.logs import get_logger
from bus.security.credentials import Credential, root_of
from bus.security.identity import is_credential
from bus.subject_row import Subject
from bus.tasks import cancel
from entities.cluster.cache_folders import cache_owner
from entities.cluster.context import NodeContext
from entities.cluster.core import Exit, ProcessWork
from entities.cluster.fork_server_client import ForkServerClient, Spawned, work_of
from schemas.base import Message
from schemas.cluster import Analyse, AnalysisFailed, SampleWritten, WriteSample
from schemas.errors import Ack, DmscError, Refused, Unavailable
from schemas.job import JobSpec
from schemas.job_file.code import CodeSpec
from schemas.task_graph import ModelTopology

log = get_logger("cluster")

_RESULT_BYTES = 64 << 20
_ATTEMPTS = 3  # a failure by circumstance says nothing about the job


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker has no result; `text` is one line for the user."""

    code: str
    text: str


class CodeSource(Protocol):
    """Where the code of jobs lies on this node (`entities.cluster.job_code.code_folders`)."""

    async def folder(self, job: str, code: CodeSpec | None) -> Path | None: ...


class ShortLivedWorkers:
    """Runs workers one at a time (a second one would disturb measurements) and keeps topologies.

    A worker that makes progress has no time limit. An endless loop makes progress, too: it ends when its user
    cancels the job, and no other worker waits for it for longer than `analysis_alone_s`.
    """

    def __init__(self, context: NodeContext, code: CodeSource) -> None:
        self._context = context
        self._code = code
        self._config = context.config
        self._node = context.config.node
        self._alone_lock = asyncio.Lock()
        self._running: dict[tuple[str, str], tuple[Message, asyncio.Task[Any]]] = {}
        self._specs: dict[str, JobSpec] = {}
        self._runs = 0
        self.topologies: dict[str, ModelTopology] = {}

    def analyse(self, order: Analyse, device: str, speed: dict[str, float]) -> Ack:
        """Accept an order to analyse; a repetition starts no second worker, a known result is sent again.

        `speed`: of the device, which belongs to the times that the analysis measures.
        """
        topology = self.topologies.get(order.job)
        if topology is not None and self._specs.get(order.job) == order.spec:
            self._context.start_task(self._answer(subjects.TOPOLOGY, topology, order.job))
            return Ack(note="known already")
        return self._accept("analysis", order.job, order, self._analyse(order, device, speed))

    def write_sample(self, order: WriteSample, device: str) -> Ack:
        """Accept an order to have the trained model generate text."""
        return self._accept("sample", order.job, order, self._write_sample(order, device))

    async def forget(self, job: str) -> None:
        """Drop a job's topology and end its workers; returns once they are gone."""
        await cancel(*[task for key, (_, task) in self._running.items() if key[1] == job])
        self.topologies.pop(job, None)
        self._specs.pop(job, None)

    def _accept(self, kind: str, job: str, order: Message, work: Coroutine[Any, Any, None]) -> Ack:
        key = (kind, job)
        if key in self._running:
            earlier_order, task = self._running[key]
            if earlier_order == order:
                work.close()
                return Ack(note="under way")
            task.cancel()
        task = self._context.start_task(work)
        self._running[key] = (order, task)
        task.add_done_callback(lambda ended: self._forget_task(key, ended))
        return Ack()

    def _forget_task(self, key: tuple[str, str], task: asyncio.Task[Any]) -> None:
        if key in self._running and self._running[key][1] is task:
            del self._running[key]

    async def _answer(self, row: Subject, message: Message, job: str) -> None:
        try:
            await self._context.send(row, message, agent=self._config.sid, job=job)
        except DmscError as error:
            log.warning(f"{row.name} refused", node=self._node, job=job, error=error.text)

    async def _analyse(self, order: Analyse, device: str, speed: dict[str, float]) -> None:
        result = await self._run(
            "analysis", order.job, order.spec, device, secrets=order.secrets, user=order.user
        )
        topology = self._read_topology(result) if isinstance(result, dict) else result
        if isinstance(topology, Failure):
            failure = AnalysisFailed(job=order.job, code=topology.code, text=topology.text)
            await self._answer(subjects.ANALYSIS_FAILED, failure, order.job)
            return
        topology = topology.model_copy(update={"speed": speed})
        self.topologies[order.job], self._specs[order.job] = topology, order.spec
        await self._answer(subjects.TOPOLOGY, topology, order.job)

    def _read_topology(self, result: dict[str, Any]) -> ModelTopology | Failure:
        try:
            return ModelTopology.model_validate(result["topology"])
        except (KeyError, ValidationError) as error:
            log.error("analysis gave an unusable topology", node=self._node, error=str(error))
            return Failure("internal", f"analysis on {self._node} gave an unusable topology; see its log")

    async def _write_sample(self, order: WriteSample, device: str) -> None:
        result = await self._run(
            "sample", order.job, order.spec, device, weights_url=order.weights_url, secrets=order.secrets
        )
        if isinstance(result, Failure):
            log.warning("no sample", node=self._node, job=order.job, error=result.text)
            reply = SampleWritten(job=order.job, text="", error=result.text)
        else:
            reply = SampleWritten(job=order.job, text=str(result.get("text", "")))
        await self._answer(subjects.SAMPLE_WRITTEN, reply, order.job)

    async def _run(
        self, kind: str, job: str, spec: JobSpec, device: str, **more: str
    ) -> dict[str, Any] | Failure:
        sid = f"{job}-{kind}"
        payload = {
            **self._context.payload,
            "sid": sid,
            "job": job,
            "spec": spec.model_dump(mode="json"),
            "device": device,
            **more,
        }
        outcome: dict[str, Any] | Failure = Failure("unavailable", f"{self._node}: {kind} was not started")
        async with self.turn(kind, job):
            for _ in range(_ATTEMPTS):
                token: str | None = None
                try:
                    token = self._context.credential(sid, job)
                    outcome = await self._run_once(kind, job, {**payload, "token": token}, spec)
                except DmscError as error:
                    outcome = Failure(error.code, error.text)
                if not isinstance(outcome, Failure) or not self._may_succeed_later(outcome, token, sid, job):
                    break
        return outcome

    def _may_succeed_later(self, failure: Failure, token: str | None, sid: str, job: str) -> bool:
        """Whether another attempt may succeed, because the failure says nothing about the job.

        That is so if the fork server was lost, or if the root of all credentials was replaced while the
        worker ran (ADR-0039).
        """
        if token is None or failure.code != Refused.code:
            return failure.code == Unavailable.code
        present = self._context.credential(sid, job)
        if present is None or not is_credential(token):
            return False
        return root_of(Credential.parse(present).chain[0]) != root_of(Credential.parse(token).chain[0])

    @contextlib.asynccontextmanager
    async def turn(self, kind: str, job: str) -> AsyncIterator[None]:
        """Wait for earlier workers; after `analysis_alone_s` the next worker may begin beside this one."""
        if self._alone_lock.locked():
            log.info(f"{kind} waits: another worker is to be alone on the node", node=self._node, job=job)
        await self._alone_lock.acquire()
        locked = True

        def release() -> None:
            nonlocal locked
            if locked:
                locked = False
                self._alone_lock.release()

        def on_timeout() -> None:
            log.warning(
                f"{kind} takes long: others no longer wait for it",
                node=self._node,
                job=job,
                seconds=self._config.analysis_alone_s,
            )
            release()

        timer = asyncio.get_running_loop().call_later(self._config.analysis_alone_s, on_timeout)
        try:
            yield
        finally:
            timer.cancel()
            release()

    async def _run_once(
        self, kind: str, job: str, payload: dict[str, Any], spec: JobSpec
    ) -> dict[str, Any] | Failure:
        self._runs += 1
        name = f"{kind}-{self._runs}"
        async with self._context.worker_folder(name, self._config.times.worker_ready_s) as folder:
            result = folder / "result.json"
            code = await self._code.folder(job, spec.code)
            reach = self._context.files.of_job(job, spec, filter(None, [payload.get("weights_url")]))
            with self._context.caches.opened(name, cache_owner(payload.get("user", ""), job)) as cache:
                payload = {**payload, "cache": None if cache is None else str(cache)}
                child = await self._context.processes.spawn(
                    f"{kind}-{job}-{self._runs}",
                    f"{self._config.worker_package}.tasks.{kind}",
                    payload,
                    log_path=self._config.logs / f"{job}-{kind}.log",
                    threads=spec.training.compute_threads,
                    result=result,
                    read=reach.read,
                    write=(str(folder), *([] if cache is None else [str(cache)])),
                    code=code,
                )
                where = f"{kind} of the model on {self._node}"
                timeout_s = self._config.analysis_timeout_s
                exit = await wait_for_exit(self._context.processes, child, timeout_s, self._node)
                if exit is None:
                    return Failure(
                        "no_progress", f"{where} made no progress for {timeout_s:.0f} s and was ended"
                    )
                return read_result(result, exit, where)


async def wait_for_exit(
    processes: ForkServerClient, child: Spawned, timeout_s: float, node: str
) -> Exit | None:
    """Wait for a worker's exit; None if it was killed because it made no progress for `timeout_s`.

    If cancelled, it kills the worker, too.
    """
    work = ProcessWork()
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    return await asyncio.shield(child.exit)
            if not child.pid.done():
                continue  # the fork server has its own deadline for that
            before, work = work, work_of(child.pid.result())
            if not work.gets_on(before, timeout_s):
                break
        await _kill(processes, child, node)
        return None
    except asyncio.CancelledError:
        await _kill(processes, child, node)
        raise


async def _kill(processes: ForkServerClient, child: Spawned, node: str) -> None:
    try:
        await processes.stop(child, 0.0)
    except DmscError as error:
        log.error("worker left behind", node=node, error=error.text)


def read_foreign(path: Path, most: int) -> bytes:
    """Read a file that users' code may have made, without following links or waiting for pipes.

    Raises:
        OSError: it is missing, or no plain file, or larger than `most` bytes.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise OSError(errno.EINVAL, "not the file of a result")
        return file.read(most)


def read_result(path: Path, exit: Exit, where: str) -> dict[str, Any] | Failure:
    """The result of a worker, the failure that it reported, or else a failure that says how it ended."""
    try:
        result = json.loads(read_foreign(path, _RESULT_BYTES))
    except (OSError, ValueError, RecursionError):
        if exit.code is None and exit.signal is None:
            return Failure("unavailable", f"{where} was lost with its fork server")
        return Failure("internal", f"{where} gave no result ({exit})")
    if not isinstance(result, dict):
        return Failure("internal", f"{where} gave a result that is no object")
    failure = result.get("failed")
    if isinstance(failure, dict):
        return Failure(str(failure.get("code", "internal")), str(failure.get("text", "")))
    return result
