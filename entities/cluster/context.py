"""`NodeContext`: what the parts of a node agent share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bus.files.removal import remove_folder
from bus.subject_row import Subject
from entities.cluster.cache_folders import CacheFolders
from entities.cluster.config import ClusterConfig
from entities.cluster.file_reach import FileRules
from entities.cluster.fork_server_client import ForkServerClient
from schemas.base import Message


class CommandSender(Protocol):
    """Sends a command that should arrive even if its receiver is restarting; raises its refusal."""

    async def __call__(self, row: Subject, message: Message, **tokens: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What the parts of a node agent share."""

    config: ClusterConfig
    processes: ForkServerClient
    """The fork server that runs instances and workers."""
    files: FileRules
    """The files that jobs may use on this node."""
    caches: CacheFolders
    """The node's cache of remote data."""
    credential: Callable[[str, str], str | None]
    """Returns the credential of a process for the bus; arguments: SID and job."""
    start_task: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    """Runs a coroutine as one of the agent's tasks."""
    send: CommandSender
    """Sends commands to the registry and the orchestrator."""

    @property
    def payload(self) -> dict[str, Any]:
        """The part of the processes' payload that is the same for all."""
        config = self.config
        return {
            "cluster": config.cluster,
            "node": config.node,
            "servers": list(config.servers),
            "urls": None if config.allow_urls is None else list(config.allow_urls),
        }

    @asynccontextmanager
    async def worker_folder(self, name: str, ready_s: float) -> AsyncIterator[Path]:
        """A new folder for the result of one worker, removed at the end of the block.

        Raises:
            Unavailable: the fork server is not ready within `ready_s`.
        """
        await self.processes.wait_ready(ready_s)
        assert self.processes.scratch is not None
        folder = self.processes.scratch / name
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            await asyncio.to_thread(remove_folder, folder)
