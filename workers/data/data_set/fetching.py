"""What a job's data sets consist of, brought here before they are opened: manifests, and files on the bus.

A folder for each version and split: its manifest, and `objects` with those files that lie on the bus. These
are shared by the processes of a user on this node, if the node agent granted a folder for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bus.files.artifacts import SCHEME as BUS
from bus.files.artifacts import open_artifacts
from schemas.data_set.manifest import DataSetManifest
from schemas.data_set.units import StoredObject
from schemas.errors import BadData, BadInput, NotFound
from schemas.job_file.data import DataSpec, SourceSpec
from schemas.job_file.data_set_use import SCHEME, DataSetUse
from workers.data.storage.node_cache import shared_folder

if TYPE_CHECKING:
    from bus.connection import Bus

MANIFEST, OBJECTS, SHARED = "manifest.json", "objects", "data_sets"


def key_of(use: DataSetUse) -> str:
    """`dataset://NAME@VERSION/SPLIT`."""
    return f"{SCHEME}{use.name}@{use.version}/{use.split}"


def is_fetched(store: str) -> bool:
    """Whether files of this store are fetched whole before they are read; others are read by ranges."""
    return store.startswith(BUS)


def read_manifest(fetched: Mapping[str, Path], use: DataSetUse, at: str) -> DataSetManifest:
    """The manifest that was fetched for this version and split.

    Raises:
        BadData: None was.
    """
    folder = fetched.get(key_of(use))
    if folder is None:
        raise BadData(f"{at}.source {key_of(use)} was not fetched: not connected to a bus")
    return DataSetManifest.model_validate_json((folder / MANIFEST).read_bytes())


def with_split(part: SourceSpec, split: str | None = None) -> SourceSpec:
    """A source of a data set, named by version and split; `split`: another one of the same version."""
    assert part.data_set is not None
    use = part.data_set if split is None else part.data_set.model_copy(update={"split": split})
    return part.model_copy(update={"source": key_of(use), "data_set": use})


def held_out_of(use: DataSetUse) -> DataSetUse | None:
    """The split that is held out of this one."""
    return use.model_copy(update={"split": "validation"}) if use.split == "train" else None


async def fetch_data_sets(data: DataSpec, bus: Bus | None, folder: Path) -> dict[str, Path]:
    """Fetches what the job's data sets need: `key_of` → folder.

    Args:
        data: The job's data, whose versions are resolved.
        bus: The connection; None: there is none.
        folder: Of this process, empty.

    Raises:
        BadData: A version is not there, or is another one than the job was submitted with.
    """
    fetched: dict[str, Path] = {}
    for place, part in data.places().items():
        if part.data_set is None:
            if part.source.startswith(SCHEME):
                raise BadData(f"{place}.source {part.source} has no version yet: submit the job to a mesh")
            continue
        uses = [part.data_set]
        if data.held_out and place in _trained(data) and (other := held_out_of(part.data_set)) is not None:
            uses.append(other)
        for use in uses:
            if key_of(use) not in fetched:
                fetched[key_of(use)] = await _fetch(use, bus, folder / f"data-set-{len(fetched)}", place)
    return fetched


def _trained(data: DataSpec) -> set[str]:
    return {place for place in data.places() if not place.startswith("data.validation.")}


async def _fetch(use: DataSetUse, bus: Bus | None, folder: Path, place: str) -> Path:
    what = f"{place}.source {SCHEME}{use.name}@{use.version}"
    await asyncio.to_thread(folder.mkdir, parents=True)
    upper, _, name = use.manifest.rpartition("/")
    try:
        await open_artifacts(upper, bus).get_file(name, folder / MANIFEST)
        manifest = DataSetManifest.model_validate_json((folder / MANIFEST).read_bytes())
    except NotFound:
        raise BadData(f"{what} is not there any more; take another version") from None
    except BadInput as error:
        raise BadData(f"{what}: {error.text}") from None
    except ValueError:
        raise BadData(f"{what}: its manifest can't be read; build it again") from None
    if manifest.digest != use.digest:
        raise BadData(
            f"{what} has the digest {manifest.digest[:12]}…, and the job was submitted with "
            f"{use.digest[:12]}…: it is another data set; nothing of it is used"
        )
    if is_fetched(use.store):
        await _fetch_objects(use, manifest, bus, folder / OBJECTS, what)
    return folder


async def _fetch_objects(
    use: DataSetUse, manifest: DataSetManifest, bus: Bus | None, folder: Path, what: str
) -> None:
    await asyncio.to_thread(_make_folder, folder)
    artifacts = open_artifacts(use.store, bus)
    for stored in _objects(manifest, use.split):
        path = folder / stored.name
        if await asyncio.to_thread(_is_there, path, stored):
            continue
        try:
            await artifacts.get_file(stored.name, path)
        except NotFound:
            raise BadData(f"{what}: {stored.name} is not on the bus any more; build it again") from None
        except BadInput as error:
            raise BadData(f"{what}: {error.text}") from None
        if not await asyncio.to_thread(_is_whole, path, stored):
            raise BadData(
                f"{what}: {stored.name} on the bus does not hold what was built: it was changed or damaged; "
                "nothing of it is used"
            )


def _is_whole(path: Path, stored: StoredObject) -> bool:
    """Whether what has come is what was built; if not, it is removed."""
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == stored.sha256:
            return True
    path.unlink(missing_ok=True)
    return False


def _make_folder(folder: Path) -> None:
    """Makes a folder that stands for the one that is shared, if there is one that takes something now."""
    shared = shared_folder()
    if shared is not None:
        with contextlib.suppress(OSError):
            (shared / SHARED).mkdir(parents=True, exist_ok=True)
            folder.symlink_to(shared / SHARED)
            return
    folder.mkdir()


def _is_there(path: Path, stored: StoredObject) -> bool:
    """Whether a file is there; whoever reads it compares its content."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == stored.bytes:
            os.utime(path)  # the node agent removes what was used longest ago
            return True
    return False


def _objects(manifest: DataSetManifest, split: str) -> Iterable[StoredObject]:
    for shard in manifest.splits.get(split, ()):
        yield shard
        yield shard.index
