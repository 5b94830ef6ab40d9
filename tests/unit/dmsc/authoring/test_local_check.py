"""A job is checked on its author's machine: what is found, and that every end of the process is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dmsc.authoring.local_check import CheckOptions, check_job
from schemas.errors import BadData, BadModel
from schemas.job import JobSpec

MODEL = """
import os, random
from torch import nn

def sound():
    print("a model may print")
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 256))

def crashing():
    os.abort()

def failing():
    width = 17
    raise ValueError("no such width")

class Noise(nn.Module):
    def forward(self, hidden):
        return hidden * random.random()

def noisy():
    return nn.Sequential(nn.Embedding(256, 8), Noise(), nn.Linear(8, 256))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("def fibonacci(n): return n\n" * 100)
    return tmp_path


def job(folder: Path, factory: str = "sound", stages: int = 3, **training: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "checked",
            "model": {"factory": f"models:{factory}"},
            "data": {"source": str(folder / "text.txt"), "sample_tokens": 8},
            "training": {"steps": 2, **(training or {"microbatches": 2, "microbatch_samples": 2})},
            "parallel": {"stages": stages},
            "code": {"folder": str(folder), "include": ["*.py"]},
        }
    )


def test_a_sound_job_is_shown_whole(folder: Path) -> None:
    by_memory = {"step_samples": 6, "microbatch_samples": "auto", "recompute": "auto"}  # of a mesh: few, here
    found = list(check_job(job(folder, stages=1, **by_memory), CheckOptions(steps=2)))
    assert [name for name, _ in found] == ["code", "batch", "topology", *(["step"] * 2 + ["weights"]) * 2]
    report = found[-1][1]
    assert [(entry["name"], entry["shape"]) for entry in report.batch] == [
        ("inputs", [2, 8]),
        ("targets", [2, 8]),
    ]
    assert len(report.to_json()["layers"]) == 4
    (stage,) = report.to_json()["stages"]
    assert stage["memory_bytes"] > 24 * (256 * 8 * 2 + 8 * 8)  # weights, moments, sum, gradient
    assert report.weights.keys() == {1, 2}, "one stage is compared with two"
    assert len(set(report.weights.values())) == 1


@pytest.mark.parametrize(
    ("factory", "line"),
    [
        ("crashing", "the check's process was killed by SIGABRT while building and measuring the model"),
        ("noisy", r"the weights depend on where the model is cut .* random numbers that are not torch's"),
    ],
)
def test_each_end_is_one_line(folder: Path, factory: str, line: str) -> None:
    with pytest.raises(BadModel, match=line) as refused:
        list(check_job(job(folder, factory), CheckOptions(steps=1)))
    assert "\n" not in refused.value.text


def test_what_is_not_checked_of_a_feeds_job_is_said(folder: Path) -> None:
    spec = job(folder).model_dump(mode="json") | {"data": {"kind": "feed", "feed": "sensor"}}
    with pytest.raises(BadData) as refused:
        list(check_job(JobSpec.model_validate(spec), CheckOptions(steps=1)))
    text = refused.value.text
    assert text.startswith(
        "data.feed: the job file is right and its code is there; a batch, the layers, memory "
    )
    assert "not checked, because records of feed sensor are at a mesh" in text
    assert "\n" not in text


def test_a_debugger_opens_where_the_users_code_failed(folder: Path) -> None:
    (folder / "job.yaml").write_text(json.dumps(job(folder, "failing").model_dump(mode="json")))
    done = subprocess.run(
        [sys.executable, "-m", "dmsc", "check", str(folder / "job.yaml"), "--debug"],
        input="p width * 2\nq\n",
        capture_output=True,
        text=True,
    )
    assert "(Pdb) 34" in done.stdout
    assert "no such width" in done.stderr
    assert done.returncode == 2
