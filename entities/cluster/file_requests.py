"""Files that a node reads for the control plane, and checkpoints that it removes: a confined worker opens the
URL, never the agent itself.

A worker reads a whole block, so that a long download does not cost one per piece. Blocks serve only who reads
on: whoever begins at a block's start gets what is there now.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entities.cluster.core import Exit
from entities.cluster.file_reach import reach_of_removal, reach_of_url
from entities.cluster.fork_server_client import ForkServerClient
from entities.cluster.model_tasks import Failure, read_foreign, read_result
from schemas.checkpoint import checkpoints_url
from schemas.envelope import Envelope
from schemas.errors import Ack, BadInput, ErrorReply, Unavailable
from schemas.files import FilesRead, ReadFiles, RemoveCheckpoints
from schemas.urls import BUS, SECRET, UrlRules

BLOCK_BYTES = 8 << 20
BLOCKS = 4
"""Kept at a time: so many downloads at once have a worker per block, others one per piece."""
AT_ONCE = 8
"""Workers; further questions wait."""
READ_S = 20.0
"""How long one may take: an object storage that does not answer holds up no others for longer."""
REMOVE_S = 120.0
"""How long a removal may take: an object storage takes them one by one. What is left is the next one's."""
REMOVALS_AT_ONCE = 2
_WAIT_READY_S = 10.0

_Reached = tuple[tuple[str, ...], tuple[str, ...]]
"""What a worker may read, and write."""


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    data: bytes
    size: int

    def piece(self, start: int, count: int) -> FilesRead | None:
        """From its inside; None where the file goes on behind it, or begins before."""
        end = min(start + count, self.size)
        if not (self.start < start < self.start + len(self.data)) or end > self.start + len(self.data):
            return None
        return FilesRead(data=self.data[start - self.start : end - self.start], size=self.size)


class NodeFileReader:
    """Answers `ReadFiles` and `RemoveCheckpoints`.

    Args:
        processes: where the workers run.
        package: where the module `files` is.
        node: the agent's SID.
        logs: folder of the workers' log.
        urls: `--allow-url` of this node; None: any URL.
        closed: files and folders that no job is given.
        rules: the same as `urls`, ready to ask.
    """

    def __init__(
        self,
        processes: ForkServerClient,
        *,
        package: str,
        node: str,
        logs: Path,
        urls: Sequence[str] | None,
        closed: Sequence[str] = (),
        rules: UrlRules | None = None,
    ) -> None:
        self._processes = processes
        self._module = f"{package}.tasks.files"
        self._node = node
        self._logs = logs
        self._urls = None if urls is None else list(urls)
        self._closed = closed
        self._rules = rules
        self._numbers = itertools.count(1)
        self._room = asyncio.Semaphore(AT_ONCE)
        self._removals = asyncio.Semaphore(REMOVALS_AT_ONCE)
        self._lookers = ThreadPoolExecutor(AT_ONCE + REMOVALS_AT_ONCE, "reach")
        self._blocks: OrderedDict[tuple[str, ...], _Block] = OrderedDict()

    async def read(self, order: ReadFiles, envelope: Envelope) -> FilesRead:
        """
        Raises:
            BadInput: this URL is not for jobs of this node, or can't be opened.
            NotFound: there is no such file.
            Unavailable: the worker was lost, or took too long.
        """
        self._check(order.url, order.secrets)

        def reached() -> _Reached:
            return reach_of_url(order.url, closed=self._closed, rules=self._rules), ()

        if order.what == "list":
            asked = order.model_dump(include={"url", "what", "name", "after", "secrets"})
            found, _ = await self._run(asked, reached)
            return FilesRead(names=tuple(map(str, found["names"])), more=bool(found["more"]))
        key = (order.url, order.name, order.secrets)
        known = self._blocks.get(key)
        if known is not None and (piece := known.piece(order.start, order.count)) is not None:
            return piece
        count = BLOCK_BYTES if order.count else 0
        asked = order.model_dump(include={"url", "what", "name", "start", "secrets"}) | {"count": count}
        found, data = await self._run(asked, reached)
        size = int(found["size"])
        self._keep(key, _Block(order.start, data, size), order)
        return FilesRead(data=data[: order.count], size=size)

    async def remove(self, order: RemoveCheckpoints, envelope: Envelope) -> Ack:
        """
        Raises:
            BadInput: jobs of this node may not write there.
            Unavailable: the worker was lost, or took too long.
        """
        self._check(order.artifacts, order.secrets)

        def reached() -> _Reached:
            return (), reach_of_removal(order.job, order.artifacts, closed=self._closed, rules=self._rules)

        asked = {
            "what": "remove",
            "url": checkpoints_url(order.artifacts, order.job),
            "folders": list(order.folders),
            "secrets": order.secrets,
        }
        await self._run(asked, reached, removes=True)
        return Ack()

    @staticmethod
    def _check(url: str, secrets: str) -> None:
        if url.startswith(BUS) or (url.startswith(SECRET) and not secrets):
            raise BadInput(f"{url}: a node opens files and object storages for others, nothing else")

    def _keep(self, key: tuple[str, ...], block: _Block, order: ReadFiles) -> None:
        self._blocks.pop(key, None)
        if len(block.data) > order.count > 0:
            self._blocks[key] = block
            while len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)

    async def _run(
        self, asked: dict[str, Any], reached: Callable[[], _Reached], *, removes: bool = False
    ) -> tuple[dict[str, Any], bytes]:
        """A worker's answer and the bytes that it read. `reached` looks at paths, which may take for ever."""
        within_s = REMOVE_S if removes else READ_S
        async with self._removals if removes else self._room:
            try:
                async with asyncio.timeout(within_s):
                    read, write = await asyncio.get_running_loop().run_in_executor(self._lookers, reached)
                    return await self._run_once(asked, read, write)
            except TimeoutError:
                raise Unavailable(f"{asked['url']}: no answer in {within_s:g} s on {self._node}") from None

    async def _run_once(
        self, asked: dict[str, Any], read: Sequence[str], write: Sequence[str]
    ) -> tuple[dict[str, Any], bytes]:
        await self._processes.wait_ready(_WAIT_READY_S)
        assert self._processes.scratch is not None
        number = next(self._numbers)
        folder = self._processes.scratch / f"read-{number}"  # `files-N` is the worker's own
        folder.mkdir(mode=0o700)
        result, data = folder / "result.json", folder / "data"
        try:
            child = await self._processes.spawn(
                f"files-{number}",
                self._module,
                {**asked, "urls": self._urls, "data": str(data)},
                log_path=self._logs / f"{self._node}-files.log",
                result=result,
                read=read,
                write=(str(folder), *write),
            )
            try:
                exit = await asyncio.shield(child.exit)
            except asyncio.CancelledError:
                await self._processes.stop(child, 0.0)
                raise
            return await asyncio.to_thread(self._taken, result, data, asked, exit)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _taken(
        self, result: Path, data: Path, asked: dict[str, Any], exit: Exit
    ) -> tuple[dict[str, Any], bytes]:
        found = read_result(result, exit, f"opening {asked['url']} on {self._node}")
        if isinstance(found, Failure):
            if exit.code != 0:  # killed, or lost with its fork server: no word on the file
                raise Unavailable(found.text)
            raise ErrorReply(code=found.code, text=found.text, retryable=False).to_exception()
        try:
            return found, read_foreign(data, BLOCK_BYTES) if asked["what"] == "piece" else b""
        except OSError as error:
            raise Unavailable(
                f"reading {asked['url']} on {self._node} gave nothing: {error.strerror}"
            ) from None
