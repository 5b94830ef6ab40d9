"""Reads a scenario file; each problem is one line with its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dmsc.client.job_file import load_document
from dmsc.simulation.scenarios.scenario import Scenario
from schemas.errors import BadInput, BadJob


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read and check a scenario. `overrides`: `key.path=value`, as for jobs.

    Raises:
        BadInput: one line per problem, each with file and line.
    """
    what = "a scenario is a mapping of keys (name:, clusters:, jobs: …)"
    try:
        return load_document(path, Scenario, what, overrides)
    except BadJob as error:
        raise BadInput(error.text) from error
