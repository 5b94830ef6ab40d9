"""A checkpoint: its manifest, and the orders to take, write and publish it.

    <artifacts>/<job>/checkpoints/<version>-<epoch>-<number>/
        stage-00000/.metadata, __0_0.distcp     one torch.distributed.checkpoint folder per stage
        stage-00001/…
        manifest.json                           written last: without it there is no checkpoint

Keys of a stage's tensors are full parameter names, so that a checkpoint depends neither on the segmentation
nor on the number of replicas that wrote it (docs/checkpoints.md).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import Field, ValidationError

from schemas.base import Message, Part, Time, Token
from schemas.data_account import DataAccount
from schemas.errors import DamagedCheckpoint
from schemas.job import JobSpec
from schemas.job_file.data import DataSpec
from schemas.job_file.recipe import ScheduleSpec
from schemas.marks import Url
from schemas.recipe_progress import RecipeProgress
from schemas.step import Member, VersionMessage

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1


def checkpoints_url(artifacts: str, job: str) -> str:
    """The folder of all checkpoints of a job, below its `artifacts`."""
    return f"{artifacts.rstrip('/')}/{job}/checkpoints"


NO_MATTER = ("checkpoint_every", "asynchronous", "recompute", "step_samples", "auto")
"""Keys of `training` that do not affect the trained state."""
MEASURES = ("validate_every", "validation_microbatches", "evaluation")
"""Nor do these, unless validations decide the rate or the end."""

FIRST_OF_DATA = ("source", "sample_tokens", "validation_fraction")
"""Keys of `data` as old as checkpoints; where a job leaves the others out, its digest is as before them."""
LATER = ("until", "ema", "clip_value", "loss_scale")
"""Keys of `training` newer than checkpoints: where a job leaves them out, its digest is as before."""


class CheckpointFile(Part):
    """One file of a stage. `name` is relative to the stage's folder."""

    name: str
    bytes: int = Field(ge=0)
    sha256: str


class StageCheckpoint(Part):
    """One stage's part, written by one replica: layers `first_layer` … `last_layer`-1 of the model."""

    stage: int
    folder: str = Field(description="relative to the manifest")
    first_layer: int
    last_layer: int
    files: tuple[CheckpointFile, ...]
    torch_version: str

    @property
    def size_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class CheckpointManifest(Part):
    """The whole checkpoint. `version` is the number of steps applied; `written_at` is in seconds since 1970.

    `spec_sha256` has one digest per section of the job that the state depends on. `progress` is what
    validations had decided by then. `bits_class` is that of the slots that computed it (`Capability`); empty:
    not known, or of several.
    """

    format: int = MANIFEST_FORMAT
    job: Token
    version: int = Field(ge=0)
    epoch: int
    written_at: Time
    spec_sha256: dict[str, str]
    torch_version: str
    stages: tuple[StageCheckpoint, ...]
    progress: RecipeProgress = RecipeProgress()
    account: DataAccount | None = Field(None, description="of the data that was seen by then")
    bits_class: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(stage.size_bytes for stage in self.stages)

    @property
    def files(self) -> dict[str, CheckpointFile]:
        """Every file but the manifest itself, by its name below the checkpoint's folder."""
        return {f"{stage.folder}/{file.name}": file for stage in self.stages for file in stage.files}

    def overlapping(self, first_layer: int, last_layer: int) -> list[StageCheckpoint]:
        """The stages that hold layers of `first_layer` … `last_layer`-1."""
        return [
            stage
            for stage in self.stages
            if stage.first_layer < last_layer and first_layer < stage.last_layer
        ]

    def to_json(self) -> bytes:
        """The stored form: readable JSON, with a SHA-256 of itself."""
        body = self.model_dump(mode="json")
        if self.progress == RecipeProgress():
            del body["progress"]  # as it was before there was one, for software of that time
        if not self.bits_class:
            del body["bits_class"]
        return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


class PublishedCheckpoint(Part):
    """A checkpoint that exists: its folder's name, its URL and its manifest."""

    name: str
    url: Url
    manifest: CheckpointManifest


class CheckpointList(Part):
    """A job's checkpoints that exist, the newest first."""

    checkpoints: tuple[PublishedCheckpoint, ...]


def parse_manifest(data: bytes, url: str) -> CheckpointManifest:
    """Parse the output of `to_json`.

    Args:
        data: content of the file.
        url: the file's URL, for error messages.

    Raises:
        DamagedCheckpoint: it is not, or no longer, the manifest of a checkpoint.
    """
    try:
        body: dict[str, Any] = json.loads(data)
        stated = body.pop("sha256")
        if body["format"] != MANIFEST_FORMAT:
            raise DamagedCheckpoint(f"{url} is of format {body['format']}, not {MANIFEST_FORMAT}")
        if stated != _digest(body):
            raise DamagedCheckpoint(f"{url} is damaged: its SHA-256 is not the recorded one")
        known = {key: value for key, value in body.items() if key in CheckpointManifest.model_fields}
        return CheckpointManifest.model_validate(known)
    except (ValueError, KeyError, TypeError, AttributeError, ValidationError, RecursionError):
        raise DamagedCheckpoint(f"{url} is not the manifest of a checkpoint") from None


def spec_digests(spec: JobSpec) -> dict[str, str]:
    """SHA-256 of each section of the job that its state depends on."""
    body = spec.model_dump(mode="json", include={"model", "data", "training"})
    for key in NO_MATTER if spec.training.watched else NO_MATTER + MEASURES:
        body["training"].pop(key, None)
    plain = DataSpec().model_dump(mode="json")
    body["data"] = {
        key: value for key, value in body["data"].items() if key in FIRST_OF_DATA or value != plain[key]
    }
    for function in body["data"].get("preprocess", ()):
        del function["replicas"]
    for key in ("inputs", "freeze", "train", "dtype", "quantize"):  # newer than checkpoints, too
        if not body["model"][key]:
            del body["model"][key]
    training = body["training"]
    for key in LATER:
        if training[key] is None:
            del training[key]
    if not training["compile"]:
        del training["compile"]
    usual = ScheduleSpec()
    for key in set(training["schedule"]) - {"warmup_steps", "final_fraction"}:
        if training["schedule"][key] == getattr(usual, key):
            del training["schedule"][key]
    return {section: _digest(values) for section, values in body.items()}


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class CheckpointOrder(VersionMessage, wire="state.checkpoint"):
    """SMO → one replica per stage, at a step boundary: copy your state at `version`, then write it.

    Answered as soon as the copy is taken; it is written below `url` while training goes on.
    """

    url: Url


class CheckpointTaken(Message, wire="state.checkpoint.taken"):
    """The copy is taken. `stall_ms` is the time that it took the computing thread."""

    member: Member
    version: int
    bytes: int
    stall_ms: float


class CheckpointWait(Message, wire="state.checkpoint.wait"):
    """SMO → the same replica: answer once your copy for `url` is stored."""

    job: Token
    epoch: int
    url: Url


class CheckpointWritten(Message, wire="state.checkpoint.written"):
    """The stage's part of the manifest. `write_ms` is the time from the copy to the last stored file."""

    member: Member
    version: int
    part: StageCheckpoint
    write_ms: float
