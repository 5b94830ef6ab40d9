"""The section `serve` of a job file: the job's instances answer requests, and train nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from schemas.aggregation import Aggregation
from schemas.base import Part, Token
from schemas.marks import Url

SERVICE_NAME = r"^[a-z0-9][a-z0-9_-]{0,62}$"


KeptPart = Literal["prompt", "answer", "feedback"]


class KeepSpec(Part):
    """What a service keeps of requests whose users consent, to be trained on (docs/backflow.md)."""

    days: int = Field(30, ge=1, le=3650, description="days until an item is deleted")
    parts: tuple[KeptPart, ...] = Field(
        ("prompt", "answer", "feedback"), min_length=1, max_length=3, description="what is kept"
    )
    share: float = Field(
        0.2, gt=0, le=1, description="largest part of what is trained on that comes of one user"
    )
    most: int = Field(1000, ge=1, le=100_000, description="most items of one user at a time")
    hide: tuple[Annotated[str, Field(min_length=2, max_length=200)], ...] = Field(
        (), max_length=256, description="further texts that are taken out, in any case of letters"
    )


class ScaleSpec(Part):
    """When a version has more or fewer replicas, within `parallel.replicas: {min, want, max}` (ADR-0157)."""

    fill: float = Field(
        0.7,
        gt=0,
        le=1,
        description="part of a replica's sessions, or of its cache, that is in use before another one comes; "
        "higher: fewer slots; lower: room for bursts",
    )
    token_ms: float | None = Field(
        None,
        gt=0,
        le=3_600_000,
        description="most milliseconds from a token to the next; slower ones want more replicas; not given: "
        "only room counts",
    )
    up_s: float = Field(
        3.0, ge=0, le=86_400, description="for how long more is needed before replicas come, seconds"
    )
    down_s: float = Field(
        60.0, ge=0, le=86_400, description="for how long fewer do before one leaves, seconds"
    )
    idle_s: float = Field(
        300.0,
        gt=0,
        le=31_536_000,
        description="with min: 0: for how long nobody asks before all slots are given back, seconds; the "
        "next request starts the version",
    )


class ServeSpec(Part):
    """How one version of a model service answers.

    Whatever else it needs is said as in any job file: `model` and `initial_weights` (what it computes),
    `parallel` (stages and replicas), `requires`, `plan`, `queue` (priority), `training.compute_threads` and
    `training.precision`.
    """

    service: Token = Field(pattern=SERVICE_NAME, description="name of the service")
    version: Token = Field("v1", description="name of this version of it")
    kind: Literal["auto", "generate", "predict"] = Field(
        "auto",
        description="`generate`: tokens one after another; `predict`: named tensors in, named tensors out; "
        "`auto`: as its model allows",
    )
    context: int | None = Field(
        None, ge=2, le=1 << 20, description="most tokens of prompt and answer; not given: the model's own"
    )
    exact: Literal["auto", "required", "off"] = Field(
        "auto",
        description="whether bits are independent of company: `auto`: where the probe finds so, said in the "
        "answer; `required`: refused where not; `off`: plain arithmetic",
    )
    sessions: int = Field(64, ge=1, le=4096, description="most sessions that a replica works on at a time")
    chunk_tokens: int = Field(64, ge=1, le=4096, description="most tokens of one prompt in one wave")
    wave_tokens: int = Field(256, ge=1, le=65_536, description="most tokens of all sessions in one wave")
    cache: bool = Field(
        True,
        description="whether keys and values are kept, where its model allows; false: each token computes "
        "its whole session, alone: slow, and exact whatever the widths of its layers",
    )
    cache_mib: int = Field(
        512,
        ge=1,
        le=1 << 20,
        description="MiB of keys, values, and rows kept for a neighbour, of an instance",
    )
    batch_ms: float = Field(
        2.0, ge=0, le=1000, description="how long `predict` waits for company, milliseconds"
    )
    batch: int = Field(32, ge=1, le=4096, description="most requests of `predict` in one pass")
    worse_nll: float | None = Field(
        0.05,
        ge=0,
        le=100,
        description="nats per token of users' prompts that it may be worse by than the stable version before "
        "it goes back; null: quality is not compared",
    )
    scale: ScaleSpec = Field(
        default_factory=ScaleSpec, description="when replicas come and go, where `replicas` is a range"
    )
    tokenizer: Url | None = Field(
        None, description="`bytes`, or file, folder or URL of a tokenizer.json; not given: the weights' own"
    )
    aggregation: Aggregation | None = Field(
        None,
        description="how several answers become one where a request says nothing of it: first, vote, "
        "weighted or attention; not given: one version answers",
    )
    chat_template: str | None = Field(
        None, max_length=65_536, description="Jinja template of chats; not given: the tokenizer's own"
    )
    keep: KeepSpec | None = Field(
        None, description="what is kept of requests whose users consent; not given: nothing of any request"
    )

    @model_validator(mode="after")
    def _keeps_texts(self) -> Self:
        if self.keep is not None and self.kind == "predict":
            raise ValueError(
                "keep: tensors are not kept, since nobody can take names out of them; leave it out"
            )
        return self

    @field_validator("exact", mode="before")
    @classmethod
    def _is_off(cls, value: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value

    @property
    def tokenizer_url(self) -> str | None:
        """Where its own tokenizer lies; None: it names none, or its tokens are bytes."""
        return None if self.tokenizer == "bytes" else self.tokenizer


# --- what a job file with this section need not, and must not, say ----------------------------------------
INSTEAD = {
    "array": "deploy versions one by one",
    "resume_from": "name the weights as initial_weights",
    "parallel.standbys": "give replicas, which all answer",
}
"""Key of a job file that is for training alone → what to do instead."""


def need_not_train(value: Any) -> Any:
    """The document of a job file; with `serve` it need not say how the job trains."""
    if not isinstance(value, Mapping) or value.get("serve") is None:
        return value
    training = value.get("training")
    if training is not None and not isinstance(training, Mapping):
        return value
    return {**value, "training": {"steps": 1, **(training or {})}}


def refuse_training(named: Mapping[str, object]) -> None:
    """Raises `ValueError` if a file with `serve` has one of these keys, which are for training alone."""
    for key, value in named.items():
        if value:
            raise ValueError(f"serve: {key} is for training; {INSTEAD[key]}")


def trains_or_serves(schema: dict[str, Any]) -> None:
    """For the JSON Schema of a job file: it has `training`, or `serve`, or both."""
    schema["required"] = [key for key in schema["required"] if key != "training"]
    schema["anyOf"] = [{"required": ["training"]}, {"required": ["serve"]}]
