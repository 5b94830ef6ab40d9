"""A module's scores over time: each suggestion a dot, each version a moving mean with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dmsc.plots import new_figure
from policies.scoring.scores import interval
from schemas.policy import PolicyScore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW = 20
"""Scores that the moving mean is of."""


def draw_scores(
    module: str, scores: Mapping[str, Sequence[PolicyScore]], switches: Sequence[tuple[float, str]]
) -> Figure:
    """
    Args:
        module: its name, for the title.
        scores: by version, those that have one; any order.
        switches: (seconds since the epoch, text) of each promotion and rollback.
    """
    figure = new_figure()
    axes = figure.subplots()
    began = min((one.at for found in scores.values() for one in found), default=0.0)
    for number, (version, found) in enumerate(sorted(scores.items())):
        told = sorted((one for one in found if one.score is not None), key=lambda one: one.at)
        at = [one.at - began for one in told]
        values = [one.score for one in told if one.score is not None]
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
