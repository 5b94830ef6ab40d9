"""Cordoned slots and nodes, which get no new instances. Pure; `nodes.cordon_service` stores them."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.cluster import Cordon, NodeStatus
from schemas.errors import BadInput, NotFound
from schemas.fault import DeviceErrors
from schemas.task_graph import Placement

Place = tuple[str, int | None]
"""(SID of a node agent, slot); slot None: the whole node."""


class CordonBook:
    """All cordons, including lifted ones of devices, which have no effect any more."""

    def __init__(self) -> None:
        self._cordons: dict[Place, Cordon] = {}

    def put(self, cordon: Cordon) -> None:
        self._cordons[cordon.agent, cordon.slot] = cordon

    def remove(self, cordon: Cordon) -> None:
        self._cordons.pop((cordon.agent, cordon.slot), None)

    def of(self, agent: str, slot: int | None) -> Cordon | None:
        """The cordon of exactly this place, lifted or not."""
        return self._cordons.get((agent, slot))

    def whole(self, agent: str) -> bool:
        """Whether the whole node is cordoned."""
        cordon = self.of(agent, None)
        return cordon is not None and not cordon.lifted

    def active(self, agent: str | None = None) -> tuple[Cordon, ...]:
        """The cordons in force, of one node or of all, in order of node and slot."""
        cordons = [
            cordon
            for cordon in self._cordons.values()
            if not cordon.lifted and (agent is None or cordon.agent == agent)
        ]
        return tuple(
            sorted(cordons, key=lambda cordon: (cordon.agent, -1 if cordon.slot is None else cordon.slot))
        )

    def places(self) -> dict[str, set[int | None]]:
        """The places that placement has to leave out, by node agent."""
        slots: dict[str, set[int | None]] = {}
        for cordon in self.active():
            slots.setdefault(cordon.agent, set()).add(cordon.slot)
        return slots


def find_node(name: str, nodes: Iterable[NodeStatus], book: CordonBook) -> tuple[str, str, str]:
    """(agent's SID, cluster, node) of the node that a person names.

    A node is named by its agent's SID, or by its name if only one node has it. A cordoned node is found even
    while it is away.

    Raises:
        NotFound: no node has that name.
        BadInput: several nodes have that name.
    """
    known = {cordon.agent: (cordon.agent, cordon.cluster, cordon.node) for cordon in book.active()}
    known |= {status.sid: (status.sid, status.cluster, status.node) for status in nodes}
    if name in known:
        return known[name]
    named = sorted(place for place in known.values() if place[2] == name)
    if len(named) == 1:
        return named[0]
    if not named:
        raise NotFound(f"no node {name}; there are {', '.join(sorted(known)) or 'none'}")
    raise BadInput(f"node {name} is in several clusters: say {' or '.join(place[0] for place in named)}")


def works_on(status: NodeStatus, device: str, sid: str, placed: Placement | None) -> bool:
    """Whether an instance is on this device of a node.

    The node's agent or the orchestrator's own placement must say so; the instance's own word does not count.
    """
    if any(slot.busy_with == sid and slot.device == device for slot in status.slots):
        return True
    return placed is not None and (placed.cluster, placed.node, placed.device) == (
        status.cluster,
        status.node,
        device,
    )


def affected_slots(status: NodeStatus, errors: DeviceErrors, book: CordonBook) -> tuple[int, ...]:
    """The slots to drain because their device reports errors.

    These are slots that are not drained already, if there are more errors than were known when an earlier
    cordon was lifted.
    """
    affected = []
    for slot in status.slots:
        cordon = book.of(status.sid, slot.index)
        if slot.device != errors.device or (cordon is not None and not cordon.lifted and cordon.draining):
            continue
        known_errors = cordon.ecc_errors if cordon is not None else 0
        if errors.ecc_errors > known_errors or errors.xid_errors:
            affected.append(slot.index)
    return tuple(affected)
