"""The trials of a sweep: their parameters and their jobs, as functions of the sweep file alone. Pure."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dmsc.sweeps.sweep_file import LOSS, MOST_TRIALS, VALIDATION_LOSS, ParameterRange, Sweep, SweepSpec
from schemas.arrays import member_name
from schemas.errors import BadJob
from schemas.evaluation_sets import evaluation_sets
from schemas.explain import explain
from schemas.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class SweepTrial:
    """One job of a sweep. `values` are its parameters by dotted path."""

    number: int
    values: dict[str, Any]
    spec: JobSpec


def parameters_of(spec: SweepSpec) -> Iterator[dict[str, Any]]:
    """The parameters of each trial in order. A drawn trial depends on the seed and its number only."""
    if spec.trials is None:
        lists = [
            given.grid() if isinstance(given, ParameterRange) else given for given in spec.parameters.values()
        ]
        for values in itertools.product(*lists):
            yield dict(zip(spec.parameters, values, strict=True))
        return
    for number in range(spec.trials):
        draw = random.Random(f"{spec.seed}/{number}")
        yield {path: _drawn(given, draw.random()) for path, given in spec.parameters.items()}


def count_of(spec: SweepSpec) -> int:
    """The number of trials."""
    if spec.trials is not None:
        return spec.trials
    given = spec.parameters.values()
    return math.prod(len(one.grid()) if isinstance(one, ParameterRange) else len(one) for one in given)


def _drawn(given: tuple[Any, ...] | ParameterRange, share: float) -> Any:
    return given.at(share) if isinstance(given, ParameterRange) else given[int(share * len(given))]


def trials_of(sweep: Sweep) -> tuple[SweepTrial, ...]:
    """All trials of a sweep, each checked as a job file is.

    Raises:
        BadJob: Some trial is no valid job, or can't be compared at the rungs; one line per problem.
    """
    count = count_of(sweep.spec)
    if count > MOST_TRIALS:
        raise BadJob(f"{sweep.file}: parameters: {count:,} combinations; a sweep has at most {MOST_TRIALS:,}")
    trials: list[SweepTrial] = []
    problems: dict[str, str] = {}
    for number, values in enumerate(parameters_of(sweep.spec)):
        try:
            trials.append(SweepTrial(number=number, values=values, spec=_job(sweep, number, values)))
        except ValidationError as error:
            lines = explain(error, JobSpec)
        except ValueError as error:
            lines = [str(error)]
        else:
            lines = _incomparable(sweep.spec, trials[-1].spec)
        for line in lines:
            problems.setdefault(line, f"{sweep.file}: {_where(values)}: {line}")
    if problems:
        raise BadJob("\n".join(problems.values()))
    try:
        array_spec(sweep, trials)
    except ValidationError as error:
        raise BadJob("\n".join(f"{sweep.file}: {line}" for line in explain(error, JobSpec))) from error
    return tuple(trials)


def array_spec(sweep: Sweep, trials: Sequence[SweepTrial]) -> JobSpec:
    """The job file of all trials together."""
    members = [trial.values for trial in trials]
    array = {"members": members, "limit": sweep.spec.max_parallel}
    return JobSpec.model_validate({**sweep.base, "name": sweep.array_name, "array": array})


def _where(values: Mapping[str, Any]) -> str:
    return "parameters " + ", ".join(f"{path}={value}" for path, value in values.items())


def _job(sweep: Sweep, number: int, values: Mapping[str, Any]) -> JobSpec:
    document = copy.deepcopy(sweep.base)
    for path, value in values.items():
        target = document
        *parents, last = path.split(".")
        for depth, key in enumerate(parents):
            below = target.setdefault(key, {})
            if not isinstance(below, dict):
                raise ValueError(
                    f"{'.'.join(parents[: depth + 1])} is a value, it has no keys below it: {path}"
                )
            target = below
        target[last] = value
    name = member_name(sweep.array_name, number, count_of(sweep.spec))
    return JobSpec.model_validate(document | {"name": name})


def _incomparable(spec: SweepSpec, job: JobSpec) -> list[str]:
    """Why the objective can't be had of a job where it is needed."""
    training = job.training
    if spec.objective.metric == LOSS:
        validates, every = True, 1
    else:
        validates, every = any(count for _, count in evaluation_sets(job)), training.evaluate_every
    lines = []
    if spec.objective.metric == VALIDATION_LOSS and not validates:
        lines.append(
            "objective.metric: validation_loss, and the job does not validate: give "
            "training.validation_microbatches, and data.validation or data.validation_fraction, or take loss"
        )
    for rung in spec.rungs:
        if rung >= training.steps:
            lines.append(f"rungs: {rung} is not below training.steps, {training.steps}")
        elif every == 0 or rung % every:
            divisor = math.gcd(*spec.rungs)
            lines.append(
                f"rungs: no validation at step {rung}: give training.validate_every: {divisor}, or a divisor"
                f" of it, and not {every}"
            )
            break
    return lines
