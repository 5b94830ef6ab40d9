"""What code needs is looked for where it runs; what is missing is named together with the node."""

from __future__ import annotations

import sys

import pytest

from schemas.errors import BadModel
from schemas.job_file.code import CodeSpec
from workers.requirements import check_requirements, lack


def code(*requirements: str, python: str = "") -> CodeSpec:
    return CodeSpec(folder=".", requirements=requirements, python=python)


def test_what_is_there_is_no_problem() -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    check_requirements(None, "n")
    check_requirements(code("torch>=2", "NumPy", "no-such-thing; python_version < '3'", python=here), "n")


def test_everything_that_lacks_is_in_one_line() -> None:
    with pytest.raises(BadModel) as refused:
        check_requirements(code("torch", "no-such-thing>=1", "torch>=99"), "n7")
    assert refused.value.text.startswith(
        "node n7 lacks no-such-thing>=1 (not installed); torch>=99 (it has 2."
    )
    assert "\n" not in refused.value.text


def test_pickled_functions_need_their_own_python() -> None:
    with pytest.raises(BadModel, match=r"node n has Python 3\.\d+, but the job's code was pickled by 3\.1,"):
        check_requirements(code(python="3.1"), "n")


def test_a_marker_decides_whether_it_is_asked_for() -> None:
    assert lack("no-such-thing; sys_platform == 'nowhere'") == ""
    assert lack("no-such-thing; sys_platform != 'nowhere'") != ""
