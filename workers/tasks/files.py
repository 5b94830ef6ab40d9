"""Reads below one URL of a job, or removes checkpoints there, for services that must not open it (ADR-0040).

It runs in a short-lived worker. No user code runs here, but the files are users', and file systems are
complex: so the process is confined to the one folder that the URL names.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from bus.files.artifacts import open_artifacts
from schemas.checkpoint import MANIFEST_NAME
from schemas.errors import BadInput
from schemas.files import NAME_CHARACTERS, PAGE_NAMES, PIECE_BYTES
from workers.tasks.short_lived import answer


def main(payload: dict[str, Any], result: Path | None = None) -> int:
    """Entry point under the fork server: writes {"size"}, {"names", "more"}, {} or {"failed": …}.

    Args:
        payload: With url; what: `piece` with name, start, count and `data`, the path for the bytes; `list`
            with name and after; `remove` with folders; `remove_files` with names; urls: those that the node's
            jobs may name; secrets: the values of `secret://` URLs.
        result: The file to write.
    """
    return answer(_run, payload, result)


async def _run(payload: dict[str, Any]) -> dict[str, Any]:
    work = {"list": _list, "piece": _piece, "remove": _remove, "remove_files": _remove_files}
    return await work[payload["what"]](payload)


async def _piece(payload: dict[str, Any]) -> dict[str, Any]:
    artifacts = open_artifacts(payload["url"], None)
    name, start, count = payload["name"], payload["start"], payload["count"]
    size = await artifacts.size(name)
    with open(payload["data"], "xb") as file:  # noqa: ASYNC230  # no other task runs on this loop
        if count and start < size:
            async for piece in artifacts.open_range(name, start, min(count, size - start)):
                file.write(piece)
    return {"size": size}


async def _list(payload: dict[str, Any]) -> dict[str, Any]:
    names = await open_artifacts(payload["url"], None).list(payload["name"])
    if any(len(name) > NAME_CHARACTERS for name in names):
        raise BadInput(f"{payload['url']}: a name there has more than {NAME_CHARACTERS} characters")
    rest = [name for name in names if name > payload["after"]]
    sizes = itertools.accumulate(len(name.encode()) for name in rest[:PAGE_NAMES])
    page = rest[: sum(size <= PIECE_BYTES for size in sizes)]
    return {"names": page, "more": len(rest) > len(page)}


async def _remove_files(payload: dict[str, Any]) -> dict[str, Any]:
    folder = open_artifacts(payload["url"], None)
    for name in payload["names"]:
        await folder.delete_one(name)
    return {}


async def _remove(payload: dict[str, Any]) -> dict[str, Any]:
    """Removes checkpoints, manifests first, so that one that is half removed does not count."""
    folders = [open_artifacts(f"{payload['url']}/{name}", None) for name in payload["folders"]]
    for folder in folders:
        await folder.delete(MANIFEST_NAME)
    for folder in folders:
        await folder.delete()
    return {}
