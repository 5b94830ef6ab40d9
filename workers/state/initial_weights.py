"""A job's initial weights: which tensors of a folder of safetensors a model takes, and reading just those.

A stage reads the headers of the files that have its tensors, and of those files the bytes of its tensors, as
one stream where they lie together. Memory for it is bounded by `CHUNK_BYTES`. All tensors are checked by the
headers before the first weight changes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from bus.files.artifacts import SCHEME, Artifacts
from bus.logs import get_logger
from schemas.errors import BadInput, BadModel, NotFound
from schemas.job_file.initial_weights import InitialWeights
from schemas.weights_digest import INDEX_NAME
from workers.graph.stage_module import StageModule
from workers.precision.int8_linear import Int8Linear
from workers.state.safetensors_files import SUFFIX, StoredTensor, fits, read_header
from workers.state.weight_digests import TensorDigest, expected_tensors
from workers.state.weight_names import own_names
from workers.state.weights import file_weights

log = get_logger("weights")

T = TypeVar("T")

Target = Tensor | Int8Linear
"""What a stored tensor is copied into."""

DigestOf = Callable[[StoredTensor], TensorDigest | None]

CHUNK_BYTES = 8 << 20
"""Bytes of a tensor that are held until they are copied into the weight."""
_GAP_BYTES = 64 << 10
"""Bytes between two tensors that are read and dropped rather than begin another stream."""
_WHOLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHOWN = 3


class Runner(Protocol):
    """Runs work on live tensors off the event loop, which has heartbeats to send.

    For a stage it is the compute thread; the default `asyncio.to_thread` is for processes that do not train.
    """

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


@dataclass(frozen=True)
class MatchedWeights:
    """Which stored tensor each weight takes.

    Attributes:
        found: Name in the model → tensor in the files.
        missing: Names in the model that the files lack.
        unexpected: Names in the files that nothing here takes: other stages' tensors, or nobody's.
            Other names of tensors that were taken do not count.
        shards: The files, with tensors of all stages.
    """

    found: Mapping[str, StoredTensor]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shards: frozenset[str] = frozenset()


async def match_weights(
    own: Mapping[str, Tensor],
    artifacts: Artifacts,
    source: InitialWeights,
    public_name: Callable[[str], str] = lambda name: name,
    aliases: Mapping[str, Sequence[str]] = {},
    own_names_of: Callable[[Iterable[str]], Mapping[str, str]] = lambda names: {},
) -> MatchedWeights:
    """Finds and checks the tensors of the files that belong to these weights. Reads headers alone.

    Args:
        own: Full name → weight; those on `meta` serve as well.
        artifacts: The folder.
        source: The job's section.
        public_name: Of a full name: the name under which its family's files have it.
        aliases: Full name → other names of the same weight; which of them a file has is its writer's choice.
        own_names_of: Names in the files → their names in the model, as its library knows them. It is asked if
            names are missing.

    Raises:
        BadModel: There are no safetensors; or a tensor is of another shape or type.
    """
    shard_of = await _locate(artifacts, source)
    theirs = own_names(shard_of, source)
    if any(not {name, public_name(name), *aliases.get(name, ())} & theirs.keys() for name in own):
        theirs = {renamed: theirs[name] for name, renamed in own_names_of(theirs).items()} | dict(theirs)
    called = {name: [*_spellings((name, *aliases.get(name, ())), public_name)] for name in own}
    stored_names = {
        name: next((theirs[spelling] for spelling in spellings if spelling in theirs), None)
        for name, spellings in called.items()
    }
    pairs = {name: stored for name, stored in stored_names.items() if stored is not None}
    headers: dict[str, dict[str, StoredTensor]] = {}
    for shard in sorted({shard_of[stored] for stored in pairs.values()}):
        try:
            headers[shard] = await read_header(artifacts, shard)
        except NotFound:
            raise BadModel(
                f"initial_weights {source.url}: the index names {shard}, which is not there"
            ) from None
    found: dict[str, StoredTensor] = {}
    for name, stored_name in pairs.items():
        shard = shard_of[stored_name]
        tensor = headers[shard].get(stored_name)
        if tensor is None:
            raise BadModel(
                f"initial_weights {source.url}: the index names {stored_name} in {shard}, which lacks it"
            )
        _check(name, own[name], tensor, source)
        found[name] = tensor
    taken = {theirs.get(spelling) for name in found for spelling in called[name]}
    return MatchedWeights(
        found,
        tuple(sorted(set(own) - set(found))),
        tuple(sorted(set(theirs.values()) - taken)),
        frozenset(shard_of.values()),
    )


def _spellings(names: Sequence[str], public_name: Callable[[str], str]) -> Iterator[str]:
    for name in names:
        yield name
        yield public_name(name)


def check_missing(matched: MatchedWeights, source: InitialWeights, where: str) -> None:
    """Raises `BadModel` if the files lack a tensor and `strict` is set. `where`: of what it is a part."""
    if not matched.missing or not source.strict:
        return
    count = len(matched.missing) + len(matched.found)
    has = f"it has {_some(matched.unexpected)}: " if matched.unexpected else ""
    raise BadModel(
        f"initial_weights {source.url} lacks {len(matched.missing)} of the {count} tensors of {where}: "
        f"{_some(matched.missing)}; {has}name the folder of a model of the same factory and args, or give "
        "their names under initial_weights.map, or set initial_weights.strict: false"
    )


def describe_match(matched: MatchedWeights, source: InitialWeights) -> str:
    """One line for people: what the files lacked, and what nobody took; empty: nothing."""
    parts = []
    if names := matched.missing:
        parts.append(f"{len(names)} missing, which begin as the factory makes them: {_some(names)}")
    if names := matched.unexpected:
        parts.append(f"{len(names)} in the files that the model lacks: {_some(names)}")
    return f"initial_weights {source.url}: {'; '.join(parts)}" if parts else ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")


def _check(name: str, own: Tensor, stored: StoredTensor, source: InitialWeights) -> None:
    if tuple(own.shape) == stored.shape and fits(stored.dtype, own.dtype):
        return
    called = name if stored.name == name else f"{stored.name} (here {name})"
    raise BadModel(
        f"initial_weights {source.url}: {stored.shard}: {called} is {stored.dtype} {stored.shape}, "
        f"but the model has {own.dtype} {tuple(own.shape)}"
    )


async def load_initial(
    stage: StageModule,
    artifacts: Artifacts,
    source: InitialWeights,
    *,
    run: Runner = asyncio.to_thread,
    public_name: Callable[[str], str] = lambda name: name,
    is_new: Callable[[str], bool] = lambda name: False,
    own_names_of: Callable[[Iterable[str]], Mapping[str, str]] = lambda names: {},
    stand_ins: Mapping[str, Sequence[str]] = {},
    checked: bool = False,
) -> MatchedWeights:
    """Loads the stage's weights from a folder of safetensors, with or without an index.

    Args:
        stage: The stage whose weights are replaced, in place.
        artifacts: The folder.
        source: The job's section; its URL as the user wrote it stands in messages.
        run: Runs the replacement.
        public_name: See `match_weights`.
        is_new: Of a full name: it may be missing, and then begins as the factory made it.
        own_names_of: See `match_weights`.
        stand_ins: Full name → tensors that it begins with where the files lack its own.
        checked: Whether they must have the digest that the section names, if it names one.

    Raises:
        BadModel: There are no safetensors, or a tensor is missing or of another shape or type; nothing was
            changed. Or their bytes are not those of the digest.
        BadInput: A file is damaged.
    """
    # a shared weight bears the name of its first place in every stage
    own = file_weights(stage)
    outline = {name: _outlined(weight) for name, weight in own.items()}
    aliases = joined(stage.aliases, stand_ins)
    matched = await match_weights(outline, artifacts, source, public_name, aliases, own_names_of)
    missing = tuple(name for name in matched.missing if not is_new(name))
    matched = replace(matched, missing=missing)
    check_missing(matched, source, f"layers {stage.first_layer} to {stage.last_layer - 1}")
    if matched.missing:
        log.info(describe_match(MatchedWeights(matched.found, matched.missing, ()), source))
    pairs = [(stored, own[name]) for name, stored in matched.found.items()]
    digest_of: DigestOf = lambda stored: None  # noqa: E731
    if checked and source.expected_sha256:
        lines = await expected_tensors(artifacts, matched.shards, source.expected_sha256, source.url)
        digest_of = lambda stored: TensorDigest(stored, lines, source.url)  # noqa: E731
    await read_tensors(artifacts, pairs, run=run, digest_of=digest_of)
    return matched


def joined(
    aliases: Mapping[str, Sequence[str]], stand_ins: Mapping[str, Sequence[str]]
) -> dict[str, Sequence[str]]:
    """Names that are looked for behind a weight's own: its other names, then those of its stand-ins."""
    return {
        name: (*aliases.get(name, ()), *stand_ins.get(name, ())) for name in aliases.keys() | stand_ins.keys()
    }


def _outlined(weight: Target) -> Tensor:
    if isinstance(weight, Tensor):
        return weight
    return torch.empty(weight.out_features, weight.in_features, dtype=weight.dtype, device="meta")


async def read_tensors(
    artifacts: Artifacts,
    pairs: Sequence[tuple[StoredTensor, Target]],
    *,
    run: Runner = asyncio.to_thread,
    digest_of: DigestOf = lambda stored: None,
) -> None:
    """Copies stored tensors into tensors of their shapes, by ranges of the files.

    Half precision becomes full precision, and the other way round, as `copy_` does it; int8 layers quantise
    what they get, row by row. `digest_of`: what checks a tensor's bytes; None: nothing does.

    Raises:
        BadInput: A file is shorter than its header says.
        BadModel: A tensor's bytes are others than its digest says.
    """
    targets: dict[StoredTensor, list[Target]] = {}
    for stored, target in pairs:
        targets.setdefault(stored, []).append(target)
    for together in _runs(sorted(targets, key=lambda stored: (stored.shard, stored.start, stored.end))):
        first, last = together[0], together[-1]
        pieces = artifacts.open_range(first.shard, first.start, last.end - first.start)
        stream = _Stream(pieces, f"{artifacts.url}/{first.shard}")
        position = first.start
        for stored in together:
            await stream.take(stored.start - position)
            await _fill(targets[stored], stored, stream, run, digest_of(stored))
            position = stored.end


def _runs(ordered: Sequence[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Tensors of one file that lie one behind the other, nearly without gaps."""
    run: list[StoredTensor] = []
    for stored in ordered:
        if run and not (stored.shard == run[-1].shard and 0 <= stored.start - run[-1].end <= _GAP_BYTES):
            yield run
            run = []
        run.append(stored)
    if run:
        yield run


async def _fill(
    targets: Sequence[Target],
    stored: StoredTensor,
    stream: _Stream,
    run: Runner,
    digest: TensorDigest | None,
) -> None:
    portion = stored.dtype.itemsize
    if any(isinstance(target, Int8Linear) for target in targets):
        portion *= max(1, stored.shape[-1])  # whole rows
    most = max(1, CHUNK_BYTES // portion) * portion
    for begin in range(0, stored.end - stored.start, most):
        data = await stream.take(min(most, stored.end - stored.start - begin))
        if digest is not None:
            await run(partial(digest.take, data))
        chunk = torch.frombuffer(data, dtype=stored.dtype)
        await run(partial(_copy, targets, chunk, begin // stored.dtype.itemsize))
    if digest is not None:
        digest.check()


@torch.no_grad()
def _copy(targets: Sequence[Target], chunk: Tensor, begin: int) -> None:
    for target in targets:
        if isinstance(target, Int8Linear):
            target.fill(begin // target.in_features, chunk.view(-1, target.in_features))
            continue
        whole = target if target.is_contiguous() else target.contiguous()
        whole.view(-1)[begin : begin + chunk.numel()].copy_(chunk)
        if whole is not target:  # rare: a weight with strides of its own
            target.copy_(whole)


class _Stream:
    """Exact portions of a stream of pieces."""

    def __init__(self, pieces: AsyncIterator[bytes], source: str) -> None:
        self._pieces = pieces
        self._source = source
        self._rest = bytearray()

    async def take(self, size: int) -> bytearray:
        """The next `size` bytes. Raises `BadInput` if there are fewer."""
        taken = self._rest
        while len(taken) < size:
            piece = await anext(self._pieces, None)
            if piece is None:
                raise BadInput(f"{self._source} is damaged: it ends before its last tensor")
            taken += piece
        self._rest = taken[size:]
        del taken[size:]
        return taken


async def _locate(artifacts: Artifacts, source: InitialWeights) -> dict[str, str]:
    """Name in the files → shard, from the index or from the shards' own headers."""
    url = source.url
    if url.endswith(SUFFIX):
        raise BadModel(f"initial_weights {url} is a file; name the folder that holds it")
    if await artifacts.exists(INDEX_NAME):
        try:
            index: dict[str, str] = dict(json.loads(await artifacts.get_bytes(INDEX_NAME))["weight_map"])
        except (ValueError, KeyError, TypeError):
            raise BadModel(f"initial_weights {url}: {INDEX_NAME} is not an index of safetensors") from None
        return index
    # Exports always have an index. Without one the store is listed, which an instance may not do on the bus.
    if url.startswith(SCHEME) and await artifacts.exists(_WHOLE):
        shards = [_WHOLE]
    else:
        listed = [name for name in await artifacts.list() if "/" not in name]
        shards = [name for name in listed if name.endswith(SUFFIX)]
        if not shards:
            pickles = [name for name in listed if name.endswith(_PICKLES)]
            raise BadModel(f"initial_weights {url}: {_refused(pickles)}")
    shard_of: dict[str, str] = {}
    for shard in shards:
        shard_of.update(dict.fromkeys(await read_header(artifacts, shard), shard))
    return shard_of


def _refused(pickles: Sequence[str]) -> str:
    if not pickles:
        return f"there are no {SUFFIX} files"
    return (
        f"{pickles[0]} is a pickle, which runs code when it is read; convert it where you trust it: "
        "model.save_pretrained(folder) writes safetensors, or safetensors.torch.save_file(state_dict, file)"
    )
