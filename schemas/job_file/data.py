"""The section `data`: what it is trained on, in which order, and what is held out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from schemas.base import SAMPLE_NAME_PATTERN, Token
from schemas.callables import misnamed
from schemas.job_file.data_set_use import SCHEME, DataSetUse, is_data_set
from schemas.job_file.preprocess import MOST_FUNCTIONS, PreprocessSpec, check_chain
from schemas.job_file.text import TextSpec, is_tokenizer_file
from schemas.marks import HOLDS_USER_VALUES, Url
from schemas.urls import BUS, FEEDS, STDLIB

DataKind = Literal[
    "bytes",
    "text",
    "chat",
    "tokens",
    "dataset",
    "table",
    "images",
    "shards",
    "huggingface",
    "factory",
    "feed",
]

OF_KINDS: dict[str, frozenset[str]] = {
    "sample_tokens": frozenset({"bytes", "text", "chat", "tokens", "dataset"}),
    "unit": frozenset({"tokens"}),
    "dtype": frozenset({"tokens"}),
    "columns": frozenset({"table", "images", "shards", "huggingface"}),
    "dtypes": frozenset({"table", "huggingface", "factory"}),
    "image_size": frozenset({"images", "huggingface"}),
    "image_mode": frozenset({"images", "huggingface"}),
    "image_transforms": frozenset({"images", "huggingface"}),
    "transform": frozenset({"table", "images", "shards", "huggingface", "factory"}),
    "factory": frozenset({"factory"}),
    "args": frozenset({"factory"}),
    "subset": frozenset({"huggingface"}),
    "split": frozenset({"huggingface"}),
    "streaming": frozenset({"huggingface"}),
    "limit": frozenset({"factory", "huggingface"}),
    "feed": frozenset({"feed"}),
    **{name: frozenset({"text", "chat"}) for name in TextSpec.model_fields},
    **{name: frozenset({"text", "chat", "dataset"}) for name in ("attention", "attention_mask")},
    "data_set": frozenset({"dataset", "text", "chat", "table"}),
}
"""Field → the kinds that have it. A field that is not here is every kind's."""

MOST_PARTS, MOST_SETS = 1024, 64
"""Most parts of a mixture, and named evaluation sets."""
MOST_REPEATED = 1 << 20
"""Most characters that a section's parts may take over from it, all together: each repeats them, and the bus
takes no larger message."""

TOKEN_KINDS = frozenset({"bytes", "text", "chat", "tokens", "dataset"})
"""Kinds whose samples are `sample_tokens` tokens; a sample of any other counts as one."""


def _users_own(value: str) -> str:
    if reason := misnamed(value):
        raise ValueError(reason)
    return value


UserCallable = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"), AfterValidator(_users_own)]
"""`module:callable` of the user's own code."""

SampleName = Annotated[str, Field(pattern=SAMPLE_NAME_PATTERN, max_length=120)]
"""A name of a batch: a parameter of the model's forward, or of the loss."""

Shape = Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 40)], ...], Field(max_length=16)]
"""Sizes of a tensor's dimensions, without that of the samples."""

Dtype = Literal[
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
]


Pixels = Annotated[int, Field(ge=1, le=1 << 14)]


class SourceSpec(TextSpec):
    """One source of samples. Which fields it may have depends on its kind (`OF_KINDS`).

    `source` is `stdlib:` (the interpreter's own sources), or any path or URL that fsspec opens.
    `sample_tokens` is the length of one sample of tokens (the model's context).
    """

    kind: DataKind = Field("bytes", description="what it is")
    source: Url = Field(
        STDLIB, description="path or URL of files; `stdlib:` is the interpreter's own sources"
    )
    sample_tokens: int = Field(128, ge=2, le=1 << 20, description="tokens of a sample: the model's context")
    unit: Literal["windows", "documents"] = Field(
        "windows", description="what a sample of kind tokens is: sample_tokens in a row, or one document"
    )
    dtype: Literal["uint8", "uint16", "int32", "uint32", "int64"] | None = Field(
        None, description="of a .bin file of tokens; the other files say it themselves"
    )
    columns: dict[SampleName, str | tuple[str, ...]] = Field(
        {}, description="name of a batch → the column or columns that it is made of"
    )
    dtypes: dict[SampleName, Dtype] = Field({}, description="name of a batch → its type")
    names: dict[str, SampleName] | tuple[SampleName, ...] = Field(
        {}, description="the samples' own names → names of batches; for samples that are tuples, a list"
    )
    image_size: Pixels | tuple[Pixels, Pixels] | None = Field(
        None, description="pixels: a side, or height and width"
    )
    image_mode: Literal["RGB", "L"] = Field("RGB", description="colours or grey")
    image_transforms: tuple[str | dict[str, Any], ...] = Field(
        (), description="random_crop, flip, normalize, in this order; random ones are left out of validation"
    )
    transform: UserCallable | None = Field(None, description="applied to each sample; seeded for each")
    factory: UserCallable | None = Field(None, description="returns anything with a length and random access")
    args: Annotated[dict[str, Any], HOLDS_USER_VALUES] = Field(
        {}, description="keyword arguments of the factory"
    )
    subset: str | None = Field(None, description="the data set's configuration, as `datasets` names it")
    split: str = Field("train", description="the data set's own split")
    streaming: bool = Field(False, description="it is read once, in its own order, into a spool on disk")
    limit: int | None = Field(
        None, ge=1, le=1 << 40, description="samples taken of one that can only be read in its own order"
    )
    feed: Token | None = Field(None, description="name of a feed, to which records are pushed")

    data_set: DataSetUse | None = Field(
        None, description="the version that a source `dataset://NAME` stands for; the gateway says so"
    )

    @model_serializer(mode="wrap")
    def _as_said(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A data set's windows decide their length, unless the job says one: a default, sent along, would."""
        fields: dict[str, Any] = plain(self)
        if self.kind == "dataset" and "sample_tokens" not in self.model_fields_set:
            fields.pop("sample_tokens", None)
        return fields

    @property
    def tokens_per_sample(self) -> int:
        return self.sample_tokens if self.kind in TOKEN_KINDS else 1

    @model_validator(mode="after")
    def _fits_its_kind(self) -> SourceSpec:
        fields = SourceSpec.model_fields
        for name, kinds in OF_KINDS.items():
            if self.kind not in kinds and getattr(self, name) != fields[name].get_default():
                raise ValueError(
                    f"{name} is for kind {' or '.join(sorted(kinds))}, and this is kind {self.kind}: "
                    f"leave it out, or say kind: {sorted(kinds)[0]}"
                )
        if self.kind in ("text", "chat") and (reason := self.misfit(self.kind)):
            raise ValueError(reason)
        if self.kind == "dataset" and not self.source.startswith(SCHEME) and not getattr(self, "mixture", ()):
            raise ValueError(
                f"kind dataset reads what the mesh has built: source: {SCHEME}NAME or NAME@VERSION"
            )
        if self.source.startswith(SCHEME) and self.kind not in OF_KINDS["data_set"]:
            raise ValueError(
                f"{self.source} is read by kind dataset, and its records by text, chat or table; this is "
                f"kind {self.kind}"
            )
        if self.kind == "factory" and self.factory is None and not getattr(self, "mixture", ()):
            raise ValueError("kind factory needs factory: module:callable")
        if self.kind == "factory" and self.source != STDLIB:
            raise ValueError("source is not for kind factory: what the factory needs are its args")
        if self.kind == "feed" and self.feed is None and not getattr(self, "mixture", ()):
            raise ValueError("kind feed needs feed: NAME, as `dmsc data feeds` lists them")
        if self.kind == "feed" and self.source != STDLIB:
            raise ValueError("source is not for kind feed: what it reads is named by feed")
        return self

    @property
    def awaits_data_set(self) -> bool:
        """Whether it reads a data set whose version is fixed later, when its build is done."""
        return is_data_set(self.source) and self.data_set is None

    def own_urls(self) -> dict[str, str]:
        """Field → URL of this source. What is not listed here, nobody checks and no node opens."""
        if self.kind == "feed":
            return {}
        built = self.data_set
        files = {} if built is None else {"data_set.manifest": built.manifest, "data_set.store": built.store}
        return {"source": self.source, **files, **self.text_urls()}

    def callables(self) -> Iterator[str]:
        """Each `module:callable` of the user's that this source runs."""
        yield from (name for name in (self.factory, self.transform) if name is not None)


class MixturePart(SourceSpec):
    """One source of a mixture. Fields that it does not name are as in the section around it."""

    weight: float = Field(
        1.0,
        gt=0,
        le=1e9,
        allow_inf_nan=False,
        description="its share of the samples, in proportion to the others' weights",
    )


class EvaluationSpec(SourceSpec):
    """One named evaluation set. Fields that it does not name are as in the section around it."""


class DataSpec(SourceSpec):
    """What it is trained on: one source, or a mixture of several.

    Without named evaluation sets, `validation_fraction` of each source is held out: the last bytes of kind
    bytes in `order: windows`, else samples by a keyed draw.
    """

    validation_fraction: float = Field(
        0.05,
        ge=0.0,
        le=0.5,
        allow_inf_nan=False,
        description="share of each source that is held out, unless `validation` names sets",
    )
    order: Literal["auto", "windows", "shuffled", "sequential"] = Field(
        "auto",
        description="windows: tokens from anywhere, drawn anew for each sample; shuffled, sequential: each "
        "sample once an epoch; auto: windows for kind bytes, else shuffled",
    )
    mixture: tuple[MixturePart, ...] = Field(
        (), max_length=MOST_PARTS, description="several sources, each with a weight"
    )
    last: Literal["wrap", "drop"] = Field(
        "wrap",
        description="what an epoch's last samples do that fill no step: the next epoch fills it, or none",
    )
    collate: UserCallable | None = Field(
        None, description="makes a batch of a list of samples; by default they are stacked"
    )
    largest: dict[SampleName, Shape] = Field(
        {},
        description="name of a batch whose shape varies by microbatch → the largest it may have in each "
        "dimension behind the first; memory is measured with it",
    )
    on_unreadable: Literal["replace", "stop"] = Field(
        "replace", description="what becomes of a sample that its bytes make unreadable"
    )
    validation: dict[Token, EvaluationSpec] = Field(
        {}, max_length=MOST_SETS, description="named evaluation sets"
    )
    shuffle_window: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="of a feed that arrives, records in a row that are shuffled together; 0: as they came",
    )
    preprocess: tuple[PreprocessSpec, ...] = Field(
        (),
        max_length=MOST_FUNCTIONS,
        description="what instances of their own do to each sample before it is part of a batch, in order",
    )

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("kind") == "feed" and value.get("order", "auto") != "shuffled":
            value = {"validation_fraction": 0.0, **value}  # what arrives has no size to hold a part of out
        names = SourceSpec.model_fields.keys() - {"source", "data_set"}
        own = {name: value[name] for name in SourceSpec.model_fields if name in value and name in names}
        changed = dict(value)
        mixture, sets = value.get("mixture"), value.get("validation")
        parts = [
            *(mixture if isinstance(mixture, list | tuple) else ()),
            *(sets.values() if isinstance(sets, dict) else ()),
        ]
        if len(parts) > MOST_PARTS + MOST_SETS:
            return value  # refused for their number
        sizes = {name: len(repr(each)) for name, each in own.items()} if parts else {}
        repeated = sum(sizes[name] for part in parts for name in _inherited(part, own))
        if repeated > MOST_REPEATED:
            raise ValueError(
                f"its {len(parts):,} parts would repeat {repeated:,} characters of this section, at most "
                f"{MOST_REPEATED:,}: write what is long into the parts that need it"
            )
        if isinstance(mixture, list | tuple):
            changed["mixture"] = [_completed(part, own) for part in mixture]
        if isinstance(sets, dict):
            changed["validation"] = {name: _completed(part, own) for name, part in sets.items()}
        return changed

    @model_validator(mode="after")
    def _fits_together(self) -> DataSpec:
        if self.mixture and self.source != STDLIB:
            raise ValueError("source and mixture exclude each other: make it one more part of the mixture")
        if self.mixture and self.last == "drop":
            raise ValueError(
                "last: drop is for one source; in a mixture each source goes on with its next epoch"
            )
        if self.order == "windows" and (self.mixture or self.kind not in ("bytes", "tokens")):
            raise ValueError("order: windows is for one source of kind bytes or tokens; say shuffled")
        if "train" in self.validation:
            raise ValueError("validation: an evaluation set can't be called train")
        self._fits_arrival()
        check_chain(self.preprocess)
        return self

    def _fits_arrival(self) -> None:
        if self.arriving is None:
            if self.shuffle_window:
                raise ValueError("shuffle_window is for kind feed, alone and in the order of arrival")
            return
        if self.validation_fraction:
            raise ValueError(
                "validation_fraction: a feed in the order of arrival has no size to hold a part of out; name "
                "evaluation sets in data.validation, or close the feed and say order: shuffled"
            )
        if self.last == "drop":
            raise ValueError(
                "last: drop is for epochs; a feed that arrives ends with training.until: {feed: true}"
            )

    @property
    def parts(self) -> tuple[SourceSpec, ...]:
        """The sources that are trained on."""
        return self.mixture or (self,)

    @property
    def counted(self) -> Literal["tokens", "samples"]:
        """What a job's figures count."""
        return "tokens" if all(part.kind in TOKEN_KINDS for part in self.parts) else "samples"

    @property
    def held_out(self) -> float:
        """The fraction of each source that is held out."""
        return 0.0 if self.validation else self.validation_fraction

    @property
    def evaluation_sets(self) -> tuple[str, ...]:
        """The names of the evaluation sets; empty: nothing is held out."""
        return tuple(self.validation) or (("validation",) if self.validation_fraction else ())

    @property
    def in_windows(self) -> bool:
        """Whether samples are windows drawn from anywhere, so that there are no epochs."""
        return self.order == "windows" or (self.order == "auto" and self.kind == "bytes" and not self.mixture)

    @property
    def shuffled(self) -> bool:
        """Whether epochs are shuffled, where there are any."""
        return self.order != "sequential" and self.arriving is None

    @property
    def arriving(self) -> str | None:
        """The feed whose records are taken as they arrive, while it is open, too; None: there is none."""
        arrives = self.kind == "feed" and not self.mixture and self.order in ("auto", "sequential")
        return self.feed if arrives else None

    def places(self) -> dict[str, SourceSpec]:
        """Each source of the section by its key in the job file, evaluation sets included."""
        found: dict[str, SourceSpec] = {} if self.mixture else {"data": self}
        found |= {f"data.mixture[{index}]": part for index, part in enumerate(self.mixture)}
        return found | {f"data.validation.{name}": part for name, part in self.validation.items()}

    def urls(self) -> dict[str, str]:
        """Each URL of the section by its key in the job file; feeds as what they are on the bus."""
        feeds = {
            f"{place}.feed": f"{BUS}{FEEDS}/{part.feed}"
            for place, part in self.places().items()
            if part.kind == "feed" and part.feed is not None
        }
        found = feeds | {
            f"{place}.{field}": url
            for place, part in self.places().items()
            for field, url in part.own_urls().items()
        }
        return found | {
            f"data.preprocess[{index}].tokenizer": each.tokenizer
            for index, each in enumerate(self.preprocess)
            if each.tokenizer is not None and is_tokenizer_file(each.tokenizer)
        }

    def user_code(self) -> tuple[str, ...]:
        """Each `module:callable` of the user's that makes batches, once."""
        own = [] if self.collate is None else [self.collate]
        own += [each.function for each in self.preprocess if each.is_users]
        return tuple(
            dict.fromkeys((*own, *(name for part in self.places().values() for name in part.callables())))
        )


def _inherited(part: Any, own: dict[str, Any]) -> list[str]:
    """The fields of the section around it that a part has and does not name."""
    kind = part.get("kind", own.get("kind", "bytes")) if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return []
    return [name for name in own if name not in part and kind in OF_KINDS.get(name, {kind})]


def _completed(part: Any, own: dict[str, Any]) -> Any:
    return {name: own[name] for name in _inherited(part, own)} | part if isinstance(part, dict) else part
