"""Links from this node to others, as the transfers of jobs measure them, for its Type 1 record (draft §4.3).

`PeerLinks` is pure: figures come in, and it says which links the record is to have. `LinkRegistration` asks
the registry on which node each peer is, and registers what has changed (ADR-0083).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.discovery import resolve
from schemas.envelope import EntityKind
from schemas.errors import DmscError
from schemas.names import agent_name, job_of
from schemas.registry import PeerLink, Resolve
from schemas.telemetry import InstanceSample, LinkFigures

log = get_logger("cluster")

MOST_PEERS = 64
"""Peers in a record: those that were measured last."""
SHARE = 0.25
"""Of a new figure in the average: one slow transfer moves it little, ten in a row replace it."""
NEWS = 0.25
"""Part by which a figure has to differ from the registered one: everybody reads each change of a record."""


class PeerLinks:
    """The measured links of one node, by the agent of the peer's node."""

    def __init__(self) -> None:
        self._links: dict[str, PeerLink] = {}  # the one that was measured last comes last
        self._registered: dict[str, PeerLink] = {}

    def take(self, peer: str, figures: LinkFigures) -> None:
        """Take a sender's figures of a link to an instance on the node of agent `peer`."""
        known = self._links.pop(peer, PeerLink(peer=peer))
        self._links[peer] = PeerLink(
            peer=peer,
            latency_ms=_moved(known.latency_ms, figures.latency_ms),
            bandwidth_bytes_per_s=_moved(known.bandwidth_bytes_per_s, figures.bandwidth_bytes_per_s),
        )
        while len(self._links) > MOST_PEERS:
            del self._links[next(iter(self._links))]

    def news(self) -> tuple[PeerLink, ...] | None:
        """The links to register now, by peer; None: the record says much the same."""
        if self._links.keys() == self._registered.keys() and not any(
            _differ(link, self._registered[peer]) for peer, link in self._links.items()
        ):
            return None
        self._registered = dict(self._links)
        return tuple(self._links[peer] for peer in sorted(self._links))


def _moved(known: float | None, new: float | None) -> float | None:
    if known is None or new is None:
        return known if new is None else new
    return known + SHARE * (new - known)


def _differ(link: PeerLink, registered: PeerLink) -> bool:
    pairs = (
        (link.latency_ms, registered.latency_ms),
        (link.bandwidth_bytes_per_s, registered.bandwidth_bytes_per_s),
    )
    return any(
        (new is None) != (old is None)
        or (new is not None and old is not None and abs(new - old) > NEWS * max(new, old))
        for new, old in pairs
    )


class LinkRegistration:
    """Collects what the node's instances say of their links, and keeps the node's record current.

    Args:
        bus: the bus.
        agent: this node's agent.
        every_s: pause between two looks at what was measured.
    """

    def __init__(self, bus: Bus, agent: str, every_s: float) -> None:
        self._bus = bus
        self._agent = agent
        self._every_s = every_s
        self._links = PeerLinks()
        self._measured: dict[str, LinkFigures] = {}

    def take(self, sample: InstanceSample) -> None:
        """Take the figures in a sample of one of the node's instances."""
        for link in sample.links:
            if link.figures is not None and job_of(link.peer) == sample.job:
                self._measured[link.peer] = link.figures

    async def run(self, register: Callable[[tuple[PeerLink, ...]], Awaitable[None]]) -> None:
        """Register changes until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            measured, self._measured = self._measured, {}
            if not measured:
                continue
            try:
                homes = await self._homes(measured)
                for peer, figures in measured.items():
                    if (home := homes.get(peer, self._agent)) != self._agent:
                        self._links.take(home, figures)
                if (news := self._links.news()) is not None:
                    await register(news)
            except DmscError as error:  # the registry is away: what is measured next says the same
                log.info("links not registered yet", node=self._agent, error=error.text)

    async def _homes(self, peers: Iterable[str]) -> Mapping[str, str]:
        """The agents of the nodes on which instances are, by SID."""
        homes = {}
        for job in sorted({job_of(peer) for peer in peers}):
            found = await resolve(self._bus, Resolve(job=job, kind=EntityKind.INSTANCE))
            for record in found.records:
                homes[record.sid] = agent_name(record.endpoint.cluster, record.endpoint.node)
        return homes
