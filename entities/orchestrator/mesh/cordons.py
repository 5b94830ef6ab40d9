"""Where no new instances go: cordoned slots and nodes. Pure; `cordoning` keeps it in the bucket."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.cluster import Cordon, NodeStatus
from schemas.errors import BadInput, NotFound
from schemas.fault import DeviceErrors
from schemas.task_graph import Placement

Place = tuple[str, int | None]
"""(SID of a node agent, slot); slot None: the whole node."""


class CordonBook:
    """All cordons, also the lifted ones of devices, which hold nothing back."""

    def __init__(self) -> None:
        self._cordons: dict[Place, Cordon] = {}

    def put(self, cordon: Cordon) -> None:
        self._cordons[cordon.agent, cordon.slot] = cordon

    def remove(self, cordon: Cordon) -> None:
        self._cordons.pop((cordon.agent, cordon.slot), None)

    def of(self, agent: str, slot: int | None) -> Cordon | None:
        """The cordon of this very place, lifted or not."""
        return self._cordons.get((agent, slot))

    def whole(self, agent: str) -> bool:
        """The whole node is cordoned."""
        held = self.of(agent, None)
        return held is not None and not held.lifted

    def active(self, agent: str | None = None) -> tuple[Cordon, ...]:
        """What holds now, of one node or of all, in order of node and slot."""
        found = [
            cordon
            for cordon in self._cordons.values()
            if not cordon.lifted and (agent is None or cordon.agent == agent)
        ]
        return tuple(sorted(found, key=lambda one: (one.agent, -1 if one.slot is None else one.slot)))

    def places(self) -> dict[str, set[int | None]]:
        """What placement has to leave out, by node agent."""
        found: dict[str, set[int | None]] = {}
        for cordon in self.active():
            found.setdefault(cordon.agent, set()).add(cordon.slot)
        return found


def find_node(name: str, nodes: Iterable[NodeStatus], book: CordonBook) -> tuple[str, str, str]:
    """(agent's SID, cluster, node) of what a person calls a node: its agent's SID, or its name if only one
    has it. One that is away but cordoned is known, too.

    Raises:
        NotFound: nobody is called that.
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
    """Whether an instance is on this device of a node, by the node's agent or as the orchestrator has placed
    it. Where it says itself that it is counts for nothing."""
    if any(slot.busy_with == sid and slot.device == device for slot in status.slots):
        return True
    return placed is not None and (placed.cluster, placed.node, placed.device) == (
        status.cluster,
        status.node,
        device,
    )


def affected_slots(status: NodeStatus, errors: DeviceErrors, book: CordonBook) -> tuple[int, ...]:
    """The slots to drain because their device told of errors: those that are not drained already, and where
    the errors are more than those that were known when an earlier cordon was lifted."""
    found = []
    for slot in status.slots:
        held = book.of(status.sid, slot.index)
        if slot.device != errors.device or (held is not None and not held.lifted and held.draining):
            continue
        known = held.ecc_errors if held is not None else 0
        if errors.ecc_errors > known or errors.xid_errors:
            found.append(slot.index)
    return tuple(found)
