"""Draws a module's scores over time: a dot per suggestion, a moving mean with its interval per version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dmsc.plots import new_figure
from policies.scoring.scores import interval
from schemas.policy import PolicyScore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW = 20
"""The number of scores in the moving mean."""


def draw_scores(
    module: str, scores: Mapping[str, Sequence[PolicyScore]], switches: Sequence[tuple[float, str]]
) -> Figure:
    """Draw the scores of a module's versions.

    Args:
        module: The module's name, for the title.
        scores: The scores by version, in any order.
        switches: (seconds since the epoch, text) of each promotion and rollback.
    """
    figure = new_figure()
    axes = figure.subplots()
    began = min((score.at for version_scores in scores.values() for score in version_scores), default=0.0)
    for number, (version, version_scores) in enumerate(sorted(scores.items())):
        ordered = sorted(
            (score for score in version_scores if score.score is not None), key=lambda score: score.at
        )
        at = [score.at - began for score in ordered]
        values = [score.score for score in ordered if score.score is not None]
        colour = f"C{number}"
        axes.plot(at, values, ".", color=colour, alpha=0.35)
        moving = [interval(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1)]
        axes.plot(at, [mean for mean, _, _ in moving], color=colour, label=f"version {version}")
        axes.fill_between(
            at, [low for _, low, _ in moving], [high for _, _, high in moving], color=colour, alpha=0.15
        )
    for moment, text in switches:
        axes.axvline(moment - began, color="0.3", linestyle="--")
        axes.annotate(text, (moment - began, 0.02), rotation=90, fontsize=8, ha="right", va="bottom")
    axes.axhline(0.5, color="0.6", linewidth=0.8)
    axes.set(ylim=(0, 1.02), xlabel="seconds", ylabel="score (0.5: as good as doing nothing)")
    axes.set_title(f"{module}: suggestions, and the mean of the last {WINDOW} with its 95 % interval")
    axes.legend(loc="lower right")
    return figure
