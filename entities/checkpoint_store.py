"""The checkpoints of a job in the artifact store: found, published, removed.

One folder each, `<version>-<epoch>-<number>`: no two tries of any orchestrator share one. A folder counts
from the moment that its manifest is there, which is written last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass

from bus.artifacts import Artifacts, ReadableArtifacts, open_artifacts
from bus.connection import Bus
from schemas.checkpoint import MANIFEST_NAME, CheckpointManifest, parse_manifest
from schemas.errors import BadMessage, Conflict, DamagedCheckpoint, NotFound


def checkpoints_url(artifacts: str, job: str) -> str:
    """The folder of all checkpoints of a job, below its `artifacts`."""
    return f"{artifacts.rstrip('/')}/{job}/checkpoints"


_folder = re.compile(r"^(\d{8,})-(\d+)-(\d+)$")


@dataclass(frozen=True, order=True)
class Folder:
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

    def url_of(self, folder: Folder) -> str:
        return f"{self.url}/{folder}"

    async def published(self) -> list[Folder]:
        """Those with a manifest, the newest first."""
        return sorted((folder for folder, complete in (await self._all()).items() if complete), reverse=True)

    async def _all(self) -> dict[Folder, bool]:
        """Every folder, and whether it has a manifest."""
        found: dict[Folder, bool] = {}
        for name in await self._open_url(self.url).list():
            first, _, rest = name.partition("/")
            if match := _folder.match(first):
                folder = Folder(*(int(part) for part in match.groups()))
                found[folder] = found.get(folder, False) or rest == MANIFEST_NAME
        return found


class CheckpointStore(PublishedCheckpoints):
    """The same, to be written too."""

    def __init__(self, bus: Bus, url: str) -> None:
        super().__init__(lambda url: open_artifacts(url, bus), url)
        self._bus = bus

    async def publish(self, folder: Folder, manifest: CheckpointManifest) -> None:
        """The last file: from now on this checkpoint exists."""
        await self._open(folder).put_bytes(MANIFEST_NAME, manifest.to_json())

    async def remove(self, folder: Folder) -> None:
        """The manifest first, so that what is half removed does not count."""
        artifacts = self._open(folder)
        await artifacts.delete(MANIFEST_NAME)
        await artifacts.delete()

    async def sweep(self, keep: Container[Folder], *, epoch: int) -> list[Folder]:
        """Removes all but those to keep, also what was never published; nothing of a later `epoch`."""
        doomed = [folder for folder in await self._all() if folder not in keep and folder.epoch <= epoch]
        for folder in doomed:
            await self.remove(folder)
        return doomed

    def _open(self, folder: Folder) -> Artifacts:
        return open_artifacts(self.url_of(folder), self._bus)


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
    """For sorting by `Folder`'s order; folders of other names come before all."""
    match = _folder.match(path.rsplit("/", 1)[-1])
    return tuple(int(part) for part in match.groups()) if match else ()
