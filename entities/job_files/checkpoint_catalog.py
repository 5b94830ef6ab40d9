"""The checkpoints of a job in the artifact store, as they are found there.

One folder each, `<version>-<epoch>-<number>`: no two tries of any orchestrator share one. A folder counts
from the moment that its manifest is there, which is written last.
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
    """Sorts by age: version, then epoch, then the number of the try."""

    version: int
    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.version:08d}-{self.epoch}-{self.number}"


Opener = Callable[[str], ReadableArtifacts]
"""How this process comes by the files below a URL."""


class PublishedCheckpoints:
    """To be read. `url`: the folder of all checkpoints of one job."""

    def __init__(self, open_url: Opener, url: str) -> None:
        self._open_url = open_url
        self.url = url.rstrip("/")

    def url_of(self, folder: CheckpointFolder) -> str:
        return f"{self.url}/{folder}"

    async def published(self) -> list[CheckpointFolder]:
        """Those with a manifest, the newest first."""
        return with_manifest(await self.all())

    async def all(self) -> dict[CheckpointFolder, set[str]]:
        """Every folder, and the files in it."""
        found: dict[CheckpointFolder, set[str]] = {}
        for name in await self._open_url(self.url).list():
            first, _, rest = name.partition("/")
            if match := _folder.match(first):
                folder = CheckpointFolder(*(int(part) for part in match.groups()))
                found.setdefault(folder, set()).add(rest)
        return found


def with_manifest(found: Mapping[CheckpointFolder, Container[str]]) -> list[CheckpointFolder]:
    """Of all folders, those that are published; the newest first."""
    return sorted((folder for folder, names in found.items() if MANIFEST_NAME in names), reverse=True)


async def read_manifest(open_url: Opener, url: str) -> CheckpointManifest:
    """The manifest in the folder `url`.

    Raises:
        DamagedCheckpoint: there is none, or it can't be used.
    """
    where = f"{url}/{MANIFEST_NAME}"
    try:
        data = await open_url(url).get_bytes(MANIFEST_NAME)
    except NotFound:
        raise DamagedCheckpoint(f"{where} is missing") from None
    except (Conflict, BadMessage) as error:  # the bus's store: pieces of it are gone, or not as stored
        raise DamagedCheckpoint(f"{where} is damaged: {error.text}") from None
    return parse_manifest(data, where)


async def checkpoints_at(open_url: Opener, url: str) -> list[str]:
    """The checkpoints that a person may mean by `url`: this folder, or those in it, the newest first."""
    url = url.rstrip("/")
    artifacts = open_url(url)
    if await artifacts.exists(MANIFEST_NAME):
        return [url]
    names = [name for name in await artifacts.list() if name.endswith(f"/{MANIFEST_NAME}")]
    folders = [name.removesuffix(f"/{MANIFEST_NAME}") for name in names]
    return [f"{url}/{folder}" for folder in sorted(folders, key=_age, reverse=True)]


def _age(path: str) -> tuple[int, ...]:
    """For sorting by `CheckpointFolder`'s order; folders of other names come before all."""
    match = _folder.match(path.rsplit("/", 1)[-1])
    return tuple(int(part) for part in match.groups()) if match else ()
