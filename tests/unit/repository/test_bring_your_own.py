"""The blocks of docs/bring-your-own.md are files that analyse as they stand there."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
import yaml

from schemas.job import JobSpec
from schemas.task_graph import ModelTopology
from workers.data.opening import open_source
from workers.tasks.analysis import analyse

PAGE = (Path(__file__).parents[3] / "docs" / "bring-your-own.md").read_text()
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = [name.removesuffix(".py") for name in FILES]
    yield tmp_path
    for name in modules:
        sys.modules.pop(name, None)


def analysed(**model: str) -> ModelTopology:
    job = yaml.safe_load(FILES["job.yaml"])
    job["model"] |= model
    if model:
        del job["training"]["optimizer"], job["training"]["evaluation"]
    spec = JobSpec.model_validate(job)
    source = asyncio.run(open_source(spec, None))
    try:
        return analyse("shop", spec, source, "a", "here")
    finally:
        source.close()


@pytest.mark.usefixtures("folder")
def test_the_page_s_model_loss_and_data_can_be_trained() -> None:
    topology = analysed()
    assert [layer.name for layer in topology.layers] == ["user", "item", "mix", "head"]
    assert [tensor.name for tensor in topology.batch] == ["user", "item", "stars"]


@pytest.mark.usefixtures("folder")
def test_the_page_s_declared_graph_can_be_trained() -> None:
    topology = analysed(factory="towers:towers", loss="torch.nn:MSELoss")
    assert [layer.name for layer in topology.layers] == ["users", "items", "match"]
