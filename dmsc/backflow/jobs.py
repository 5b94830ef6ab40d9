"""The jobs of a round of learning, and what follows from them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import BadJob
from schemas.job import JobRecord, JobSpec
from schemas.services.keeping import KeptCollection
from schemas.services.model_service import WHOLE, ModelService

KINDS = ("text", "chat")
"""Of data that a file of kept requests is."""
UNCHANGED_RATE = 1e-30
"""A learning rate by which no weight changes: the job only says how good the weights are."""


def learning_job(
    spec: JobSpec, collection: KeptCollection, serving: JobRecord, model: str, *, name: str
) -> JobSpec:
    """The job of a file, on a collection, from the weights that serve now.

    Raises:
        BadJob: The file's data are neither texts nor conversations, or nothing is measured.
    """
    document = spec.model_dump(mode="json")
    data = document["data"]
    if spec.data.kind not in KINDS:
        raise BadJob(f"data.kind: {spec.data.kind}: kept requests are read by kind text, or chat")
    data.update(source=collection.source, format="jsonl", data_set=None)
    if spec.data.kind == "text":
        data["field"] = "text"
    if not spec.data.validation and not spec.data.validation_fraction:
        raise BadJob("data.validation: nothing says whether the weights got better; name evaluation sets")
    if not spec.training.validation_microbatches:
        raise BadJob("training.validation_microbatches: 0 measures nothing; give 2 or more")
    if spec.initial_weights is None:
        document["initial_weights"] = _weights(serving)
    document["register"] = {
        "name": model,
        "notes": f"learnt from {collection.items:,} kept requests of {collection.users:,} users "
        f"({collection.source}, {collection.sha256[:12]})",
    }
    document["name"] = name
    return JobSpec.model_validate(document)


def measuring_job(learning: JobSpec) -> JobSpec:
    """The job that measures what the weights were before, on the same samples."""
    document = learning.model_dump(mode="json")
    document["name"] = f"{learning.name}-before"
    document["register"] = None
    # One step, whatever its file says of the length, or of a rate that changes on the way.
    document["training"].update(steps=1, until=None, schedule={"name": "constant"}, checkpoint_every=0)
    document["training"]["optimizer"] = {
        **document["training"]["optimizer"],
        "lr": UNCHANGED_RATE,
        "groups": [],
    }
    return JobSpec.model_validate(document)


def _weights(serving: JobRecord) -> Any:
    began = serving.spec.initial_weights
    if began is None:
        raise BadJob(
            f"initial_weights: job {serving.job} serves weights of its own seed; name what to begin with"
        )
    document = began.model_dump(mode="json", exclude={"model"})
    if began.model is not None:
        document["url"] = f"model://{began.model.reference}"
    return document


# --- the gate -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class GateVerdict:
    """Whether the new weights are good enough, and why; losses by name, before and after."""

    passed: bool
    why: str
    before: dict[str, float]
    after: dict[str, float]


def judged(before: Mapping[str, float], after: Mapping[str, float], worse: float) -> GateVerdict:
    """Passed if no loss is higher by more than `worse`, and each that was measured before is a number now.

    `worse` below 0: each has to be lower, by so much.
    """
    first, second = dict(before), dict(after)
    if not first or first.keys() != second.keys():
        return GateVerdict(False, "the two jobs did not measure the same", first, second)
    if not all(map(math.isfinite, (*first.values(), *second.values()))):
        return GateVerdict(False, "a loss is no number", first, second)
    by = {name: second[name] - first[name] for name in first}
    worst = max(by, key=lambda name: by[name])
    why = f"{worst} {first[worst]:.4f} → {second[worst]:.4f}"
    if by[worst] > worse:
        lacks = f"worse by more than {worse:g}" if worse >= 0 else f"not better by {-worse:g}"
        return GateVerdict(False, f"{why}, {lacks}", first, second)
    return GateVerdict(True, why, first, second)


def losses(record: JobRecord) -> dict[str, float]:
    """The losses of a job's last validation, by evaluation set."""
    found = {name: value for name, value in record.metrics.items() if name.rpartition("/")[2] == "loss"}
    if not found and record.validation_loss is not None:
        found = {"loss": record.validation_loss}
    return found


# --- the next version ---------------------------------------------------------------------------------------
def next_version(serving: JobRecord, version: str, reference: str) -> JobSpec:
    """As the version that serves now, with other weights."""
    document = serving.spec.model_dump(mode="json")
    document["serve"] = {**document["serve"], "version": version}
    document["initial_weights"] = {"url": f"model://{reference}"}
    return JobSpec.model_validate(document)


def with_canary(service: ModelService, version: str, share: int) -> dict[str, int]:
    """The service's weights with `share` ten-thousandths for a version, the others' in proportion."""
    rest = {name: weight for name, weight in service.weights.items() if name != version and weight}
    total = sum(rest.values())
    weights = {name: weight * (WHOLE - share) // total for name, weight in rest.items()}
    heaviest = max(sorted(weights), key=lambda name: weights[name])
    weights[heaviest] += WHOLE - share - sum(weights.values())
    return {**weights, version: share}
