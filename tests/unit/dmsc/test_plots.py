"""`dmsc policy plot score`: a PNG, or one line that says what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dmsc.plots import new_figure, save
from dmsc.plots.score import draw_scores
from schemas.errors import BadInput
from schemas.policy import PolicyScore
from tests.builders.policies import score


def scores(version: str, value: float) -> list[PolicyScore]:
    return [
        score(version, None if number == 3 else value + 0.02 * number, number, at=100.0 + 10 * number)
        for number in range(8)
    ]


def test_a_picture_of_two_versions_and_a_promotion(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    given = {"1": scores("1", 0.5), "2": scores("2", 0.7), "3": []}
    drawn = draw_scores("m", given, [(120.0, "2 promoted")])
    (axes,) = drawn.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [f"version {n}" for n in "123"]
    save(drawn, tmp_path / "score.png")
    assert (tmp_path / "score.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BadInput, match=r"only \.png"):
        save(drawn, tmp_path / "score.svg")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(BadInput, match=r"pip install 'dmsc\[plots\]'"):
        new_figure()
