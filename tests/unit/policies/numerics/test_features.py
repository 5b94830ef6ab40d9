"""Windows, cleaning and normalisation: numbers against hand-worked ones."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from policies.numerics import features
from policies.numerics.features import Panel, adjacency, clean, moving_mean, scale, shares, standardise


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # what numpy says of a division by nothing
        yield


def test_a_window_is_oldest_first_and_forgets_what_is_too_old():
    panel = Panel(("a", "b"), length=3)
    for index in range(5):
        panel.push("x", float(index), (index, 10 * index))
    panel.push("y", 0.0, (7, 8))
    np.testing.assert_array_equal(panel.window("a", ["x", "y"]), [[2, 3, 4], [np.nan, np.nan, 7]])
    np.testing.assert_array_equal(panel.times(["x"]), [[2, 3, 4]])
    np.testing.assert_array_equal(panel.latest("b", ["y", "x", "unknown"]), [8, 40, np.nan])
    assert (panel.count("x"), panel.count("y"), panel.count("unknown")) == (3, 1, 0)


def test_a_dropped_series_leaves_nothing_to_whoever_gets_its_row():
    panel = Panel(("a",), length=2)
    for name in "pqrst":  # more than the first block holds
        panel.push(name, 0.0, (1.0,))
        panel.push(name, 1.0, (2.0,))
    panel.drop("q")
    panel.drop("never seen")
    panel.push("new", 2.0, (9.0,))
    np.testing.assert_array_equal(panel.window("a", ["new"]), [[np.nan, 9.0]])
    assert "q" not in panel
    assert len(panel) == 5


def test_an_old_observation_counts_half_per_half_life():
    panel = Panel(("a",), length=4)
    panel.push("x", 0.0, (0.0,))
    panel.push("x", 10.0, (3.0,))
    assert panel.ewma("a", ["x"], half_life_s=10.0)[0] == pytest.approx(3.0 / 1.5)
    assert np.isnan(panel.ewma("a", ["unknown"], half_life_s=10.0)[0])


def test_normalisation_of_usual_constant_and_empty_series():
    values = np.array([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0], [np.nan, np.nan, np.nan]])
    scaled = scale(values)
    np.testing.assert_allclose(scaled[0], [0, 0.5, 1])
    np.testing.assert_allclose(scaled[1], 0)
    np.testing.assert_allclose(standardise(values)[0], [-1.224745, 0, 1.224745], rtol=1e-6)
    np.testing.assert_allclose(standardise(values)[1], 0)


def test_cleaning_draws_outliers_in_and_drops_infinities():
    values = clean(np.array([1.0, 2.0, 3.0, 2.0, 1e9, np.inf]))
    assert np.isnan(values[5])
    assert values[4] < 20
    np.testing.assert_array_equal(values[:4], [1, 2, 3, 2])
    np.testing.assert_array_equal(clean(np.array([4.0, 4.0, 4.0])), [4, 4, 4])


def test_moving_mean_adjacency_and_shares():
    np.testing.assert_allclose(moving_mean(np.array([1.0, 3.0, np.nan, 5.0]), 2), [1, 2, 3, 5])
    np.testing.assert_array_equal(
        adjacency(["a", "b"], [("a", "b", 2.0), ("a", "b", 1.0), ("b", "zz", 1.0)]), [[0, 3], [0, 0]]
    )
    np.testing.assert_allclose(shares(np.array([1.0, 3.0])), [0.25, 0.75])
    np.testing.assert_allclose(shares(np.array([0.0, np.nan])), [0.5, 0.5])


SERIES = arrays.arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(1, 12)),
    elements=st.one_of(st.just(np.nan), st.floats(-1e3, 1e3)),
)


@given(SERIES, st.integers(1, 5))
@settings(max_examples=60)
def test_moving_figures_are_those_of_each_window(values, span):
    deviation = features.moving_deviation(values, span)
    largest = features.moving_quantile(values, span, 1.0)
    filled = features.filled(values)
    for row in range(values.shape[0]):
        for end in range(values.shape[1]):
            window = values[row, max(0, end + 1 - span) : end + 1]
            finite = window[np.isfinite(window)]
            if finite.size == 0:
                assert np.isnan(deviation[row, end])
                assert np.isnan(largest[row, end])
            else:
                assert np.isclose(deviation[row, end], finite.std(), atol=1e-4)
                assert largest[row, end] == finite.max()
            before = values[row, : end + 1]
            known = before[np.isfinite(before)]
            assert np.isnan(filled[row, end]) if known.size == 0 else filled[row, end] == known[-1]


def test_rates_lags_and_a_common_grid():
    values = np.array([[1.0, 3.0, np.nan, 9.0], [0.0, 1.0, 2.0, 3.0]])
    times = np.array([[0.0, 1.0, 2.0, 4.0], [0.0, 2.0, 4.0, 4.0]])
    change = features.rate(values, times)
    assert np.isnan(change[:, 0]).all()
    assert change[0, 1] == 2.0
    assert change[1, 1:].tolist()[:2] == [0.5, 0.5]
    assert np.isnan(change[1, 3])
    rows, following = features.lagged(values, 2)
    assert rows.tolist() == [[0.0, 1.0], [1.0, 2.0]]
    assert following.tolist() == [2.0, 3.0]
    assert features.lagged(values, 9)[0].shape == (0, 9)
    grid = features.resampled(values, times, np.array([0.5, 3.0, 100.0]), oldest_s=50.0)
    assert np.array_equal(grid, [[1.0, 3.0, np.nan], [0.0, 1.0, np.nan]], equal_nan=True)
