"""What a version says of itself beyond its weights: from a job's record and from the files. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from entities.model_records.model_index import ModelIndex
from schemas.job import JobRecord, WeightsManifest
from schemas.models.version import (
    ModelCost,
    ModelData,
    ModelEvaluation,
    ModelLineage,
    ModelSignature,
    SignatureTensor,
)
from schemas.weights_digest import weights_sha256

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Files that decide which ids a text has; the first one that is there counts."""
BYTES = "bytes"
_TOKENS = ("batch", "tokens")
_VOCABULARY = ("vocab_size", "vocabulary")
_CONTEXT = ("max_position_embeddings", "n_positions", "context", "seq_length")
_PIXELS = re.compile(r"ForImageClassification$|^ViT")
_LANGUAGE = re.compile(r"(ForCausalLM|LMHeadModel|ForMaskedLM|ForConditionalGeneration)$")


def digest_of_job(manifest: WeightsManifest, tensors: Mapping[str, str]) -> str:
    """The digest of a job's weights from the tensors of its shards, whose names may be others there."""
    own = {written: name for name, written in manifest.names.items()}
    return weights_sha256({own.get(name, name): line for name, line in tensors.items()})


def config_of(small: Mapping[str, bytes]) -> dict[str, Any]:
    """The `config.json` beside the weights; empty if there is none that can be read."""
    try:
        found = json.loads(small.get("config.json", b"{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def signature_of(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> ModelSignature:
    """What the model takes and gives, as far as its config, or the arguments of its factory, say so."""
    known = {**arguments, **config}
    vocabulary, context = _first(known, _VOCABULARY), _first(known, _CONTEXT)
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if any(map(_LANGUAGE.search, names)) or (not names and vocabulary):
        taken = SignatureTensor(name="input_ids" if names else "inputs", dtype="int64", shape=_TOKENS)
        given = SignatureTensor(name="logits", dtype="float32", shape=(*_TOKENS, vocabulary or "vocabulary"))
        return ModelSignature(inputs=(taken,), outputs=(given,), vocabulary=vocabulary, context=context)
    if any(map(_PIXELS.search, names)):
        size = _first(known, ("image_size",)) or "side"
        channels = _first(known, ("num_channels",)) or 3
        taken = SignatureTensor(name="pixel_values", dtype="float32", shape=("batch", channels, size, size))
        labels = config.get("id2label")
        count: int | str = len(labels) if isinstance(labels, dict) else "labels"
        given = SignatureTensor(name="logits", dtype="float32", shape=("batch", count))
        return ModelSignature(inputs=(taken,), outputs=(given,))
    return ModelSignature(vocabulary=vocabulary, context=context)


def _first(known: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    found = (known[key] for key in keys if isinstance(known.get(key), int))
    return next((value for value in found if value > 0), None)


def tokenizer_of(digests: Mapping[str, str], job: JobRecord | None) -> tuple[str, str]:
    """What the tokenizer is called, and its digest: from the files beside the weights, else from the job.

    `digests`: file → SHA-256.
    """
    for name in TOKENIZERS:
        if name in digests:
            return name, digests[name]
    if job is None:
        return "", ""
    data = job.spec.data
    if data.kind == BYTES:
        return BYTES, ""
    return (data.tokenizer, "") if data.kind in ("text", "chat") else ("", "")


def lineage_of_job(record: JobRecord, index: ModelIndex) -> ModelLineage:
    """Where a job's weights come from."""
    spec, graph = record.spec, record.graph
    parent, parent_sha256 = _parent(record, index)
    return ModelLineage(
        job=record.job,
        spec_sha256=hashlib.sha256(spec.model_dump_json().encode()).hexdigest(),
        code_sha256=(spec.code.sha256 if spec.code is not None else None)
        or ("" if graph is None else graph.code_digest[:64]),
        data_sha256="" if graph is None else graph.data_digest[:64],
        data=_data(record),
        parent=parent,
        parent_sha256=parent_sha256,
        seed=spec.training.seed,
        step=None if record.weights is None else record.weights.step,
    )


def _data(record: JobRecord) -> tuple[ModelData, ...]:
    found: dict[str, ModelData] = {}
    for part in record.spec.data.places().values():
        use = part.data_set
        source = part.source if use is None else f"dataset://{use.lineage}"
        found.setdefault(source, ModelData(source=source, digest="" if use is None else use.digest))
    return tuple(found.values())


def _parent(record: JobRecord, index: ModelIndex) -> tuple[str, str]:
    """The version that the job began with: as it named it, or by the folder that it read."""
    began = record.spec.initial_weights
    if began is not None and began.model is not None:
        return began.model.reference, began.model.sha256
    if began is not None and (found := index.stored_at(began.url)) is not None:
        return found.reference, found.sha256
    resumed = record.spec.resume_from
    if resumed is not None:
        for version in index.each():
            if version.lineage.job and f"/{version.lineage.job}/" in f"{resumed}/":
                return version.reference, version.sha256
    return "", ""


def cost_of(record: JobRecord) -> ModelCost:
    """What the job had used."""
    usage = record.usage
    return ModelCost(slot_s=usage.slot_s, redone_slot_s=usage.redone_slot_s, energy_j=usage.energy_j)


def evaluations_of(record: JobRecord, now: float) -> tuple[ModelEvaluation, ...]:
    """The figures of the job's last validation."""
    figures = dict(record.metrics)
    if record.validation_loss is not None:
        figures.setdefault("validation_loss", record.validation_loss)
    finite = {name: value for name, value in figures.items() if name and abs(value) < float("inf")}
    return tuple(
        ModelEvaluation(metric=name[:120], value=value, data="the job's validation", by=record.job, at=now)
        for name, value in sorted(finite.items())[:64]
    )
