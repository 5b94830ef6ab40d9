"""The code that travels with jobs, on a node (ADR-0051): fetched once, kept while a job here refers to it.

A confined worker fetches and unpacks each archive into a folder named by its SHA-256. Only processes of jobs
that name this digest see the folder, for reading. A folder goes when the last of its jobs is cleaned up; an
agent that starts has no jobs, and begins with none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bus.files.removal import remove_folder
from bus.logs import get_logger
from entities.cluster.context import NodeContext
from entities.cluster.model_tasks import Failure, read_result
from schemas.errors import BadModel, DmscError, ErrorReply, Unavailable
from schemas.job_file.code import CodeSpec
from schemas.limits import SLOWEST_BYTES_PER_S

log = get_logger("cluster")

AT_ONCE = 2
"""Most archives that are fetched at once; further ones wait."""


@dataclass(frozen=True, slots=True)
class _Fetch:
    """The fetch of an archive, from the place and with the credential of one of its jobs."""

    job: str
    task: asyncio.Task[Path | DmscError]

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or isinstance(self.task.result(), DmscError))


class CodeFolders:
    """The folders of code below `ClusterConfig.code_root`."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._config = context.config
        self._root = context.config.code_root
        self._numbers = itertools.count(1)
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._fetches: dict[str, _Fetch] = {}
        self._jobs: defaultdict[str, set[str]] = defaultdict(set)

    async def folder(self, job: str, code: CodeSpec | None) -> Path | None:
        """The folder with the code of a job or build; None for one that names modules of the node.

        Raises:
            BadModel: the archive is not there, is not what its digest says, or breaks a rule.
            Unavailable: the worker was lost, or took too long.
        """
        if code is None:
            return None
        digest = code.sha256
        if digest is None or code.url is None:
            raise BadModel("code: it was not uploaded: submit the job with a client that does so")
        self._jobs[digest].add(job)
        while True:
            fetch = self._fetches.get(digest)
            if fetch is None or fetch.failed:
                task = self._context.start_task(self._fetch(job, code, digest))
                fetch = self._fetches[digest] = _Fetch(job, task)
            try:
                found = await asyncio.shield(fetch.task)
            except asyncio.CancelledError:
                if fetch.task.cancelled():
                    raise Unavailable(f"{self._config.sid} is ending, or the job has ended") from None
                raise
            if not isinstance(found, DmscError):
                return found
            if fetch.job == job:
                raise found
            # another job's place and credential failed, which may have ended meanwhile: ours may not

    async def forget(self, job: str) -> None:
        """Remove the code that no other job on this node refers to."""
        for digest in [digest for digest, jobs in self._jobs.items() if job in jobs]:
            self._jobs[digest].discard(job)
            if self._jobs[digest]:
                continue
            del self._jobs[digest]
            fetch = self._fetches.pop(digest, None)
            if fetch is not None and not fetch.task.done():
                fetch.task.cancel()
                await asyncio.wait({fetch.task})
            if digest not in self._jobs:
                gone = self._root / f".gone-{next(self._numbers)}"
                with contextlib.suppress(OSError):  # at once: the next job may fetch it again meanwhile
                    (self._root / digest).rename(gone)
                await asyncio.to_thread(_remove, gone)

    def drop_left_behind(self) -> None:
        """Remove all folders; called before the agent takes its first order."""
        _remove(self._root)

    async def _fetch(self, job: str, code: CodeSpec, digest: str) -> Path | DmscError:
        """The folder, or why there is none; it raises nothing, because it is a task of the agent."""
        async with self._turns:
            number = next(self._numbers)
            fresh = self._root / f".new-{number}"
            try:
                await asyncio.to_thread(_make, fresh)
                answer = await self._unpacked(job, code, number, fresh)
                target = self._root / digest
                await asyncio.to_thread(_replace, fresh, target)
            except DmscError as error:
                await asyncio.to_thread(_remove, fresh)
                return error
            except OSError as error:
                await asyncio.to_thread(_remove, fresh)
                return Unavailable(f"no room for code on {self._config.node}: {error.strerror}")
            except asyncio.CancelledError:
                await asyncio.shield(asyncio.to_thread(_remove, fresh))
                raise
        log.info("code unpacked", node=self._config.sid, job=job, sha256=digest, files=answer.get("files"))
        return target

    async def _unpacked(self, job: str, code: CodeSpec, number: int, folder: Path) -> dict[str, Any]:
        """Has a worker fetch and unpack an archive; returns its answer."""
        sid, times = f"{job}-code-{number}", self._config.times
        where = f"fetching the job's code on {self._config.node}"
        within_s = times.code_s + code.bytes / SLOWEST_BYTES_PER_S
        async with self._context.worker_folder(f"code-{number}", times.worker_ready_s) as results:
            result = results / "result.json"
            child = await self._context.processes.spawn(
                sid,
                f"{self._config.worker_package}.tasks.code",
                {
                    **self._context.payload,
                    "sid": sid,
                    "job": job,
                    "token": self._context.credential(sid, job),
                    "url": code.url,
                    "sha256": code.sha256,
                    "folder": str(folder),
                },
                log_path=self._config.logs / f"{job}-code.log",
                result=result,
                write=(str(results), str(folder)),
            )
            try:
                async with asyncio.timeout(within_s):
                    exit = await asyncio.shield(child.exit)
            except TimeoutError:
                await self._context.processes.stop(child, 0.0)
                raise Unavailable(f"{where}: not done in {within_s:.0f} s") from None
            except asyncio.CancelledError:
                await self._context.processes.stop(child, 0.0)
                raise
            answer = await asyncio.to_thread(read_result, result, exit, where)
        if isinstance(answer, Failure):
            raise ErrorReply(code=answer.code, text=answer.text).to_exception()
        return answer


def _make(folder: Path) -> None:
    _remove(folder)
    folder.mkdir(mode=0o755, parents=True)


def _replace(fresh: Path, target: Path) -> None:
    _remove(target)
    fresh.replace(target)
    descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o555)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    if not remove_folder(folder):
        log.warning("code not removed: remove the folder yourself", folder=str(folder))
