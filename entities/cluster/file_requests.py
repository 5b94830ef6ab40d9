"""Reads files and removes checkpoints for the control plane, in confined workers, never in the agent itself.

A worker reads a whole block, so that a long download does not cost a worker per piece. Cached blocks serve
only continued reads: a read that begins at a block's start gets the present content.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entities.cluster.context import NodeContext
from entities.cluster.core import Exit
from entities.cluster.file_reach import FileReach
from entities.cluster.model_tasks import Failure, read_foreign, read_result
from schemas.checkpoint import checkpoints_url
from schemas.data_set.commands import RemoveObjects
from schemas.envelope import Envelope
from schemas.errors import Ack, BadInput, ErrorReply, Unavailable
from schemas.files import FilesRead, ReadFiles, RemoveCheckpoints
from schemas.urls import BUS, SECRET

BLOCK_BYTES = 8 << 20
BLOCKS = 4
"""Cached blocks: this many concurrent downloads need a worker per block, any others one per piece."""
AT_ONCE = 8
"""Most workers at once; further requests wait."""
REMOVALS_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    data: bytes
    size: int

    def piece(self, start: int, count: int) -> FilesRead | None:
        """A piece from strictly inside the block; None if it begins or ends outside."""
        end = min(start + count, self.size)
        if not (self.start < start < self.start + len(self.data)) or end > self.start + len(self.data):
            return None
        return FilesRead(data=self.data[start - self.start : end - self.start], size=self.size)


class NodeFileReader:
    """Answers `ReadFiles`, `RemoveCheckpoints` and `RemoveObjects`."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._config = context.config
        self._node = context.config.sid
        self._numbers = itertools.count(1)
        self._reads = asyncio.Semaphore(AT_ONCE)
        self._removals = asyncio.Semaphore(REMOVALS_AT_ONCE)
        self._path_threads = ThreadPoolExecutor(AT_ONCE + REMOVALS_AT_ONCE, "reach")
        self._blocks: OrderedDict[tuple[str, ...], _Block] = OrderedDict()

    async def read(self, order: ReadFiles, envelope: Envelope) -> FilesRead:
        """Read a piece of a file, or list a folder.

        Raises:
            BadInput: jobs of this node may not use this URL, or it can't be opened.
            NotFound: there is no such file.
            Unavailable: the worker was lost, or took too long.
        """
        self._check(order.url, order.secrets)

        def reach() -> FileReach:
            return self._context.files.of_url(order.url)

        if order.what == "list":
            request = order.model_dump(include={"url", "what", "name", "after", "secrets"})
            answer, _ = await self._run(request, reach)
            return FilesRead(names=tuple(map(str, answer["names"])), more=bool(answer["more"]))
        key = (order.url, order.name, order.secrets)
        block = self._blocks.get(key)
        if block is not None and (piece := block.piece(order.start, order.count)) is not None:
            return piece
        count = BLOCK_BYTES if order.count else 0
        request = order.model_dump(include={"url", "what", "name", "start", "secrets"}) | {"count": count}
        answer, data = await self._run(request, reach)
        size = int(answer["size"])
        self._cache(key, _Block(order.start, data, size), order)
        return FilesRead(data=data[: order.count], size=size)

    async def remove(self, order: RemoveCheckpoints, envelope: Envelope) -> Ack:
        """Remove checkpoints of a job.

        Raises:
            BadInput: jobs of this node may not write there.
            Unavailable: the worker was lost, or took too long.
        """
        self._check(order.artifacts, order.secrets)

        def reach() -> FileReach:
            return self._context.files.of_removal(order.job, order.artifacts)

        request = {
            "what": "remove",
            "url": checkpoints_url(order.artifacts, order.job),
            "folders": list(order.folders),
            "secrets": order.secrets,
        }
        await self._run(request, reach, removes=True)
        return Ack()

    async def remove_objects(self, order: RemoveObjects, envelope: Envelope) -> Ack:
        """Remove files of a build's folder.

        Raises:
            BadInput: nobody may write there.
            Unavailable: the worker was lost, or took too long.
        """
        self._check(order.folder, order.secrets)

        def reach() -> FileReach:
            return self._context.files.of_folder(order.folder)

        request = {
            "what": "remove_files",
            "url": order.folder,
            "names": list(order.names),
            "secrets": order.secrets,
        }
        await self._run(request, reach, removes=True)
        return Ack()

    @staticmethod
    def _check(url: str, secrets: str) -> None:
        if url.startswith(BUS) or (url.startswith(SECRET) and not secrets):
            raise BadInput(f"{url}: a node opens files and object storages for others, nothing else")

    def _cache(self, key: tuple[str, ...], block: _Block, order: ReadFiles) -> None:
        self._blocks.pop(key, None)
        if len(block.data) > order.count > 0:
            self._blocks[key] = block
            while len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)

    async def _run(
        self, request: dict[str, Any], reach: Callable[[], FileReach], *, removes: bool = False
    ) -> tuple[dict[str, Any], bytes]:
        """A worker's answer and the bytes that it read. `reach` resolves paths, which may block for ever."""
        times = self._config.times
        within_s = times.remove_s if removes else times.read_s
        async with self._removals if removes else self._reads:
            try:
                async with asyncio.timeout(within_s):
                    loop = asyncio.get_running_loop()
                    return await self._run_once(
                        request, await loop.run_in_executor(self._path_threads, reach)
                    )
            except TimeoutError:
                raise Unavailable(f"{request['url']}: no answer in {within_s:g} s on {self._node}") from None

    async def _run_once(self, request: dict[str, Any], reach: FileReach) -> tuple[dict[str, Any], bytes]:
        number = next(self._numbers)
        processes, name = self._context.processes, f"read-{number}"  # `files-N` is the worker's own folder
        async with self._context.worker_folder(name, self._config.times.file_ready_s) as folder:
            result, data = folder / "result.json", folder / "data"
            child = await processes.spawn(
                f"files-{number}",
                f"{self._config.worker_package}.tasks.files",
                {**request, "urls": self._context.payload["urls"], "data": str(data)},
                log_path=self._config.logs / f"{self._node}-files.log",
                result=result,
                read=reach.read,
                write=(str(folder), *reach.write),
            )
            try:
                exit = await asyncio.shield(child.exit)
            except asyncio.CancelledError:
                await processes.stop(child, 0.0)
                raise
            return await asyncio.to_thread(self._read_answer, result, data, request, exit)

    def _read_answer(
        self, result: Path, data: Path, request: dict[str, Any], exit: Exit
    ) -> tuple[dict[str, Any], bytes]:
        answer = read_result(result, exit, f"opening {request['url']} on {self._node}")
        if isinstance(answer, Failure):
            if exit.code != 0:  # killed, or lost with its fork server: that says nothing about the file
                raise Unavailable(answer.text)
            raise ErrorReply(code=answer.code, text=answer.text, retryable=False).to_exception()
        try:
            return answer, read_foreign(data, BLOCK_BYTES) if request["what"] == "piece" else b""
        except OSError as error:
            raise Unavailable(
                f"reading {request['url']} on {self._node} gave nothing: {error.strerror}"
            ) from None
