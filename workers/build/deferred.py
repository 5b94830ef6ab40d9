"""The deferred build: a model's outline without its memory, and a model with what is needed (ADR-0050).

    outline = outline_of(factory)                          # names, shapes, bytes, ties; every weight on meta
    built = build_needed(factory, ["layers.3"], outline)   # layer 3 has the bits of the whole build

The factory is any callable that returns a module. It runs once for the outline, which draws no random
numbers, and once for each build, which draws them all. Where a needed value comes from another tensor (a
copy, a decomposition), that one is computed too; where the build decides by a value (`.item()`), likewise.
What can't be deferred is built whole; `because` says why.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from workers.build.build_trace import SMALL_BYTES, BuildTrace, StorageRecord, ValueNeeded
from workers.build.model_tensors import (
    attribute_tensors,
    give_memory,
    modules_of,
    move_to_meta,
    named_tensors,
    unsaved_names,
)

Factory = Callable[[], Any]
"""Returns a module, a list or dictionary of modules, or an object that holds one as `model`."""

MOST_RUNS = 16
"""Outlines that are tried, each with the values that the former one lacked, before a build is made whole."""

BUFFER_BYTES = 256 << 20
"""Bytes of buffers (masks, tables of angles) that an outline computes, as long as they are not random."""


@dataclass(frozen=True, slots=True)
class TensorOutline:
    """A parameter or buffer of the model.

    `storage` is equal for tensors that share memory; `bytes` counts that memory once for all of them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    storage: int
    trained: bool
    parameter: bool
    saved: bool = True
    """Whether it belongs to the model's weights: a parameter, or a persistent buffer."""


@dataclass(frozen=True)
class ModelOutline:
    """What a factory builds.

    Attributes:
        model: The factory's result with its weights on the device `meta`; buffers that are small or not
            random have their values.
        tensors: Full name → parameter or buffer. A tensor with several names has all of them.
        because: Why the build can't be deferred; empty: it can.
    """

    model: Any
    tensors: Mapping[str, TensorOutline]
    because: str = ""
    _sources: Mapping[int, frozenset[int]] = field(default_factory=dict)
    _random: frozenset[int] = frozenset()
    _always: frozenset[int] = frozenset()
    _attributes: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all parameters and buffers, shared ones once."""
        return sum({tensor.storage: tensor.bytes for tensor in self.tensors.values()}.values())

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names whose tensors share memory."""
        groups: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            groups.setdefault(tensor.storage, []).append(name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)

    def names(self, needed: Collection[str]) -> list[str]:
        """The names of tensors that are one of `needed`, or below it: `layers.3` names its whole layer."""
        return [name for name in self.tensors if _is_below(name, needed)]

    def storages(self, needed: Collection[str], given: Collection[str] = ()) -> frozenset[int]:
        """The storages of a build that these names need, with all that their values come from.

        The values of the names `given` come from elsewhere.
        """
        wanted = {self.tensors[name].storage for name in self.names(needed) if name not in given}
        for module, numbers in self._attributes.items():
            if _is_below(module, needed) or any(_is_below(name, [module]) for name in needed):
                wanted |= numbers
        return _closure(wanted | self._always, self._sources)


@dataclass(frozen=True)
class PartialModel:
    """A model with the tensors that were asked for; the others are on `meta`.

    `because` says why it was built whole first; empty: it was not.
    """

    model: Any
    because: str = ""


def outline_of(factory: Factory, *, small_bytes: int = SMALL_BYTES) -> ModelOutline:
    """The outline of what a factory builds; random generators are left as they were.

    Raises:
        Exception: What the factory raises.
    """
    forced: frozenset[int] = frozenset()
    because = ""
    for _ in range(MOST_RUNS):
        with _same_generators():
            trace = BuildTrace(forced, draw=bool(forced), small_bytes=small_bytes)
            try:
                with trace.watching():
                    model = factory()
                outline = _outlined(model, trace, forced)
            except ValueNeeded as error:
                missing = _closure(error.numbers, _sources_of(trace)) - forced
                because = f"{error.operation} reads a value that the build has not computed"
                if not missing:
                    break
                forced |= missing
                continue
            except Exception as error:  # user code may raise anything; so may an operation without memory
                because = f"{type(error).__name__}: {error}".splitlines()[0]
                break
            finally:
                model = None
                trace.close()
        if not (more := outline._always - forced):
            return outline
        forced |= more
    with _same_generators():
        return _whole_outline(factory(), because)


def build_needed(
    factory: Factory,
    needed: Collection[str],
    outline: ModelOutline | None = None,
    *,
    given: Collection[str] = (),
    small_bytes: int = SMALL_BYTES,
) -> PartialModel:
    """Builds the tensors named, to the bits of the whole build; the others are on `meta`.

    The generators are left as the whole build leaves them, unless no random value was needed.

    Args:
        factory: Builds the whole model, from the same generators as the outline's.
        needed: Names of modules, parameters or buffers.
        outline: Of the same factory; made here if it is missing.
        given: Names of tensors among them that the caller fills: they get memory, and any values.
        small_bytes: See `build_trace.SMALL_BYTES`.

    Raises:
        Exception: What the factory raises.
    """
    outline = outline or outline_of(factory, small_bytes=small_bytes)
    because = outline.because
    if not because:
        before = _generators()
        model, because = _deferred(factory, needed, outline, frozenset(given), small_bytes)
        if not because:
            give_memory(model, given)
            return PartialModel(model)
        model = None
        _set_generators(before)
    model = factory()
    move_to_meta(model, lambda name: not _is_below(name, needed))
    return PartialModel(model, because)


def _deferred(
    factory: Factory, needed: Collection[str], outline: ModelOutline, given: frozenset[str], small_bytes: int
) -> tuple[Any, str]:
    """The model, and why it is not right; then the caller builds it whole."""
    storages = outline.storages(needed, given)
    trace = BuildTrace(
        storages, draw=not given or not storages.isdisjoint(outline._random), small_bytes=small_bytes
    )
    try:
        with trace.watching():
            model = factory()
        wanted = set(outline.names(needed)) - given
        if because := _differs(model, trace, outline, wanted):
            return None, because
        move_to_meta(model, lambda name: name not in wanted, trace)
        if left := _alive(trace):
            return None, f"{left[0].created_by} made a tensor that something else than the model holds"
        return model, ""
    except ValueNeeded as error:
        return None, f"{error.operation} reads a value that the build has not computed"
    except Exception as error:  # user code may raise anything; the whole build says what
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        trace.close()


def _differs(model: Any, trace: BuildTrace, outline: ModelOutline, wanted: Collection[str]) -> str:
    """What the build has made otherwise than the outline says, in words; empty: nothing."""
    found = named_tensors(model)
    if set(found) != set(outline.tensors):
        return "the factory builds other tensors when it is called again"
    for name in wanted:
        record = trace.record(found[name])
        if record is not None and (not record.known or record.number != outline.tensors[name].storage):
            return f"{name} was not computed with what it needs"
    return ""


def _outlined(model: Any, trace: BuildTrace, forced: frozenset[int]) -> ModelOutline:
    tensors = _described(named_tensors(model), unsaved_names(model), trace)
    registered = {item.storage for item in tensors.values()}
    sources = _sources_of(trace)
    attributes: dict[str, frozenset[int]] = {}
    for prefix, module in modules_of(model):
        numbers = {record.number for item in attribute_tensors(module) if (record := trace.record(item))}
        if numbers - registered:
            attributes[prefix] = frozenset(numbers - registered)
    held = registered.union(*attributes.values()) if attributes else registered
    parameters = {item.storage for item in tensors.values() if item.parameter}
    always = _cheap({number for number in held - parameters if number >= 0}, sources, trace.records)
    drawn = frozenset(record.number for record in trace.records if record.random)
    move_to_meta(model, lambda name: True, trace)
    stray = {record.number for record in _alive(trace) if record.number not in held}
    return ModelOutline(
        model, tensors, "", sources, drawn, _closure(forced | always | stray, sources), attributes
    )


def _described(
    named: Mapping[str, Tensor], unsaved: Collection[str], trace: BuildTrace
) -> dict[str, TensorOutline]:
    tensors: dict[str, TensorOutline] = {}
    for name, tensor in named.items():
        record = trace.record(tensor)
        tensors[name] = TensorOutline(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            bytes=tensor.nbytes if record is None else record.bytes,
            storage=-1 - len(tensors) if record is None else record.number,
            trained=tensor.requires_grad,
            parameter=isinstance(tensor, nn.Parameter),
            saved=name not in unsaved,
        )
    return tensors


def _alive(trace: BuildTrace) -> list[StorageRecord]:
    """Storages without their values that something still holds, after garbage was collected."""
    for collect in (False, True):
        if collect:
            gc.collect()
        left = [record for record in trace.alive() if record.bytes and not record.known]
        if not left:
            break
    return left


def _cheap(
    buffers: Collection[int], sources: Mapping[int, frozenset[int]], records: list[StorageRecord]
) -> set[int]:
    """Buffers and attributes whose values an outline has: none is random, all together are not large."""
    chosen = {number for number in buffers if not records[number].random and records[number].bytes}
    closure = _closure(chosen, sources)
    if any(records[number].random for number in closure):
        return set()
    return chosen if sum(records[number].bytes for number in closure) <= BUFFER_BYTES else set()


def _whole_outline(model: Any, because: str) -> ModelOutline:
    tensors: dict[str, TensorOutline] = {}
    unsaved = unsaved_names(model)
    numbers: dict[int, int] = {}
    for name, tensor in named_tensors(model).items():
        storage = tensor.untyped_storage()
        tensors[name] = TensorOutline(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            bytes=storage.nbytes(),
            storage=numbers.setdefault(storage._cdata, len(numbers)),
            trained=tensor.requires_grad,
            parameter=isinstance(tensor, nn.Parameter),
            saved=name not in unsaved,
        )
    move_to_meta(model, lambda name: tensors[name].parameter)
    return ModelOutline(model, tensors, because)


def _sources_of(trace: BuildTrace) -> dict[int, frozenset[int]]:
    return {record.number: frozenset(record.sources) for record in trace.records if record.sources}


def _closure(numbers: Collection[int], sources: Mapping[int, frozenset[int]]) -> frozenset[int]:
    found: set[int] = set()
    pending = [number for number in numbers if number >= 0]
    while pending:
        number = pending.pop()
        if number not in found:
            found.add(number)
            pending.extend(sources.get(number, ()))
    return frozenset(found)


def _is_below(name: str, prefixes: Collection[str]) -> bool:
    return any(not prefix or name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


# --- generators -------------------------------------------------------------------------------------------
def _generators() -> tuple[Tensor, object, Any]:
    numbers = sys.modules.get("numpy.random")
    return torch.get_rng_state(), random.getstate(), numbers.get_state() if numbers else None


def _set_generators(state: tuple[Tensor, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy.random"].set_state(state[2])


class _same_generators:
    """Sets the generators back at its end."""

    def __enter__(self) -> None:
        self._before = _generators()

    def __exit__(self, *error: object) -> None:
        _set_generators(self._before)
