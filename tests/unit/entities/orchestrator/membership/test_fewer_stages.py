"""In which shapes a job may go on if there is less room than it had."""

from __future__ import annotations

from typing import Any

import pytest

from entities.orchestrator.membership.fewer_stages import smaller_shapes
from tests.builders.jobs import spec


def shapes(**parallel: Any) -> list[tuple[int, Any]]:
    found = [each.parallel for each in smaller_shapes(spec(parallel=parallel))]
    return [(each.stages, each.replicas) for each in found]


def test_most_slots_come_first_and_of_equally_many_most_stages() -> None:
    assert shapes(stages=3, replicas=1) == [(2, 1), (1, 1)]
    assert shapes(stages=2, replicas=2) == [(2, 1), (1, 2), (1, 1)]
    assert shapes(stages=1, replicas=1) == []


def test_a_range_of_replicas_stays_one() -> None:
    within = {"min": 1, "want": 2, "max": 3}
    found = [each.parallel for each in smaller_shapes(spec(parallel={"stages": 3, "replicas": within}))]
    assert [each.stages for each in found] == [2, 1]
    assert all(each.replica_range is not None and each.replica_range.want == 2 for each in found)


@pytest.mark.parametrize("replicas", [[2, 1, 1], [1, 3, 2]])
def test_unequal_stages_count_by_the_smallest(replicas: list[int]) -> None:
    assert shapes(stages=3, replicas=replicas) == [(3, 1), (2, 1), (1, 1)]
