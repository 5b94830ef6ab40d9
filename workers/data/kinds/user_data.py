"""Kind `factory`: the user's own data set, or anything with a length and random access."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset

from bus.wire.secret_urls import filled
from schemas.errors import BadData, BadInput, DmscError
from schemas.job_file.data import SourceSpec
from workers.data.collating import named
from workers.data.kinds.decoding import by_its_bytes, image_tensor, is_image, seed_generators
from workers.data.kinds.spool import Spool, spooled, written
from workers.data.permutation import key_number
from workers.data.samples import Opening, Samples, UnreadableSample
from workers.user_code import describe, load

Finish = Callable[[Any, int, int | None], Any]
"""(item, its index, seed of its random transforms or None) → sample."""


class UserSamples:
    """Samples of the user's own code, each made under generators that are seeded for it.

    Args:
        items: Anything with `len` and `[index]`.
        what: Names it in texts: `data.factory mine:Digits`.
        names: Of the parts of a sample that is a tuple.
        finish: Makes the sample of an item; None: it is one.
        seed: The job's `training.seed`.
        digest: Of the data.
    """

    def __init__(
        self,
        items: Any,
        what: str,
        *,
        names: tuple[str, ...] = (),
        finish: Finish | None = None,
        seed: int = 0,
        digest: str | None = None,
    ) -> None:
        self._items, self._what, self._names = items, what, names
        self._finish = finish
        self._seed = seed
        self._size = len(items)
        self.digest = digest or self._first_digest()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.draw(index, None)

    def draw(self, index: int, seed: int | None) -> Mapping[str, Any]:
        values = named(_plain(self.raw(index, seed)), self._names, f"{self._what}[{index}]")
        return {name: image_tensor(value) if is_image(value) else value for name, value in values.items()}

    def raw(self, index: int, seed: int | None) -> Any:
        own = key_number(self._seed, index, "sample") if seed is None else seed
        seed_generators(own)
        try:
            item = self._items[index]
            return item if self._finish is None else self._finish(item, index, seed)
        except DmscError:
            raise
        except Exception as error:  # user code may raise anything
            text = f"{self._what}[{index}] failed: {describe(error)}"
            if by_its_bytes(error):
                raise UnreadableSample(text) from error
            if isinstance(error, OSError):
                raise
            raise BadData(text) from error

    def close(self) -> None:
        if isinstance(self._items, Spool):
            self._items.close()
        self._items = ()

    def _first_digest(self) -> str:
        """Of the length and of the first sample that can be read, so that nodes with other data notice."""
        digest = hashlib.sha256(f"{self._what} {self._size}".encode())
        for index in range(min(self._size, 8)):
            try:
                values = self.draw(index, None)
            except UnreadableSample:
                continue
            except BadData:
                break  # tuples without names: `data.collate` may know them; else the first batch says it
            for name, value in values.items():
                digest.update(name.encode() + _content(value))
            break
        return digest.hexdigest()


class TensorRows(UserSamples):
    """torch's `TensorDataset`: nothing of it is random, so many rows are taken at once."""

    def gather(self, indices: Sequence[int]) -> Mapping[str, Any]:
        rows = torch.tensor(indices, dtype=torch.int64)
        return named(tuple(part[rows] for part in self._items.tensors), self._names, self._what)


def open_factory(spec: SourceSpec, opening: Opening) -> Samples:
    """Kind factory.

    Raises:
        BadData: The factory fails, or gives something without a length.
        BadModel: It can't be loaded.
    """
    assert spec.factory is not None
    what = f"{opening.at}.factory {spec.factory}"
    made = called(load(spec.factory), spec.args, what, opening.seed)
    names = spec.names if isinstance(spec.names, tuple) else ()
    if spec.transform is None:
        return user_samples(made, what, spec, opening, names=names)
    transform = load(spec.transform)
    return user_samples(made, what, spec, opening, names=names, finish=lambda item, *_: transform(item))


def user_samples(
    made: Any,
    what: str,
    spec: SourceSpec,
    opening: Opening,
    *,
    names: tuple[str, ...] = (),
    finish: Finish | None = None,
) -> UserSamples:
    """What a factory gave, as samples; an iterable through a spool.

    Raises:
        BadData: It is neither.
    """
    if isinstance(made, IterableDataset) or not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        if not isinstance(made, Iterable):
            raise BadData(
                f"{what} returned a {type(made).__name__}; it must return something with a length and random "
                "access (a map-style Dataset, a list), or an iterable"
            )
        seed_generators(opening.seed)
        made = spooled(_guarded(made, what), opening.spool, limit=spec.limit, what=what)
    elif isinstance(made, Mapping):
        raise BadData(f"{what} returned a mapping; it must return samples by number, as a list does")
    digest = made.digest if isinstance(made, Spool) else None
    rows = TensorRows if type(made) is TensorDataset and finish is None else UserSamples
    return rows(made, what, names=names, finish=finish, seed=opening.seed, digest=digest)


def called(factory: Any, args: dict[str, Any], what: str, seed: int) -> Any:
    """What the user's factory returns, under seeded generators.

    Raises:
        BadData: It fails.
    """
    seed_generators(seed)
    try:
        return factory(**filled(args))
    except BadInput as error:
        raise BadData(f"{what}: {error.text}") from error
    except TypeError as error:
        raise BadData(f"{what} with args {args}: {describe(error)}") from error
    except Exception as error:  # user code may raise anything
        raise BadData(f"{what} failed: {describe(error)}") from error


def _guarded(items: Iterable[Any], what: str) -> Iterable[Any]:
    try:
        yield from items
    except (DmscError, GeneratorExit):
        raise
    except Exception as error:  # user code may raise anything
        raise BadData(f"{what} failed while it was read: {describe(error)}") from error


def _plain(item: Any) -> Any:
    """A named tuple or data class as a mapping; anything else as it is."""
    return item._asdict() if isinstance(item, tuple) and hasattr(item, "_asdict") else item


def _content(value: Any) -> bytes:
    try:
        return written(value)
    except Exception:  # users' objects may raise anything; what has no bytes is told by its type
        return type(value).__name__.encode()
