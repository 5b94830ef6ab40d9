"""Deadlines of orders that move a stage's state: by its bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.job_state.instances import InstanceTimes, JobInstances
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.limits import SLOWEST_BYTES_PER_S
from tests.builders.jobs import job


def of(*memory_bytes: int) -> JobInstances:
    nothing: Any = None
    instances = JobInstances(nothing, MeshView(), job("j"))
    units = [SimpleNamespace(requirements=SimpleNamespace(memory_bytes=each)) for each in memory_bytes]
    graph: Any = SimpleNamespace(units=units)
    instances.graph = graph
    return instances


def test_a_small_stage_has_the_least_patience() -> None:
    assert of(1000, 2000).patience_s(120.0) == pytest.approx(120.0, abs=0.01)


def test_a_stage_of_forty_gigabytes_is_given_the_time_that_it_takes() -> None:
    assert of(1000, 40 * 10**9).patience_s(120.0) == 120.0 + 40e9 / SLOWEST_BYTES_PER_S > 2 * 3600


@pytest.mark.parametrize("url", ["bus://artifacts/j", "/data/j", "file:///data/j", ""])
def test_what_is_moved_in_pieces_that_are_counted_may_rest_as_long_whatever_its_size(url: str) -> None:
    assert of(40 * 10**9).idle_s(url) == InstanceTimes().no_progress_s


@pytest.mark.parametrize("url", ["s3://bucket/j", "https://example.org/j", "secret://mine"])
def test_elsewhere_a_whole_file_may_be_one_piece(url: str) -> None:
    assert of(40 * 10**9).idle_s(url) == InstanceTimes().no_progress_s + 40e9 / SLOWEST_BYTES_PER_S
