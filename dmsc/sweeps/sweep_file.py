"""The sweep file, as a person writes it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from dmsc.authoring.code_folder import PackedCode, pack_folder
from dmsc.client.job_file import beside, load_document, load_job
from schemas.base import Part, Token, is_token
from schemas.errors import BadJob
from schemas.explain import explain
from schemas.job import JobSpec
from schemas.job_file.queue import MOST_MEMBERS

MOST_TRIALS = MOST_MEMBERS
VALIDATION_LOSS, LOSS = "validation_loss", "loss"


class ParameterRange(Part):
    """Values between two bounds, both included. `log`: evenly by ratio; `points`: how many, in a grid."""

    min: float = Field(allow_inf_nan=False)
    max: float = Field(allow_inf_nan=False)
    log: bool = False
    whole: bool = Field(False, description="written `int`")
    points: int | None = Field(None, ge=2, le=MOST_TRIALS)

    def at(self, share: float) -> float | int:
        """The value at a share of the way, from 0 to 1 (exclusive for whole numbers)."""
        if self.log:
            value = math.exp(math.log(self.min) + share * (math.log(self.max) - math.log(self.min)))
        elif self.whole:
            value = self.min + math.floor(share * (self.max - self.min + 1))
        else:
            value = self.min + share * (self.max - self.min)
        value = min(max(value, self.min), self.max)
        return round(value) if self.whole else float(f"{value:.6g}")

    def grid(self) -> tuple[float | int, ...]:
        """`points` values from `min` to `max`."""
        count = self.points or 2
        ends = self.model_copy(update={"whole": False})
        values = [ends.at(index / (count - 1)) for index in range(count)]
        return tuple(dict.fromkeys(round(value) if self.whole else value for value in values))


class Objective(Part):
    """What is optimised: `validation_loss`, `loss`, or a metric that the job's evaluation reports.

    `last_steps`: a training loss is the mean over so many steps.
    """

    metric: str = VALIDATION_LOSS
    mode: Literal["min", "max"] = "min"
    last_steps: int = Field(1, ge=1, le=100_000)


class SweepSpec(Part):
    """A sweep, as a person writes it. `base` is a job file beside it, or a job itself."""

    base: str | dict[str, Any]
    name: Token | None = Field(None, max_length=80)
    parameters: dict[str, tuple[Any, ...] | ParameterRange]
    method: Literal["grid", "random", "halving"] = "grid"
    trials: int | None = Field(None, ge=1, le=MOST_TRIALS)
    max_parallel: int = Field(4, ge=1, le=1_000)
    seed: int = Field(0, ge=0, lt=1 << 63)
    objective: Objective = Objective()
    rungs: tuple[int, ...] = Field((), description="for halving: steps at which trials are compared")
    factor: float = Field(3.0, gt=1, le=1_000, description="for halving: one in so many goes on")

    @field_validator("parameters", mode="before")
    @classmethod
    def _values(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not value:
            raise ValueError(
                "a sweep of 0 trials: name at least one key with values, "
                "as training.optimizer.lr: [0.001, 0.01]"
            )
        return {str(path): _parameter(str(path), given) for path, given in value.items()}

    @model_validator(mode="after")
    def _method_fits(self) -> SweepSpec:
        ranges = [path for path, given in self.parameters.items() if isinstance(given, ParameterRange)]
        if self.method == "random" and self.trials is None:
            raise ValueError("trials: missing; a random sweep needs the number of trials")
        if self.method == "grid" and self.trials is not None:
            raise ValueError("trials: a grid has as many as there are combinations; leave it out")
        if self.trials is None:
            for path in ranges:
                given = self.parameters[path]
                if isinstance(given, ParameterRange) and given.points is None:
                    raise ValueError(
                        f"parameters.{path}: a grid needs a list of values, or `points: 5` in the range"
                    )
        if self.method == "halving" and not self.rungs:
            raise ValueError("rungs: missing; halving needs steps at which it compares, as [100, 300]")
        if self.method != "halving" and self.rungs:
            raise ValueError(f"rungs: only for method: halving, and this is {self.method}")
        if list(self.rungs) != sorted(set(self.rungs)) or any(rung < 1 for rung in self.rungs):
            raise ValueError("rungs: rising numbers of steps from 1, as [100, 300]")
        return self


def _parameter(path: str, given: Any) -> tuple[Any, ...] | ParameterRange:
    if isinstance(given, Sequence) and not isinstance(given, str):
        if not given:
            raise ValueError(f"{path}: no values, which is a sweep of 0 trials; give at least one")
        texts = [json.dumps(value, sort_keys=True, default=str) for value in given]
        for index, value in enumerate(texts):
            if value in texts[:index]:
                raise ValueError(f"{path}: {value} stands there twice; keep one of them")
        return tuple(given)
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}: {given!r} is one value; give a list of values, or min and max")
    missing = [name for name in ("min", "max") if name not in given]
    if missing:
        raise ValueError(
            f"{path}: a range needs {' and '.join(missing)}, as {{min: 1e-4, max: 1e-2, log: true}}"
        )
    body = {("whole" if key == "int" else str(key)): value for key, value in given.items()}
    try:
        found = ParameterRange.model_validate(body)
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error, ParameterRange)[0]}") from error
    if found.min >= found.max:
        raise ValueError(f"{path}: min {found.min:g} is not below max {found.max:g}")
    if found.log and found.min <= 0:
        raise ValueError(f"{path}: with log, min must be above 0, and it is {found.min:g}")
    if found.whole and (found.min % 1 or found.max % 1):
        raise ValueError(f"{path}: with int, min and max must be whole numbers")
    return found


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep that was read. `base` is the job as the person wrote it, without defaults; `file` for messages.

    `digest` names everything that decides about trials: a sweep with another digest is another sweep.
    `code` is the base's folder of code as it was when the file was read: all trials have it, whatever is
    edited meanwhile.
    """

    spec: SweepSpec
    name: str
    base: dict[str, Any]
    digest: str
    file: str
    code: PackedCode | None = None

    @property
    def array_name(self) -> str:
        """The name of its array of jobs, by which a sweep finds it again."""
        return f"{self.name}-{self.digest}"


def load_sweep(path: Path, overrides: Sequence[str] = (), name: str | None = None) -> Sweep:
    """Read and check a sweep file and its base job.

    Args:
        path: The sweep file.
        overrides: Items `key.path=value` for the base job.
        name: The sweep's name in place of the file's.

    Raises:
        BadJob: A file is wrong; the text has one line per problem, each with its place.
    """
    spec = load_document(path, SweepSpec, "a sweep is a mapping of keys (base:, parameters:, method: …)")
    if isinstance(spec.base, str):
        base = load_job(path.parent / spec.base, overrides)
    elif overrides:
        raise BadJob(f"--set {overrides[0]}: the base job stands in {path} itself; change it there")
    else:
        try:
            base = beside(JobSpec.model_validate({"name": "base", **spec.base}), path.parent)
        except ValidationError as error:
            raise BadJob("\n".join(f"{path}: base.{line}" for line in explain(error, JobSpec))) from error
    if base.array is not None:
        raise BadJob(f"{path}: base: it has an array, and a sweep makes its own; leave it out of the base")
    document = base.model_dump(mode="json", exclude_unset=True)
    decides = spec.model_dump(mode="json", exclude={"base", "name", "max_parallel"})
    packed, runs = None, document
    if base.code is not None and base.code.folder is not None:
        packed = pack_folder(base.code)
        runs = document | {"code": [packed.checksums, base.code.requirements]}
    text = json.dumps([runs, decides], sort_keys=True)
    chosen = name or spec.name or path.stem
    if not is_token(chosen) or len(chosen) > 80:
        raise BadJob(f"{path}: the sweep's name {chosen!r}: use 1 to 80 letters, digits, - and _ (--name)")
    return Sweep(
        spec=spec,
        name=chosen,
        base=document,
        digest=hashlib.sha256(text.encode()).hexdigest()[:6],
        file=str(path),
        code=packed,
    )
