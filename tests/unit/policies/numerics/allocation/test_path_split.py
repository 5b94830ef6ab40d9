"""Paths, splits, utilisation."""

from __future__ import annotations

import numpy as np
import pytest

from policies.contrib.topology_file import paths_over, shortest_paths

SQUARE = dict.fromkeys([(0, 1), (1, 0), (1, 3), (3, 1), (0, 2), (2, 0), (2, 3), (3, 2)], 1.0)


def test_the_shortest_paths_are_simple_distinct_and_in_order_of_length() -> None:
    ring = {**SQUARE, (0, 3): 1.0, (3, 0): 1.0}
    assert shortest_paths(ring, 0, 3, 9) == [[0, 3], [0, 1, 3], [0, 2, 3]]
    assert shortest_paths(ring, 0, 3, 2) == [[0, 3], [0, 1, 3]]
    assert shortest_paths({(0, 1): 1.0}, 1, 0, 4) == []


def test_links_carry_what_the_split_sends_over_them() -> None:
    paths = paths_over(SQUARE, [[[0, 1, 3], [0, 2, 3]], [[0, 1]]])
    used = paths.utilisation(np.array([4.0, 1.0]), np.array([[0.75, 0.25], [1.0, 0.0]]))
    by_link = dict(zip(SQUARE, used.tolist(), strict=True))
    assert by_link[0, 1] == 4.0
    assert by_link[1, 3] == 3.0
    assert by_link[0, 2] == by_link[2, 3] == 1.0
    assert sum(used) == 9.0


def test_what_a_path_sees_of_its_links() -> None:
    paths = paths_over(SQUARE, [[[0, 1, 3], [0, 2, 3]], [[0, 1]]])
    values = np.arange(8.0)
    assert paths.greatest(values).tolist() == [[2.0, 6.0], [0.0, 0.0]]
    assert paths.total(values).tolist() == [[2.0, 10.0], [0.0, 0.0]]
    assert paths.hops[0].tolist() == [2.0, 2.0]


def test_equal_cost_takes_only_the_paths_with_the_fewest_links() -> None:
    ring = {**SQUARE, (0, 3): 1.0}
    paths = paths_over(ring, [[[0, 3], [0, 1, 3], [0, 2, 3]], [[0, 1, 3], [0, 2, 3]]])
    assert paths.equal_cost().tolist() == [[1, 0, 0], [0.5, 0.5, 0]]
    assert paths.shortest().tolist() == [[1, 0, 0], [1, 0, 0]]


def test_a_lost_link_takes_its_paths_and_leaves_one_at_least() -> None:
    paths = paths_over(SQUARE, [[[0, 1, 3], [0, 2, 3]], [[0, 1]]])
    left = paths.without([list(SQUARE).index((0, 1))])
    assert left.present.tolist() == [[False, True], [True, False]]
    assert left.rescaled(np.array([[0.9, 0.1], [1.0, 0.0]])).tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_a_path_over_a_link_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        paths_over(SQUARE, [[[0, 3]]])
