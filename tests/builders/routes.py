"""What routers and the orchestrator tell of ways."""

from __future__ import annotations

from typing import Any

from schemas.data_plane import RouteEntry, RouteTable
from schemas.signals import CommunicationPolicy, StagePolicy


def entry(sid: str = "j-s0-r0", **more: Any) -> RouteEntry:
    """A next hop like any other."""
    fields = {"incarnation": "i", "cluster": "a", "weight": 1.0, "window": 2}
    return RouteEntry(sid=sid, **(fields | more))


def table(*entries: RouteEntry, **more: Any) -> RouteTable:
    """The table of stage 1 for cluster a."""
    fields = {"job": "j", "cluster": "a", "stage": 1, "revision": 1, "router": "router-a"}
    return RouteTable(entries=entries, **(fields | more))


def policy(job: str = "j", revision: int = 1, **more: Any) -> CommunicationPolicy:
    """A policy of two stages, window 4, no weights."""
    fields = {
        "entry_gateway": "gateway-east",
        "clusters": ("east", "west"),
        "stages": (StagePolicy(stage=0, window=4), StagePolicy(stage=1, window=4)),
        "reason": "initial",
    }
    return CommunicationPolicy(job=job, revision=revision, **(fields | more))
