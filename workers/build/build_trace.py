"""Watches the tensor operations of a build, and keeps only the memory that somebody needs (ADR-0050).

Tensors' storages are numbered in the order of their creation, which is the same in every run of the same
factory. A large storage whose number is not needed keeps its tensors (of the true type, shape and device) and
loses its memory; operations on it compute shapes alone. Random operations still move their generator, so that
every needed value is what the whole build makes it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from workers.build.generator_advance import advance, draws_of

SMALL_BYTES = 1 << 16
"""Storages up to this size always keep their memory: tables of drop rates, norms, biases, counters."""

_CPU, _META = torch.device("cpu"), torch.device("meta")


class ValueNeeded(BaseException):
    """A value is read that this run has not computed.

    No `Exception`: the factory's own handlers must not take it for an error of the model.
    """

    def __init__(self, numbers: Iterable[int], operation: str) -> None:
        super().__init__(operation)
        self.numbers = frozenset(numbers)
        self.operation = operation


@dataclass(slots=True)
class StorageRecord:
    """What is known about one storage of the build."""

    number: int
    bytes: int
    created_by: str
    sources: set[int] = field(default_factory=set)
    """Numbers of the storages whose values went into this one."""
    known: bool = True
    """Whether its memory holds what the whole build has there."""
    random: bool = False


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an operation does with memory, by its schema."""

    written: frozenset[int | str]
    view: bool
    random: bool
    overwrites: bool
    factory: bool


class BuildTrace:
    """One run of a factory.

    Args:
        needed: Numbers of the storages that keep their memory.
        draw: Whether random values are drawn. Without, the run is quick and random values are not known.
        small_bytes: See `SMALL_BYTES`.
    """

    def __init__(
        self, needed: frozenset[int] = frozenset(), *, draw: bool, small_bytes: int = SMALL_BYTES
    ) -> None:
        self.records: list[StorageRecord] = []
        self._needed = needed
        self._draw = draw
        self._small_bytes = small_bytes
        self._numbers: dict[int, int] = {}
        self._weak: list[Any] = []  # weak references, as torch gives them: integers

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with _RawAccesses(self), _Operations(self):
            yield

    def close(self) -> None:
        """Releases the addresses by which storages are recognised."""
        for pointer in self._weak:
            torch.UntypedStorage._free_weak_ref(pointer)  # type: ignore[no-untyped-call]  # torch: unannotated
        self._weak.clear()
        self._numbers.clear()

    def record(self, tensor: Tensor, created_by: str = "given") -> StorageRecord | None:
        """The record of a tensor's storage; a new one for memory that no operation has made.

        None: the tensor is on another device, or has no single storage.
        """
        if tensor.device != _CPU or tensor.layout is not torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return None
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self.records)
            self._weak.append(storage._weak_ref())  # keeps the address, not the memory
            self.records.append(StorageRecord(number, storage.nbytes(), created_by))
        return self.records[number]

    def alive(self) -> Iterator[StorageRecord]:
        """The records whose storages some tensor still has."""
        for pointer, record in zip(self._weak, self.records, strict=True):
            if not torch.UntypedStorage._expired(pointer):
                yield record

    def unknown(self, tensors: Iterable[Tensor]) -> set[int]:
        """Numbers of those tensors' storages whose values this run does not have."""
        records = (self.record(tensor) for tensor in tensors)
        return {record.number for record in records if record is not None and not record.known}

    # --- one operation ----------------------------------------------------------------------------------
    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = _kind(operation)
        for tensor in _tensors(args, kwargs):
            self.record(tensor)  # numbered by their order here, whatever becomes of the operation
        if kind.view:
            with self._present(_tensors(args, kwargs)):
                return operation(*args, **kwargs)
        written = _written(kind, args, kwargs)
        read = [
            tensor
            for tensor in _tensors(args, kwargs)
            if not (any(tensor is one for one in written) and self._overwritten(kind, tensor))
        ]
        if kind.random:
            return self._random(operation, kind, args, kwargs, written, read)
        if self.unknown(read) or any(self._is_evicted(tensor) for tensor in written):
            return self._shapes_alone(operation, args, kwargs, written, read)
        if (
            kind.factory
            and not read
            and (result := self._evicted_factory(operation, args, kwargs)) is not None
        ):
            return result
        return self._computed(operation, operation(*args, **kwargs), written, read)

    def _computed(
        self,
        operation: Any,
        result: Any,
        written: Sequence[Tensor],
        read: Sequence[Tensor],
        *,
        random: bool = False,
    ) -> Any:
        """Notes where the values of a real operation come from; drops those that nobody needs."""
        sources = self._sources(read)
        random = random or any(self.records[number].random for number in sources)
        for tensor in written:
            self._note(tensor, sources, known=True, random=random)
        for tensor in _tensors((result,), {}):
            if any(tensor is one for one in written):
                continue
            made = tensor.device == _CPU and tensor.layout is torch.strided and self._is_new(tensor)
            self._note(tensor, sources, known=True, random=random, created_by=_name(operation))
            if made:
                self._evict_unneeded(tensor)
        return result

    def _random(
        self,
        operation: Any,
        kind: _Kind,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[Tensor],
        read: Sequence[Tensor],
    ) -> Any:
        if not self._draw:
            if (
                not read
                and not written
                and (result := self._evicted_factory(operation, args, kwargs)) is not None
            ):
                self._note(result, set(), known=False, random=True)
                return result
            if not written and not read:  # a small factory: its shape is right, its values are not
                with torch.random.fork_rng(devices=[]):
                    result = operation(*args, **kwargs)
                for tensor in _tensors((result,), {}):
                    self._note(tensor, set(), known=False, random=True, created_by=_name(operation))
                return result
            return self._shapes_alone(operation, args, kwargs, written, read, random=True)
        if not self.unknown(read) and not any(self._is_evicted(tensor) for tensor in written):
            return self._computed(operation, operation(*args, **kwargs), written, read, random=True)
        unread = self.unknown(one for one in read if not any(one is other for other in written))
        if unread and operation._schema.name not in _DRAWS_WITHOUT_VALUES:
            raise ValueNeeded(unread, _name(operation))
        self._advance(operation, args, kwargs, written)
        return self._shapes_alone(operation, args, kwargs, written, read, random=True)

    def _advance(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor]
    ) -> None:
        """Moves the generator as the operation would, with one temporary tensor at most."""
        draws = (
            draws_of(_name(operation), written[0]) if len(written) == 1 and args[0] is written[0] else None
        )
        if draws is not None:
            advance(draws, kwargs.get("generator"))
            return

        def stand_in(tensor: Tensor) -> Tensor:
            if tensor.device != _CPU or not (self._is_evicted(tensor) or self.unknown([tensor])):
                return tensor
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).zero_()

        operation(*_mapped(args, stand_in), **_mapped(kwargs, stand_in))

    def _shapes_alone(
        self,
        operation: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[Tensor],
        read: Sequence[Tensor],
        *,
        random: bool = False,
    ) -> Any:
        """Runs the operation on shapes: what it writes and makes is not known from now on."""
        originals: dict[int, Tensor] = {}
        metas: dict[int, Tensor] = {}

        def to_meta(tensor: Tensor) -> Tensor:
            if id(tensor) not in metas:
                if tensor.device not in (_CPU, _META):
                    raise ValueNeeded(self.unknown(read), _name(operation))
                meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
                metas[id(tensor)], originals[id(meta)] = meta, tensor
            return metas[id(tensor)]

        sources = self._sources(read)
        if any(self._must_keep(tensor) for tensor in written):
            raise ValueNeeded(self.unknown(read), _name(operation))
        if len(written) == 1 and not any(tensor is not written[0] for tensor in _tensors(args, kwargs)):
            self._note(written[0], sources, known=False, random=random)
            return written[0]  # fills or changes one tensor in place: nothing to compute
        try:
            result = operation(*_mapped(args, to_meta), **_on_meta(_mapped(kwargs, to_meta)))
        except (RuntimeError, NotImplementedError):  # it needs values: .item(), nonzero, a comparison
            raise ValueNeeded(self.unknown(read), _name(operation)) from None
        if not all(isinstance(item, Tensor) or item is None for item in _leaves(result)):
            raise ValueNeeded(self.unknown(read), _name(operation))
        for tensor in written:
            self._note(tensor, sources, known=False, random=random)

        def from_meta(meta: Tensor) -> Tensor:
            if (original := originals.get(id(meta))) is not None:
                return original
            tensor = self._without_memory(meta, _name(operation))
            self._note(tensor, sources, known=False, random=random, created_by=_name(operation))
            return tensor

        return _mapped(result, from_meta)

    def _evicted_factory(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """The result of a factory such as `zeros` or `randn` without its memory, if nobody needs that."""
        if kwargs.get("device") not in (None, _CPU) or len(self.records) in self._needed:
            return None
        try:
            meta = operation(*args, **{**kwargs, "device": _META, "pin_memory": None})
        except (RuntimeError, NotImplementedError, TypeError):
            return None
        if not isinstance(meta, Tensor) or meta.untyped_storage().nbytes() <= self._small_bytes:
            return None
        tensor = self._without_memory(meta, _name(operation))
        self._note(tensor, set(), known=False, random=False, created_by=_name(operation))
        return tensor

    # --- memory -----------------------------------------------------------------------------------------
    def _without_memory(self, meta: Tensor, created_by: str) -> Tensor:
        """A tensor as `meta`, but on the CPU, of a storage without memory unless it is small."""
        size = meta.untyped_storage().nbytes()
        storage = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]  # torch: unannotated
        tensor = torch.empty(0, dtype=meta.dtype)
        tensor.set_(storage, meta.storage_offset(), meta.size(), meta.stride())
        record = self.record(tensor, created_by)
        assert record is not None
        if record.bytes > self._small_bytes:
            storage.resize_(0)
        elif not meta.dtype.is_floating_point:
            tensor.zero_()
        return tensor

    def _evict_unneeded(self, tensor: Tensor) -> None:
        record = self.record(tensor)
        if record is not None and record.number not in self._needed and record.bytes > self._small_bytes:
            tensor.untyped_storage().resize_(0)
            record.known = False

    def _is_new(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._numbers

    def _is_evicted(self, tensor: Tensor) -> bool:
        record = self.record(tensor)
        return record is not None and bool(record.bytes) and not tensor.untyped_storage().nbytes()

    def _must_keep(self, tensor: Tensor) -> bool:
        record = self.record(tensor)
        return self._draw and record is not None and record.number in self._needed

    def _overwritten(self, kind: _Kind, tensor: Tensor) -> bool:
        """Whether an operation replaces all that the tensor's storage holds."""
        record = self.record(tensor)
        whole = record is not None and tensor.numel() * tensor.element_size() == record.bytes
        return kind.overwrites and whole and not self._is_evicted(tensor)

    @contextlib.contextmanager
    def _present(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Gives evicted storages (untouched) memory for a moment: views are checked against its size."""
        grown: list[torch.UntypedStorage] = []
        for tensor in tensors:
            if self._is_evicted(tensor):
                record, storage = self.record(tensor), tensor.untyped_storage()
                assert record is not None
                storage.resize_(record.bytes)
                grown.append(storage)
        try:
            yield
        finally:
            for storage in grown:
                storage.resize_(0)

    def _sources(self, read: Iterable[Tensor]) -> set[int]:
        records = (self.record(tensor) for tensor in read)
        return {record.number for record in records if record is not None}

    def _note(
        self, tensor: Tensor, sources: set[int], *, known: bool, random: bool, created_by: str = "given"
    ) -> None:
        record = self.record(tensor, created_by)
        if record is None:
            return
        record.sources |= sources - {record.number}
        record.known = known
        record.random = record.random or random or any(self.records[one].random for one in sources)


_DRAWS_WITHOUT_VALUES = frozenset(
    {"aten::bernoulli", "aten::bernoulli_", "aten::native_dropout", "aten::normal", "aten::normal_functional"}
    | {"aten::rand_like", "aten::randn_like", "aten::randint_like"}
)
"""Random operations that draw as often whatever their inputs hold."""

_OVERWRITING = frozenset({"aten::zero_", "aten::fill_", "aten::copy_", "aten::normal_", "aten::uniform_"})


@functools.cache
def _kind(operation: Any) -> _Kind:
    schema = operation._schema
    written = frozenset(
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliases = any(value.alias_info is not None for value in schema.returns)
    names = {argument.name for argument in schema.arguments}
    random = torch.Tag.nondeterministic_seeded in operation.tags or "generator" in names
    return _Kind(
        written=written,
        view=(aliases and not written) or torch.Tag.inplace_view in operation.tags,
        random=random,
        overwrites=schema.name in _OVERWRITING or (random and bool(written)),
        factory="device" in names,
    )


def _written(kind: _Kind, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    places = [
        args[key] if isinstance(key, int) else kwargs.get(key)
        for key in kind.written
        if isinstance(key, str) or key < len(args)
    ]
    return list(_tensors(tuple(places), {}))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [item for item in _leaves((*args, *kwargs.values())) if isinstance(item, Tensor)]


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": _META}
    return {
        key: None if key == "pin_memory" else value for key, value in kwargs.items() if key != "generator"
    }


def _name(operation: Any) -> str:
    return str(operation._schema.name).removeprefix("aten::")


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: unannotated
    """Hands each operation of the build to the trace."""

    def __init__(self, trace: BuildTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: unannotated
        self._trace = trace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To skip torch's compiler, torch imports it, which costs as much as torch itself."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._trace.run(func, tuple(args), dict(kwargs or {}))


_RAW = frozenset(
    {"numpy", "__array__", "tolist", "__dlpack__", "__reduce_ex__", "untyped_storage", "storage"}
    | {"_typed_storage", "share_memory_", "pin_memory"}
)
"""Methods of a tensor that read its memory past all operations."""


class _RawAccesses(TorchFunctionMode):
    """Sees to it that no raw read meets memory that is not there; copies deeply by operations."""

    def __init__(self, trace: BuildTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], Tensor):
            if name in _RAW and (unknown := self._trace.unknown(args[:1])):
                raise ValueNeeded(unknown, f"Tensor.{name}")
            if name == "data_ptr" and (unknown := self._trace.unknown(args[:1])):
                return -1 - next(iter(unknown)) - (int(args[0].storage_offset()) << 32)
            if func is Tensor.__deepcopy__ and type(args[0]) is Tensor and args[0].is_leaf:
                return self._deep_copy(*args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            copy = tensor.detach().clone(memory_format=torch.preserve_format)
            memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
        result: Tensor = memo[id(tensor)]
        return result
