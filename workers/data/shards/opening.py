"""Which format the shards of a source have, and where they are kept meanwhile."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Mapping, Sequence

from schemas.errors import BadData, DmscError
from schemas.job_file.data import SourceSpec
from schemas.urls import BUS
from workers.data.samples import Opening
from workers.data.shards.decoding import ending_decoder, needs_pillow
from workers.data.shards.mds import INDEX, MdsShards
from workers.data.shards.shard_samples import RowSamples, ShardSamples, TransformedShardSamples
from workers.data.shards.webdataset import IndexFolder, TarShards
from workers.data.storage.node_cache import open_storage, shared_folder
from workers.data.storage.range_reader import Storage

MOST_FILES = 1 << 20
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def open_shards(spec: SourceSpec, opening: Opening) -> ShardSamples:
    """The samples of shards of MDS or WebDataset.

    `source` is a folder with `index.json` (MDS); a tar file, a folder of tar files, a glob, or names with
    braces (`train-{000..131}.tar`) are WebDataset. `columns` chooses: name of a batch → column, or ending.

    Raises:
        BadData: it is neither, or damaged, or holds what can't be read; one line with place and remedy.
        Unavailable: the store does not answer.
    """
    source = spec.source
    if source in opening.fetched:
        source = str(opening.fetched[source])
    elif source.startswith(BUS):
        raise BadData(f"{opening.at}.source {source} was not fetched: not connected to a bus")
    columns = _columns(spec.columns, opening.at)
    base, names = _matching(source, opening.at) if _is_pattern(source) else expanded(source, opening.at)
    storage = open_storage(base)
    try:
        shards = _tar_shards(storage, names, opening) if names else _found(storage, opening)
        if spec.transform is not None:
            _check_decoders(shards, storage, opening)
            return TransformedShardSamples(
                shards, storage, transform=spec.transform, at=opening.at, columns=columns
            )
        known = shards.columns if isinstance(shards, MdsShards) else dict.fromkeys(shards.endings, "")
        if missing := [column for column in columns.values() if column not in known]:
            raise BadData(
                f"{opening.at}.columns: there is no {missing[0]!r} in {storage.source.described('')}; "
                f"there are {', '.join(known)}"
            )
        chosen = [known[column] or column for column in columns.values() or known]
        _check_decoders(shards, storage, opening, chosen)
        kind = ShardSamples if shards.row_bytes is None else RowSamples
        return kind(shards, storage, columns=columns)
    except DmscError:
        storage.close()
        raise


def _check_decoders(
    shards: MdsShards | TarShards, storage: Storage, opening: Opening, chosen: Sequence[str] = ()
) -> None:
    """Refuses what can't be decoded here, of these encodings and endings, or of all."""
    if isinstance(shards, TarShards):
        chosen = chosen or shards.endings
        for ending in chosen:
            ending_decoder(ending, storage.source.described(""))
    else:
        chosen = chosen or list(shards.columns.values())
    if needs_pillow(chosen) and importlib.util.find_spec("PIL") is None:
        raise BadData(f"{opening.at}: images need pillow; install it on every node: pip install 'dmsc[data]'")


def _columns(columns: Mapping[str, str | tuple[str, ...]], at: str) -> dict[str, str]:
    for name, column in columns.items():
        if not isinstance(column, str):
            raise BadData(f"{at}.columns: {name} is made of several columns; give one, or a transform")
    return {name: str(column) for name, column in columns.items()}


def _found(storage: Storage, opening: Opening) -> MdsShards | TarShards:
    """The shards of a folder, or of one file."""
    source = storage.source
    if source.url.partition("?")[0].endswith(".tar"):
        return _tar_shards(storage, [""], opening)
    try:
        return MdsShards(storage, opening.at)
    except BadData as missing:
        if not isinstance(missing.__cause__, FileNotFoundError | NotADirectoryError):
            raise
    names = _tars(storage)
    if not names:
        raise BadData(
            f"{opening.at}.source {source.described('')} holds neither {INDEX} (MDS) nor .tar files "
            "(WebDataset)"
        )
    return _tar_shards(storage, names, opening)


def _tars(storage: Storage) -> list[str]:
    return [name for name in storage.names() if name.endswith(".tar")]


def _is_pattern(url: str) -> bool:
    return any(magic in url for magic in "*?[") and not url.startswith(("http:", "https:"))


def _matching(pattern: str, at: str) -> tuple[str, list[str]]:
    """A glob → the folder above its first wildcard, and the files below it that match."""
    storage = open_storage(pattern)
    try:
        names = _tars(storage)
    finally:
        storage.close()
    if not names:
        raise BadData(f"{at}.source {storage.source.described('')}: no tar file matches")
    first = min(pattern.index(magic) for magic in "*?[" if magic in pattern)
    return pattern[:first].rpartition("/")[0] or ".", names


def _tar_shards(storage: Storage, names: list[str], opening: Opening) -> TarShards:
    shared = shared_folder()
    folder = opening.spool / "indices" if shared is None else shared / "indices"
    return TarShards(storage, names, IndexFolder(folder))


def expanded(source: str, at: str) -> tuple[str, list[str]]:
    """A URL with braces → the folder that all its files share, and their names; without: itself, and none.

    `{000..131}` counts, with leading zeros as written; `{a,b}` lists.

    Raises:
        BadData: the braces name no files, or too many.
    """
    if not _BRACES.search(source):
        return source, []
    pieces = re.split(r"\{([^{}]*)\}", source)
    choices = [
        [piece] if place % 2 == 0 else _choices(piece, source, at) for place, piece in enumerate(pieces)
    ]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MOST_FILES:
        raise BadData(f"{at}.source {source} names {count:,} files; at most {MOST_FILES:,}")
    urls = ["".join(parts) for parts in itertools.product(*choices)]
    base = source[: source.index("{")].rpartition("/")[0]
    return base, [url.removeprefix(base).lstrip("/") for url in urls]


def _choices(piece: str, source: str, at: str) -> list[str]:
    if match := _RANGE.fullmatch(piece):
        low, high = match.groups()
        if int(low) <= int(high) < int(low) + MOST_FILES:
            width = len(low) if low.startswith("0") else 0
            return [f"{number:0{width}d}" for number in range(int(low), int(high) + 1)]
    elif "," in piece:
        return piece.split(",")
    raise BadData(f"{at}.source {source}: {{{piece}}} names no files; write {{000..131}} or {{a,b}}")
