"""Which files of its node a job's processes may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entities.cluster.file_reach import FileRules
from schemas.urls import local_path
from tests.builders.jobs import spec


def test_a_job_reads_what_it_names_and_writes_below_its_own_folder(tmp_path: Path) -> None:
    named = spec(
        data={"source": f"file://{tmp_path}/data/*.txt"}, initial_weights="w", artifacts=f"{tmp_path}/runs"
    )
    reached = FileRules().of_job("j1", named)
    assert reached.read == (f"{tmp_path}/data", os.path.abspath("w"))
    assert reached.write == (f"{tmp_path}/runs/j1",)


def test_a_job_reads_each_part_of_a_mixture_and_each_evaluation_set(tmp_path: Path) -> None:
    sets = {"dev": {"source": str(tmp_path / "dev")}}
    data = {"mixture": [{"source": str(tmp_path / name)} for name in ("a", "b")], "validation": sets}
    assert FileRules().of_job("j", spec(data=data)).read == tuple(
        str(tmp_path / name) for name in ("a", "b", "dev")
    )


def test_nothing_closed_is_given_whatever_link_leads_there(tmp_path: Path) -> None:
    state, link = tmp_path / "state", tmp_path / "link"
    state.mkdir()
    link.symlink_to(state)
    for path in (state, link, state / "bus_token", link / "logs", tmp_path / "x" / ".." / "state"):
        named = spec(data={"source": str(path)}, artifacts=str(path))
        assert FileRules((str(state),)).of_job("j1", named).read == ()
        assert FileRules((str(state),)).of_job("j1", named).write == ()
    assert FileRules((str(state),)).of_job("j1", spec(data={"source": f"{state}-2"})).read == (f"{state}-2",)


@pytest.mark.parametrize("url", ["bus://artifacts", "s3://bucket/x", "stdlib:", "memory://x"])
def test_what_is_no_file_is_none(url: str) -> None:
    assert local_path(url) is None
