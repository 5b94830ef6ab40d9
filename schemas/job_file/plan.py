"""The section `plan`: what the planner must or should keep, where the model may be cut, or a plan that is
kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from schemas.base import Part, Token

MOST_RULES = 64
MOST_PATTERNS = 128
"""Of a whole section: each is looked for among all layers."""
LayerPattern = Annotated[str, StringConstraints(min_length=1, max_length=200)]
"""Layers by name: `embed*`, or `branches.0` for that layer and all whose names begin with `branches.0.`."""
SlotLabel = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,120}=.{1,120}$")]
"""`key=value`, as operators give it to nodes (`dmsc join --label trust=high`)."""
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]

ConstraintKind = Literal["spread", "together", "apart", "pin", "order", "memory"]
SCOPES: dict[str, tuple[str, ...]] = {
    "spread": ("node", "cluster"),
    "together": ("stage", "node", "cluster"),
    "apart": ("stage", "node", "cluster"),
}
"""What each kind may be about; the others are about slots, or the model's order."""


class PlanConstraint(Part):
    """One constraint. What it says of layers holds for the stages that get them.

    `spread`: instances of one stage in different places; `together`: all these layers in one place;
    `apart`: layers of different entries in different places, never in one stage; `pin`: only there;
    `order`: entries in this order; `memory`: only in slots that have so much.
    """

    kind: ConstraintKind = Field(description="what it says, see above")
    layers: tuple[LayerPattern, ...] = Field(
        ("*",), min_length=1, max_length=MOST_RULES, description="patterns of their names"
    )
    scope: Literal["stage", "node", "cluster"] | None = Field(
        None,
        description="of what places it speaks: by default node; together: stage, which no cut divides",
    )
    label: SlotLabel | None = Field(None, description="of a pin: KEY=VALUE that the slot's node has")
    node: Token | None = Field(None, description="of a pin: the node")
    cluster: Token | None = Field(None, description="of a pin: the cluster")
    gib: float | None = Field(
        None, gt=0, le=1 << 20, allow_inf_nan=False, description="of memory: what the slot has at least"
    )
    hard: bool = Field(True, description="kept, or there is no plan; false: as far as it can be")

    @property
    def of(self) -> Literal["stage", "node", "cluster"]:
        """Its scope, the default filled in."""
        return self.scope or ("stage" if self.kind == "together" else "node")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> PlanConstraint:
        places = [key for key in ("label", "node", "cluster") if getattr(self, key) is not None]
        if self.kind == "pin" and len(places) != 1:
            given = " and ".join(places) or "none"
            raise ValueError(f"a pin needs one of label, node and cluster, here {given}: give one")
        if self.kind != "pin" and places:
            raise ValueError(f"{places[0]} is of kind: pin, not of {self.kind}: leave it out")
        if (self.kind == "memory") != (self.gib is not None):
            raise ValueError("gib and kind: memory belong together: give both, or neither")
        if self.scope is not None and self.scope not in SCOPES.get(self.kind, ()):
            fit = " or ".join(SCOPES.get(self.kind, ())) or "none: leave it out"
            raise ValueError(f"scope {self.scope} says nothing of {self.kind}; it has {fit}")
        if self.kind in ("apart", "order") and len(self.layers) < 2:
            raise ValueError(f"{self.kind} is between at least two entries of layers: name both")
        return self


class TabuSpec(Part):
    """What a plan does not use."""

    begin: tuple[LayerPattern, ...] = Field(
        (), max_length=MOST_RULES, description="layers with which no stage begins: not cut in front of them"
    )
    nodes: tuple[Token, ...] = Field((), max_length=MOST_RULES, description="nodes that get no instance")
    clusters: tuple[Token, ...] = Field((), max_length=MOST_RULES, description="clusters likewise")
    labels: tuple[SlotLabel, ...] = Field(
        (), max_length=MOST_RULES, description="nodes with one of these labels likewise"
    )


class PlanSpec(Part):
    """What the planner keeps. Layers are named by patterns; `dmsc check` lists their names."""

    by: Literal["layer", "business", "block"] = Field(
        "layer",
        description="layer: cut between any layers; business: each task head is a stage of its own, behind "
        "the trunk that all share; block: a stage has layers of one entry of privacy only, or of none",
    )
    constraints: tuple[PlanConstraint, ...] = Field(
        (), max_length=MOST_RULES, description="what stages of these layers keep"
    )
    shared: tuple[tuple[LayerPattern, ...], ...] = Field(
        (), max_length=MOST_RULES, description="groups of layers that stay in one stage"
    )
    privacy: dict[LayerPattern, SlotLabel] = Field(
        {},
        max_length=MOST_RULES,
        description="layers → the label that their nodes must have: {embed*: trust=high}",
    )
    tabu: TabuSpec = TabuSpec()
    cuts: tuple[LayerPattern, ...] | None = Field(
        None,
        max_length=1023,
        description="the layer with which each stage but the first begins, of a plan that is kept "
        "(`dmsc plan --out`); none: the planner cuts",
    )
    model: Digest | None = Field(None, description="of the model that `cuts` were planned for")

    @model_validator(mode="after")
    def _either_cuts_or_chooses(self) -> PlanSpec:
        if self.by == "block" and not self.privacy:
            raise ValueError("by: block cuts where labels of privacy change: give privacy, or leave by out")
        if self.model is not None and self.cuts is None:
            raise ValueError("model says for which model cuts were planned: give cuts, or leave it out")
        if self.cuts is not None and (self.by != "layer" or self.shared or self.tabu.begin):
            key = "by" if self.by != "layer" else "shared" if self.shared else "tabu.begin"
            raise ValueError(f"cuts and {key} both say where the model is cut: leave one out")
        return self

    @model_validator(mode="after")
    def _not_too_many(self) -> PlanSpec:
        patterns = sum(len(each.layers) for each in self.constraints) + sum(map(len, self.shared))
        if (total := patterns + len(self.privacy) + len(self.tabu.begin)) > MOST_PATTERNS:
            raise ValueError(f"{total} patterns of layers in all; give at most {MOST_PATTERNS}")
        return self
