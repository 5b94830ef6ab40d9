"""What code needs of the packages that are installed where it runs: a node that lacks something is named."""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.requirements import Requirement

from schemas.errors import BadModel
from schemas.job_file.code import CodeSpec


def check_requirements(code: CodeSpec | None, node: str) -> None:
    """Checks Python and the installed packages against a job's `code`; installs nothing.

    Raises:
        BadModel: something is missing here, or has another version; one line that names the node.
    """
    if code is None:
        return
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if code.python and code.python != python:
        raise BadModel(
            f"node {node} has Python {python}, but the job's code was pickled by {code.python}, which "
            "others can't read; submit it from a notebook of the same Python, or as files in a folder"
        )
    lacking = [problem for text in code.requirements if (problem := lack(text))]
    if lacking:
        raise BadModel(
            f"node {node} lacks {'; '.join(lacking)}; install it there, since jobs install nothing"
        )


def lack(text: str) -> str:
    """What is missing of one requirement, in words; empty if nothing is, or it does not apply here."""
    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return ""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{text} (not installed)"
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{text} (it has {version})"
