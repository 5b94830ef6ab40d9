"""Kind `huggingface`: data sets by the library `datasets`, from files, a saved folder or the hub.

| `source` | read by |
|---|---|
| a folder of `save_to_disk` | `load_from_disk` |
| any other folder or file | `load_dataset`, by its endings |
| `hf://datasets/OWNER/NAME` | `load_dataset` from the hub |

Nothing of a data set is executed: the library runs no code of data sets, and none is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bus.files.artifacts import SCHEME, open_filesystem
from schemas.errors import BadData, BadInput
from schemas.job_file.data import SourceSpec
from schemas.urls import local_path
from workers.data.kinds.decoding import is_image, library
from workers.data.kinds.images import ImageDecoder
from workers.data.kinds.user_data import UserSamples, user_samples
from workers.data.samples import Opening
from workers.data.source_files import files_digest, list_files
from workers.user_code import describe, load

HUB = "hf://datasets/"

_BUILDERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".txt": "text",
}


def open_huggingface(spec: SourceSpec, opening: Opening) -> UserSamples:
    """Kind huggingface.

    Raises:
        BadData: It can't be loaded, or a column is missing.
    """
    datasets = library("datasets", "huggingface", opening.at)
    datasets.disable_progress_bars()
    what = f"{opening.at}.source {spec.source}"
    loaded = _loaded(datasets, spec, opening, what)
    if isinstance(loaded, Mapping):
        if spec.split not in loaded:
            raise BadData(
                f"{what} has no split {spec.split!r}; there are {', '.join(loaded)}: say data.split"
            )
        loaded = loaded[spec.split]
    there = list(loaded.column_names or ())
    finish = _RowFinish(_wanted(spec, there, what), spec, opening.at)
    if not spec.streaming:
        digest = None if spec.source.startswith(HUB) else files_digest(_files(spec, opening), spec.split)
        return UserSamples(loaded, what, finish=finish, seed=opening.seed, digest=digest)
    return user_samples(iter(loaded), what, spec, opening, finish=finish)


def _files(spec: SourceSpec, opening: Opening) -> Any:
    return list_files(spec.source, opening.fetched, key=f"{opening.at}.source")


def _loaded(datasets: Any, spec: SourceSpec, opening: Opening, what: str) -> Any:
    options: dict[str, Any] = {"cache_dir": str(opening.spool), "streaming": spec.streaming}
    try:
        if spec.source.startswith(HUB):
            open_filesystem(spec.source)  # whether this node may open it
            name, _, revision = spec.source.removeprefix(HUB).partition("@")
            return datasets.load_dataset(
                name, spec.subset, split=spec.split, revision=revision or None, **options
            )
        if not spec.source.startswith(SCHEME):
            open_filesystem(spec.source)
        path = opening.fetched.get(spec.source) or Path(local_path(spec.source) or "")
        if not path.exists():
            raise BadData(f"{what} does not exist on this node; give a folder, a file or {HUB}OWNER/NAME")
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(str(path))
            return _streamed(loaded) if spec.streaming else loaded
        if path.is_file():
            return _of_file(datasets, path, what, options)
        return datasets.load_dataset(str(path), spec.subset, **options)
    except BadInput as error:
        raise error if isinstance(error, BadData) else BadData(f"{what}: {error.text}") from None
    except OSError as error:
        if error.errno is not None and not isinstance(error, FileNotFoundError):
            raise
        raise BadData(f"{what} can't be loaded: {describe(error)}") from error
    except Exception as error:  # the library raises whatever its readers raise
        raise BadData(f"{what} can't be loaded: {describe(error)}") from error


def _streamed(loaded: Any) -> Any:
    if isinstance(loaded, Mapping):
        return {name: each.to_iterable_dataset() for name, each in loaded.items()}
    return loaded.to_iterable_dataset()


def _of_file(datasets: Any, path: Path, what: str, options: dict[str, Any]) -> Any:
    builder = _BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise BadData(f"{what}: it ends with none of {', '.join(_BUILDERS)}")
    return datasets.load_dataset(builder, data_files=str(path), **options)


def _wanted(spec: SourceSpec, there: list[str], what: str) -> dict[str, tuple[str, ...]]:
    if spec.transform is not None and not spec.columns:
        return {}
    wanted = spec.columns or {name: name for name in there}
    found = {name: (each,) if isinstance(each, str) else each for name, each in wanted.items()}
    for name, columns in found.items():
        for column in columns:
            if there and column not in there and spec.transform is None:
                raise BadData(
                    f"data.columns.{name}: there is no column {column!r} in {what}; there are "
                    f"{', '.join(there)}"
                )
    return found


class _RowFinish:
    """From a row to a sample: the user's function, the columns under their names, images as tensors."""

    def __init__(self, wanted: Mapping[str, tuple[str, ...]], spec: SourceSpec, at: str) -> None:
        self._wanted, self._spec, self._at = wanted, spec, at
        self._transform = None if spec.transform is None else load(spec.transform)

    @functools.cached_property
    def _decode(self) -> ImageDecoder:
        return ImageDecoder(self._spec.model_copy(update={"transform": None}), self._at)

    def __call__(self, row: Mapping[str, Any], index: int, seed: int | None) -> Mapping[str, Any]:
        changed = dict(row) if self._transform is None else self._transform(dict(row))
        if self._wanted:
            changed = {name: self._picked(changed, name, columns) for name, columns in self._wanted.items()}
        return {
            name: self._decode(value, f"row {index}", index, seed) if is_image(value) else value
            for name, value in changed.items()
        }

    def _picked(self, row: Mapping[str, Any], name: str, columns: tuple[str, ...]) -> Any:
        for column in columns:
            if column not in row:
                raise BadData(f"{self._at}.columns: a sample has no {column!r}; it has {', '.join(row)}")
        values = [row[column] for column in columns]
        return values if isinstance(self._spec.columns.get(name), tuple) else values[0]
