"""The examples that can be trained: each job file loads, its data can be made, and its analysis succeeds.

`make examples` trains them.
"""

from __future__ import annotations

import asyncio
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmsc.client.job_file import load_job
from workers.data.opening import open_source
from workers.tasks.analysis import analyse

ROOT = Path(__file__).parents[3]
NAMES = sorted(file.parent.name for file in (ROOT / "examples").glob("*/job.yaml"))
NEEDED = {
    "digits": ["pyarrow"],
    "vit": ["PIL", "transformers"],
    "bert": ["tokenizers", "transformers"],
    "t5": ["tokenizers", "transformers"],
    "llama-lora": ["peft", "tokenizers", "transformers"],
}
"""Libraries of the extras that an example needs."""


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the example with its data made, `examples/NAME` below the working directory; its code is
    found."""
    name = request.param
    for library in NEEDED.get(name, []):
        pytest.importorskip(library, reason="the extras `data`, `text` and `hf` are not installed")
    copy = tmp_path / "examples" / name
    shutil.copytree(ROOT / "examples" / name, copy, ignore=shutil.ignore_patterns("data", "__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(copy))
    if (copy / "make_data.py").exists():
        runpy.run_path(str(copy / "make_data.py"), run_name="__main__")
    yield copy
    for module in copy.glob("*.py"):
        sys.modules.pop(module.stem, None)


@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_an_example_s_data_can_be_made_and_its_model_trained_on_it(folder: Path) -> None:
    spec = load_job(folder / "job.yaml")
    data = asyncio.run(open_source(spec, None))
    try:
        topology = analyse(spec.name, spec, data, "a", "here")
    finally:
        data.close()
    assert len(topology.layers) >= spec.parallel.stages
    assert 1_000 < topology.parameters < 1_000_000


@pytest.mark.parametrize("name", NAMES)
def test_an_example_s_header_says_how_to_run_it(name: str) -> None:
    lines = (ROOT / "examples" / name / "job.yaml").read_text().splitlines()
    header = [line.removeprefix("#").split("#")[0].strip() for line in lines if line.startswith("#")]
    assert f"dmsc demo examples/{name}/job.yaml" in header
    maker = f"examples/{name}/make_data.py"
    assert (f"python {maker}" in header) == (ROOT / maker).exists()


def test_the_page_lists_each_example() -> None:
    page = (ROOT / "docs" / "bring-your-own.md").read_text()
    assert [name for name in NAMES if f"`dmsc demo examples/{name}/job.yaml`" not in page] == []
