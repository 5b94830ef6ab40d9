"""Opens a job's data: the kinds in one table, and what a job's section `data` makes of them."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.data_account import exact_weights
from schemas.errors import BadData
from schemas.job import JobSpec
from schemas.job_file.data import DataKind, DataSpec, SourceSpec
from workers.data.batches import Batch, BatchSource, SourceAccount, Split
from workers.data.checking import check_shapes
from workers.data.collating import users_collate
from workers.data.data_set.fetching import fetch_data_sets, held_out_of, read_manifest, with_split
from workers.data.kinds.byte_windows import rest_of
from workers.data.kinds.token_files import token_stream
from workers.data.order import OrderedSource, SampleOrder
from workers.data.preprocessing.preprocessed import PreprocessedBatches
from workers.data.sampled_batches import SampledBatches, SampleSource, SplitSamples
from workers.data.samples import Opening as Opening
from workers.data.samples import Samples
from workers.data.source_files import combined_digest, fetch_uploads
from workers.data.views import SampleView, split, whole
from workers.data.windows import JoinedTokens, WindowBatches

if TYPE_CHECKING:
    from bus.connection import Bus
    from workers.data.kinds.feeds import OpenFeed

KINDS: dict[DataKind, str] = {
    "bytes": "workers.data.kinds.token_files:open_bytes",
    "text": "workers.data.text.opening:open_text",
    "chat": "workers.data.text.opening:open_text",
    "tokens": "workers.data.kinds.token_files:open_tokens",
    "dataset": "workers.data.shards.data_set_shards:open_data_set",
    "table": "workers.data.kinds.tables:open_table",
    "images": "workers.data.kinds.images:open_images",
    "shards": "workers.data.shards:open_shards",
    "huggingface": "workers.data.kinds.hugging_face:open_huggingface",
    "factory": "workers.data.kinds.user_data:open_factory",
    "feed": "workers.data.kinds.feeds:open_feed",
}
"""Kind → the function (SourceSpec, Opening) → Samples that opens it. It is imported when a job has it."""


class JobData:
    """All data of a job, a `BatchSource`: each split from where it comes, and the folder that is theirs.

    Args:
        splits: By name, `train` among them.
        closing: Closed at the end.
        largest: Name → the largest shape of a sample, for those that may vary.
    """

    def __init__(
        self,
        splits: Mapping[Split, BatchSource],
        closing: ExitStack,
        largest: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._splits = dict(splits)
        self._largest = largest or {}
        self._closing = closing
        self._train = splits["train"]
        self._sources = sources = tuple({id(source): source for source in splits.values()}.values())
        self.digest = combined_digest(source.digest for source in sources)
        self.tokens = sum(source.tokens for source in sources)
        self.vocabulary = max((source.vocabulary or 0 for source in sources), default=0) or None

    @property
    def names(self) -> tuple[str, ...]:
        return self._train.names

    def batch(self, split: Split, step: int, microbatch: int) -> Batch:
        batch = self._of(split).batch(split, step, microbatch)
        check_shapes(batch, self._largest)
        return batch

    def samples(self, split: Split, step: int, microbatch: int) -> Sequence[Mapping[str, Any]]:
        return self._of(split).samples(split, step, microbatch)

    def expect(self, split: Split, step: int, microbatch: int) -> None:
        self._of(split).expect(split, step, microbatch)

    def size(self, split: Split) -> int | None:
        return self._of(split).size(split)

    def account(self, step: int) -> tuple[SourceAccount, ...]:
        return self._train.account(step)

    @property
    def replaced(self) -> int:
        return sum(source.replaced for source in self._sources)

    def close(self) -> None:
        for source in self._sources:
            source.close()
        self._closing.close()

    def _of(self, split: Split) -> BatchSource:
        if split not in self._splits:
            raise BadData(f"data: there is no {split} part; there are {', '.join(self._splits)}")
        return self._splits[split]


class ArrivingData(JobData):
    """The data of a job that takes the records of a feed as they arrive: its size is not known."""

    def __init__(
        self, spec: JobSpec, feed: OpenFeed, splits: Mapping[Split, BatchSource], closing: ExitStack
    ):
        super().__init__(splits, closing, spec.data.largest)
        self.feed = feed
        self.tokens = 0
        self._samples = spec.training.microbatch_samples
        self._step_samples = spec.training.microbatches * self._samples

    async def arrive(self, split: Split, step: int, microbatch: int) -> bool:
        """Waits until the records of a microbatch are there, and fetches them; False: they never will be.

        Raises:
            BadData: The feed was deleted, or is damaged.
        """
        if split != "train":
            return True
        first = step * self._step_samples + microbatch * self._samples
        if not await self.feed.until(first + self._samples):
            return False
        await self.feed.fetch(self.feed.record_at(first + place) for place in range(self._samples))
        return True

    def size(self, split: Split) -> int | None:
        return None if split == "train" else super().size(split)

    def account(self, step: int) -> tuple[SourceAccount, ...]:
        name = f"feed {self.feed.record.name}"
        return (SourceAccount(name, step * self._step_samples, None, self.feed.record.uid),)


async def open_source(
    spec: JobSpec, bus: Bus | None, *, chained: bool = True, stand_ins: bool = False
) -> BatchSource:
    """The batches of a job. Blocking work is done on a thread.

    Args:
        spec: The job.
        bus: For what was uploaded; None: there is none.
        chained: Whether its samples go through `data.preprocess` here.
        stand_ins: Whether records of a feed that are not there yet are made up, to measure with.

    Raises:
        BadData: The data is missing, unreadable, of another kind, too short, or needs a library that is not
            installed here.
        BadModel: A callable of the user's can't be loaded.
        OSError: Files can't be read now.
    """
    folder = tempfile.TemporaryDirectory(prefix="data-", ignore_cleanup_errors=True)
    with ExitStack() as stack:
        spool = Path(stack.enter_context(folder))
        uploads = {place: url for place, url in spec.data.urls().items() if ".data_set." not in place}
        fetched = await fetch_uploads(uploads, bus, spool)
        fetched |= await fetch_data_sets(spec.data, bus, spool)
        feeds = await _opened_feeds(spec, bus, spool, stand_ins=stand_ins)
        opener = _Opener(spec, spool, fetched, feeds, stack)
        splits = await asyncio.to_thread(opener.splits)
        if spec.data.arriving is None:
            data = JobData(splits, stack.pop_all(), spec.data.largest)
        else:
            data = ArrivingData(spec, feeds["data"], splits, stack.pop_all())
    if not (chained and spec.data.preprocess):
        return data
    try:
        return await asyncio.to_thread(PreprocessedBatches, spec, data, fetched)
    except BaseException:
        data.close()
        raise


async def _opened_feeds(
    spec: JobSpec, bus: Bus | None, spool: Path, *, stand_ins: bool
) -> dict[str, OpenFeed]:
    if all(part.kind != "feed" for part in spec.data.places().values()):
        return {}
    from workers.data.kinds.feeds import open_feeds

    return await open_feeds(spec, bus, spool, stand_ins=stand_ins)


def open_samples(spec: SourceSpec, opening: Opening) -> Samples:
    """The samples of one source, by its kind. Blocks.

    Raises:
        BadData: See `open_source`.
    """
    if spec.data_set is not None:
        spec = with_split(spec)
    module, _, name = KINDS[spec.kind].partition(":")
    if importlib.util.find_spec(module) is None:
        raise BadData(f"{opening.at}.kind: {spec.kind} is not there in this version")
    opener: Callable[[SourceSpec, Opening], Samples] = getattr(importlib.import_module(module), name)
    return opener(spec, opening)


class _Opener:
    """Opens the sources of one job, and puts them into their splits and orders."""

    def __init__(
        self,
        spec: JobSpec,
        spool: Path,
        fetched: Mapping[str, Path],
        feeds: Mapping[str, OpenFeed],
        closing: ExitStack,
    ) -> None:
        self._data, self._training = spec.data, spec.training
        self._closing = closing
        self._classes: tuple[str, Sequence[str]] | None = None
        self._openings = {
            place: Opening(place, self._training.seed, spool / f"source-{number}", fetched, feeds)
            for number, place in enumerate(self._data.places())
        }

    def splits(self) -> dict[Split, BatchSource]:
        data = self._data
        parts: dict[Split, SplitSamples] = {}
        digests: list[str] = []
        in_windows = self._windows() if data.in_windows else None
        if in_windows is None:
            parts |= self._trained(digests)
        windows: dict[Split, BatchSource] = {}
        if in_windows is not None:
            windows |= dict.fromkeys(in_windows.splits, in_windows)
        for name, part in data.validation.items():
            if name not in windows:
                place = f"data.validation.{name}"
                view = whole(self._samples(place, part, digests), name=place)
                parts[name] = self._split(name, [view], [part])
        if not parts:
            return windows
        collate = None if data.collate is None else users_collate(data.collate, _tuple_names(data))
        sampled: BatchSource = SampledBatches(
            parts,
            seed=self._training.seed,
            samples=self._training.microbatch_samples,
            microbatches=self._training.microbatches,
            digest=combined_digest(digests),
            collate=collate,
            replaces=data.on_unreadable == "replace",
        )
        return {**windows, **dict.fromkeys(parts, sampled)}

    def _samples(self, place: str, spec: SourceSpec, digests: list[str]) -> Samples:
        samples = open_samples(spec, self._opening(place))
        self._closing.callback(samples.close)
        self._check_classes(place, getattr(samples, "classes", ()))
        if not len(samples):
            raise BadData(f"{place}: there are no samples in it; give more data")
        options = spec.model_dump_json(exclude={"source", "preprocess"})
        digests.append(combined_digest((samples.digest, options)))
        return samples

    def _check_classes(self, place: str, classes: Sequence[str]) -> None:
        """Classes are numbered by their names, so every source must have the same."""
        if not classes:
            return
        first, known = self._classes or (place, classes)
        self._classes = (first, known)
        if other := sorted({*known} ^ {*classes}):
            raise BadData(
                f"{place}.source has other classes than {first}.source: not in both: "
                f"{', '.join(other[:5])}; give both the same folders"
            )

    def _opening(self, place: str) -> Opening:
        opening = self._openings[place]
        opening.spool.mkdir()
        return opening

    def _trained(self, digests: list[str]) -> dict[Split, SplitSamples]:
        data = self._data
        places = {place: part for place, part in data.places().items() if _among(part, data.parts)}
        kept, held = [], []
        for number, (place, part) in enumerate(places.items()):
            samples = self._samples(place, part, digests)
            shuffled = data.shuffled
            others = self._held_out_by_build(place, part, digests)
            if others is not None:
                mine = whole(samples, name=place)
            else:
                mine, others = split(
                    samples, data.held_out, self._training.seed, number, shuffled=shuffled, name=place
                )
            kept.append(mine)
            held.append(others)
            if data.held_out and not others.size:
                raise BadData(
                    f"{place}: of {len(samples):,} samples, validation_fraction {data.held_out:g} holds out "
                    "none; give more data, or set data.validation_fraction to 0"
                )
        found = {"train": self._split("train", kept, list(places.values()))}
        if data.held_out:
            found["validation"] = self._split("validation", held, list(places.values()))
        return found

    def _held_out_by_build(self, place: str, part: SourceSpec, digests: list[str]) -> SampleView | None:
        """What was held out of a data set when it was built; None: nothing, or nothing is held out."""
        use = None if part.data_set is None else held_out_of(part.data_set)
        if use is None or not self._data.held_out:
            return None
        manifest = read_manifest(self._openings[place].fetched, use, place)
        if use.split not in manifest.splits:
            return None
        own = self._openings[place]
        self._openings[f"{place} (validation)"] = Opening(
            own.at, own.seed, own.spool.with_name(f"{own.spool.name}-validation"), own.fetched
        )
        samples = self._samples(f"{place} (validation)", with_split(part, use.split), digests)
        return whole(samples, name=place)

    def _split(self, name: Split, views: list[SampleView], parts: list[SourceSpec]) -> SplitSamples:
        data, training = self._data, self._training
        trained = name == "train"
        step_samples = training.microbatches * training.microbatch_samples
        total = sum(view.size for view in views)
        least = step_samples if data.last == "drop" else training.microbatch_samples
        if trained and total < least:
            what = "step (data.last: drop leaves it out)" if data.last == "drop" else "microbatch"
            raise BadData(
                f"data holds {total:,} samples for training, less than the {least:,} of one {what}; "
                "give more data, or lower training.microbatch_samples"
            )
        weights = exact_weights([getattr(part, "weight", 1.0) for part in parts])
        order = SampleOrder(
            training.seed,
            name,
            [
                OrderedSource(view.size, view.blocks, data.shuffled, weight)
                for view, weight in zip(views, weights, strict=True)
            ],
            whole_steps=step_samples if trained and data.last == "drop" else 0,
        )
        sources = tuple(SampleSource(view, part) for view, part in zip(views, parts, strict=True))
        return SplitSamples(sources, order, transformed=trained)

    def _windows(self) -> WindowBatches:
        data, training = self._data, self._training
        trained, digest = token_stream(data, self._opening("data"))
        rest = rest_of(data, trained.size)
        splits: dict[Split, JoinedTokens] = {"train": trained.part(0, rest)}
        digests = [digest]
        if rest < trained.size:
            splits["validation"] = trained.part(rest, trained.size)
        for name, part in data.validation.items():
            if part.kind != data.kind:
                continue  # a set of samples
            place = f"data.validation.{name}"
            splits[name], digest = token_stream(part, self._opening(place))
            if splits[name].size <= data.sample_tokens:
                raise BadData(
                    f"{place}.source {part.source} has {splits[name].size:,} tokens, less than one sample of "
                    f"{data.sample_tokens} and its successor; give more, or lower data.sample_tokens"
                )
            digests.append(digest)
        return WindowBatches(
            splits,
            seed=training.seed,
            samples=training.microbatch_samples,
            step_samples=training.microbatches * training.microbatch_samples,
            sample_tokens=data.sample_tokens,
            digest=combined_digest(digests),
        )


def _among(part: SourceSpec, parts: Iterable[SourceSpec]) -> bool:
    return any(part is each for each in parts)


def _tuple_names(data: DataSpec) -> tuple[str, ...]:
    return data.names if isinstance(data.names, tuple) else ()
