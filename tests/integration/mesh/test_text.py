"""A job on text: tokens by a BPE tokenizer, documents separated or not, and the same weights whoever dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobSpec, JobState
from schemas.job_file.data import DataSpec
from tests.builders.text import CHATML, lines, saved_bpe
from tests.integration.mesh.conftest import Mesh, done, outcome, padded, tiny_job, until_step

VOCABULARY = 400


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The section `data` of a job on some texts."""
    folder = tmp_path_factory.mktemp("text")
    source = lines(folder / "rows.jsonl", [{"text": f"text {n} says {n * n} and {n**3}"} for n in range(300)])
    return {
        "kind": "text",
        "source": source,
        "tokenizer": saved_bpe(folder, VOCABULARY),
        "sample_tokens": 32,
        "validation_fraction": 0.05,
    }


def text_job(name: str, data: dict[str, Any], vocabulary: int = VOCABULARY, **sections: Any) -> JobSpec:
    arguments = {"layers": 2, "width": 32, "heads": 2, "context": 32, "vocabulary": vocabulary}
    job = tiny_job(name, model={"args": arguments}, **sections)
    return job.model_copy(update={"data": DataSpec.model_validate(data)})


def test_a_killed_data_instance_changes_no_bit(mesh: Mesh, data: dict[str, Any]) -> None:
    peaceful = outcome(mesh.client, padded(text_job("text-alone", data), 0.0))
    assert peaceful.weights is not None, peaceful.reason
    shape = {"stages": 2, "replicas": 2}
    job = mesh.client.submit(padded(text_job("text-killed", data, parallel=shape), 15.0)).job
    until_step(mesh.client, job, 2)
    os.kill(mesh.instance(f"{job}-data-r0").endpoint.pid, signal.SIGKILL)
    record = done(mesh.client, job)
    assert record.recoveries >= 1
    assert record.weights is not None
    assert record.weights.sha256 == peaceful.weights.sha256
    made = {path.parent.name for path in mesh.state.rglob("tokens/*/tokens.json")}
    assert len(made) == 1, "instances and analyses of a user share what one of them made"


def test_conversations_train_whatever_names_the_model_takes(mesh: Mesh, data: dict[str, Any]) -> None:
    """Padded and separated: the model takes neither `position_ids` nor `document_ids`."""
    folder = Path(data["source"]).parent
    talk = [
        {"role": "user", "content": "how many?"},
        {"role": "assistant", "content": "as many as there are"},
    ]
    chat = {
        "kind": "chat",
        "source": lines(folder / "talk.jsonl", [{"messages": talk}] * 200),
        "template": CHATML,
        "packing": "best_fit",
        "attention": "within_documents",
    }
    record = outcome(mesh.client, text_job("chat", data | chat, training={"steps": 3}))
    assert record.state is JobState.DONE, record.reason
    assert record.loss_last is not None
    assert record.loss_first is not None
    assert record.loss_last < record.loss_first


def test_batches_of_any_length_have_the_same_bits_in_any_shape(mesh: Mesh, data: dict[str, Any]) -> None:
    path = Path(data["source"]).with_name("ragged.jsonl")
    rows = [{"text": "word " * (number % 23 + 1)} for number in range(300)]
    fields = {"packing": "none", "pad_to_longest": True, "source": lines(path, rows)}
    hashes = set()
    for shape in ({"stages": 1}, {"stages": 2, "replicas": 2}):
        job = text_job("ragged", data | fields, training={"steps": 4}, parallel=shape)
        record = outcome(mesh.client, job)
        assert record.weights is not None, record.reason
        hashes.add(record.weights.sha256)
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("fields", "vocabulary", "expected"),
    [
        ({}, VOCABULARY - 1, "embeds 399 ids, and the tokenizer has ids up to 399"),
        ({"field": "body"}, VOCABULARY, "rows.jsonl, line 1 has no field 'body', but text; say data.field"),
    ],
    ids=["vocabulary", "field"],
)
def test_what_does_not_fit_is_refused_in_one_line(
    mesh: Mesh, data: dict[str, Any], fields: dict[str, Any], vocabulary: int, expected: str
) -> None:
    record = outcome(mesh.client, text_job("text-refused", data | fields, vocabulary))
    assert record.state is JobState.FAILED
    assert expected in record.reason
    assert "\n" not in record.reason
