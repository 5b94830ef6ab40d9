"""The blocks of docs/bring-your-own.md are files that train as they stand there: `dmsc check` says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dmsc.authoring.local_check import CheckReport, check_job
from dmsc.client.job_file import load_job

PAGE = (Path(__file__).parents[3] / "docs" / "bring-your-own.md").read_text()
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))
MOST_LINES = 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def checked(folder: Path, *overrides: str) -> CheckReport:
    """What `dmsc check job.yaml --set …` finds."""
    *_, (_, report) = check_job(load_job(folder / "job.yaml", overrides))
    return report


def has_trained(report: CheckReport) -> bool:
    """Two steps as one stage and as two, to the same weights."""
    trained = [(step["cut"], step["step"]) for step in report.steps] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    return trained and report.weights.keys() == {1, 2} and len(set(report.weights.values())) == 1


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".py")])
def test_a_block_of_code_has_ten_lines(name: str) -> None:
    assert sum(bool(line.strip()) for line in FILES[name].splitlines()) <= MOST_LINES


def test_the_page_s_model_loss_data_and_recipe_train(folder: Path) -> None:
    report = checked(folder)
    assert has_trained(report)
    assert report.topology is not None
    assert [layer.name for layer in report.topology.layers] == ["user", "item", "mix", "head"]
    assert [tensor.name for tensor in report.topology.batch] == ["user", "item", "stars"]


def test_the_page_s_declared_graph_trains(folder: Path) -> None:
    recipe = "training={steps: 2, microbatches: 4, microbatch_samples: 16}"
    report = checked(folder, "model={factory: 'towers:towers', loss: 'torch.nn:MSELoss'}", recipe)
    assert has_trained(report)
    assert report.topology is not None
    assert [layer.name for layer in report.topology.layers] == ["users", "items", "match"]
