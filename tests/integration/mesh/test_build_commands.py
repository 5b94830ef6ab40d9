"""`dmsc data …` about builds: what its id shows, one word for what was dropped, where a store may lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.data_set.builds import BuildState
from tests.integration.mesh.conftest import Mesh

DOUBLE = "a text that is there twice, word for word"
BUILD = """
name: told
source: {texts}
steps:
  - {{function: clean}}
  - {{function: near_duplicates, args: {{threshold: 0.8}}, reason: {reason}}}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp() / "told"
    folder.mkdir()
    for number, text in enumerate(
        (DOUBLE, DOUBLE, "another one, of which there is no second in this folder")
    ):
        (folder / f"{number}.txt").write_text(text)
    file = folder / "build.yaml"
    file.write_text(BUILD.format(texts=folder / "*.txt", reason="said before"))
    return file


def test_an_id_of_a_build_shows_it_and_dropped_rows_have_one_name(mesh: Mesh, file: Path) -> None:
    followed = mesh.printed("data", "build", str(file))
    build = followed.split()[0]
    record = mesh.client.build_record(build)
    assert record.state is BuildState.DONE, record.reason
    manifest = mesh.client.data_set_manifest("told")
    assert manifest.dropped == {"said before": 1}
    assert {reason for phase in record.phases for reason in phase.dropped} == {"said before"}

    shown = mesh.printed("data", "show", build)
    assert shown.startswith(f"{build} done, told of ")
    assert "records 3/3 units" in shown or "records 1/1 units" in shown
    for command in (("check", build), ("diff", "told", build)):
        refused = mesh.dmsc("data", *command)
        assert refused.returncode != 0
        line = (
            f"{build} is a build, of data set told: `dmsc data show {build}` shows it; what it made is told@1"
        )
        assert refused.stderr == f"dmsc: {line}\n"
    unknown = mesh.dmsc("data", "show", "b0000ff")
    line = "there is no build b0000ff, and no data set of that name; `dmsc data list` shows which there are"
    assert (unknown.returncode != 0, unknown.stderr) == (True, f"dmsc: {line}\n")


def test_a_store_in_a_folder_of_no_jobs_is_refused_with_what_is_possible(mesh: Mesh, file: Path) -> None:
    refused = mesh.dmsc("data", "build", str(file), "--set", "store=/elsewhere/sets")
    assert refused.returncode != 0
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.startswith(
        "dmsc: store: /elsewhere/sets lies in no folder that jobs may write into ("
    )
    remedies = "--allow-url /elsewhere/sets, or leave it out: without it a data set lies on the bus"
    assert refused.stderr.endswith(f"; start the mesh with {remedies}\n")
