"""Weights of a stage from the measured links to it and its instances' speed, by a graph network.

A hop from S senders to R receivers is a small network: a link per pair, which takes `transfer_ms` per
microbatch, and a link per receiver, its device, which takes `service_ms`. Each sender's demand has R paths.
`path_scoring` splits the demands so that the utilisation of the fullest link or device is minimal, for any S
and R; a receiver's weight is the demand that arrives at it. Like `service-time-weights`, it is silent if the
job's algorithm measures times itself (ADR-0016).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from policies.built_in.stage_weights import (
    StageWeightsConfig,
    StageWeightsPolicy,
    present_shares,
    rounded_weights,
)
from policies.kit.view import InstanceView, JobView
from policies.numerics.allocation.path_scoring import PathScoring, of_data, trained
from policies.numerics.allocation.path_split import Paths, paths_of
from policies.numerics.features import Floats, shares
from schemas.policy import PolicySuggestion


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyScoringConfig(StageWeightsConfig):
    """When another split is worth a change of routes."""

    min_gain: float = 0.05
    """Suggest only if the utilisation of the fullest link or device falls by this share."""

    most_paths: int = 4096
    """Most paths, S × R; a larger hop is left alone, so that an inference takes less than 10 ms."""


def stage_paths(transfer_ms: Floats, service_ms: Floats, *, free_ms: float = 1e-3) -> Paths:
    """A hop as a network: links `sender × receiver`, then one per receiver for its device.

    Args:
        transfer_ms: `(S, R)` per microbatch; NaN if unknown.
        service_ms: `(R,)` per microbatch.
        free_ms: Assumed transfer time of a link that was not measured: it counts as free.
    """
    senders, receivers = transfer_ms.shape
    link_ms = np.where(np.isfinite(transfer_ms), np.maximum(transfer_ms, free_ms), free_ms)
    capacity = 1e3 / np.concatenate([link_ms.ravel(), service_ms])
    links = senders * receivers
    routes = [
        [[sender * receivers + receiver, links + receiver] for receiver in range(receivers)]
        for sender in range(senders)
    ]
    return paths_of(capacity, routes)


def hop_of(view: JobView, stage: int, now: float, half_life_s: float = 10.0) -> tuple[Paths, Floats] | None:
    """The hop into a stage as a network, and the senders' demands; None where it is not measured yet."""
    receivers, senders = view.stage(stage, now, samples=3), view.stage(stage - 1, now)
    if len(receivers) < 2 or not senders:
        return None
    service_ms = view.mean("service_ms", [receiver.sid for receiver in receivers], half_life_s)
    return stage_paths(_transfers(view, senders, receivers), service_ms), _demand(view, senders)


class TopologyScoring(StageWeightsPolicy):
    """Weights by `path_scoring` over the measured links between two stages and the devices behind them."""

    config: TopologyScoringConfig
    name: ClassVar[str] = "topology-scoring"
    version: ClassVar[str] = "1"
    state_version: ClassVar[int] = 1

    def __init__(
        self, config: TopologyScoringConfig | None = None, scoring: PathScoring | None = None
    ) -> None:
        self.config = config or TopologyScoringConfig()
        self.scoring = scoring or trained()
        self._own: dict[str, Any] | None = None

    def learnt_state(self) -> dict[str, Any]:
        """The weights of a network that was trained in this mesh; none: those that it comes with."""
        return {"network": self._own}

    def restore(self, state: Any) -> None:
        network = state["network"]
        self.scoring = trained() if network is None else of_data(network)
        self._own = network

    def decide_stage(self, view: JobView, stage: int, now: float) -> PolicySuggestion | None:
        config = self.config
        receivers, senders = self.measured(view, stage, now), view.stage(stage - 1, now)
        paths_count = len(senders) * len(receivers)
        if not 0 < paths_count <= config.most_paths or self.is_early(view, stage, now):
            return None
        sids = [receiver.sid for receiver in receivers]
        service_ms = view.mean("service_ms", sids, config.half_life_s)
        transfer_ms = _transfers(view, senders, receivers)
        paths, demand = stage_paths(transfer_ms, service_ms), _demand(view, senders)
        split = self.scoring.split(paths, demand)
        present = present_shares(view, stage, sids)
        before = paths.worst(demand, np.tile(present, (len(senders), 1)))
        # A table has one weight per receiver, the same for all senders: the gain is computed with those.
        best = demand @ split
        after = paths.worst(demand, np.tile(best, (len(senders), 1)))
        gain = 1 - after / before if before > 0 else 0.0
        if gain < config.min_gain and not self.needs_renewal(view, stage, now, present):
            return None
        chosen = best if gain >= config.min_gain else present
        measured = int(np.isfinite(transfer_ms).sum())
        share_text = ", ".join(f"{sid} {share:.0%}" for sid, share in zip(sids, chosen, strict=True))
        reason = (
            f"stage {stage}: {len(senders)} senders, {len(receivers)} receivers, {measured} of "
            f"{transfer_ms.size} links measured; the fullest link or device {gain:+.0%} emptier than by the "
            f"present weights; shares {share_text}"
        )
        confidence = round(float(np.clip(0.6 + gain, 0.5, 0.95)), 3)
        weights = rounded_weights(sids, chosen)
        return self.set_weights(
            view, stage, weights, reason=reason, confidence=confidence, valid_s=config.valid_s
        )


def _transfers(view: JobView, senders: list[InstanceView], receivers: list[InstanceView]) -> Floats:
    """Milliseconds of a transfer of the usual size, `(S, R)`.

    They come from the senders' own samples, else from the clusters' reports; NaN if neither has them.
    """
    times_ms: dict[tuple[str, str], float] = {}
    for report in view.qos.values():
        for link in report.links:
            if link.figures.transfer_ms is not None:
                times_ms[link.sender, link.receiver] = link.figures.transfer_ms
    for sender in senders:
        for sample in sender.sample.links if sender.sample is not None else ():
            if sample.figures is not None and sample.figures.transfer_ms is not None:
                times_ms[sender.sid, sample.peer] = sample.figures.transfer_ms
    return np.array(
        [[times_ms.get((sender.sid, receiver.sid), np.nan) for receiver in receivers] for sender in senders]
    )


def _demand(view: JobView, senders: list[InstanceView]) -> Floats:
    """Share of the microbatches of each sender, by its own speed; equal if a speed is unknown."""
    times = np.array([sender.service_ms for sender in senders])
    return shares(1.0 / times) if np.all(times > 0) else shares(np.ones(len(senders)))
