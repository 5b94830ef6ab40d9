"""The checkpoints of a job that the artifact store has.

Each has a folder `<version>-<epoch>-<number>`, which no two attempts of any orchestrator share. A folder
counts as a checkpoint once it has a manifest, which is written last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from bus.files.artifacts import ReadableArtifacts
from schemas.checkpoint import MANIFEST_NAME, CheckpointManifest, parse_manifest
from schemas.errors import BadMessage, Conflict, DamagedCheckpoint, NotFound

_folder = re.compile(r"^(\d{8,})-(\d+)-(\d+)$")


@dataclass(frozen=True, order=True)
class CheckpointFolder:
    """The name of a checkpoint's folder. Sorts by age: version, then epoch, then number of the attempt."""

    version: int
    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.version:08d}-{self.epoch}-{self.number}"


Opener = Callable[[str], ReadableArtifacts]
"""Opens the files below a URL for this process."""


class PublishedCheckpoints:
    """Reads the checkpoints of one job; `url` is the folder of all of them."""

    def __init__(self, open_url: Opener, url: str) -> None:
        self._open_url = open_url
        self.url = url.rstrip("/")

    def url_of(self, folder: CheckpointFolder) -> str:
        return f"{self.url}/{folder}"

    async def published(self) -> list[CheckpointFolder]:
        """The folders with a manifest, the newest first."""
        return with_manifest(await self.all())

    async def all(self) -> dict[CheckpointFolder, set[str]]:
        """Every folder and the names of its files."""
        folders: dict[CheckpointFolder, set[str]] = {}
        for name in await self._open_url(self.url).list():
            first, _, rest = name.partition("/")
            if match := _folder.match(first):
                folder = CheckpointFolder(*(int(part) for part in match.groups()))
                folders.setdefault(folder, set()).add(rest)
        return folders


def with_manifest(folders: Mapping[CheckpointFolder, Container[str]]) -> list[CheckpointFolder]:
    """The published ones of these folders, the newest first."""
    return sorted((folder for folder, names in folders.items() if MANIFEST_NAME in names), reverse=True)


async def read_manifest(open_url: Opener, url: str) -> CheckpointManifest:
    """The manifest in the folder `url`.

    Raises:
        DamagedCheckpoint: there is no manifest, or it can't be used.
    """
    where = f"{url}/{MANIFEST_NAME}"
    try:
        data = await open_url(url).get_bytes(MANIFEST_NAME)
    except NotFound:
        raise DamagedCheckpoint(f"{where} is missing") from None
    except (Conflict, BadMessage) as error:  # the bus's object store: chunks are missing or altered
        raise DamagedCheckpoint(f"{where} is damaged: {error.text}") from None
    return parse_manifest(data, where)


async def checkpoints_at(open_url: Opener, url: str) -> list[str]:
    """The checkpoints that a user may mean by `url`: this folder, or those in it, the newest first."""
    url = url.rstrip("/")
    artifacts = open_url(url)
    if await artifacts.exists(MANIFEST_NAME):
        return [url]
    names = [name for name in await artifacts.list() if name.endswith(f"/{MANIFEST_NAME}")]
    folders = [name.removesuffix(f"/{MANIFEST_NAME}") for name in names]
    return [f"{url}/{folder}" for folder in sorted(folders, key=_age, reverse=True)]


def _age(path: str) -> tuple[int, ...]:
    """Sort key in `CheckpointFolder`'s order; folders with other names come first."""
    match = _folder.match(path.rsplit("/", 1)[-1])
    return tuple(int(part) for part in match.groups()) if match else ()
