"""An instance's links: at most one per peer, built at first use, dropped when least recently used."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.rendezvous import links_of
from bus.tasks import TaskSet
from schemas.errors import DmscError, PeerUnreachable
from schemas.step import Member
from workers.links.link_config import LinkConfig
from workers.links.link_quality import LinkBothWays
from workers.links.tensor_link import LinkClosed, LinkCounts, TensorLink
from workers.transport.gloo import GroupBuild, LinkRefused, release

log = get_logger("workers.links.hop_exchange")

LAST_TAG = 2**31 - 2**20
"""Beyond this tag a link has used up gloo's 31-bit tags, and the next link is opened."""
REMEMBERED_ANSWERS = 4096


@dataclass(eq=False)
class LinkSlot:
    """One numbered link of a pair of instances: being built, open, or over."""

    peer: Member
    number: int
    name: str
    rank: int
    ready: asyncio.Future[TensorLink]
    build: GroupBuild | None = None
    link: TensorLink | None = None
    over: bool = False
    uses: int = 0
    answered: OrderedDict[int, str] = field(default_factory=OrderedDict)
    next_tag: int = field(init=False)

    def __post_init__(self) -> None:
        self.next_tag = self.rank + 2  # the first tag of each parity carries receipts

    def take_tags(self, count: int) -> int:
        """Takes `count` tags of this side's parity, two apart; returns the first."""
        first = self.next_tag
        self.next_tag += 2 * count
        return first

    def remember(self, tag: int, answer: str) -> None:
        """Records the answer to an offer, so that a repeated offer gets the same answer."""
        self.answered[tag] = answer
        if len(self.answered) > REMEMBERED_ANSWERS:
            self.answered.popitem(last=False)

    def patience_until(self, answered_at: float, timeout_s: float) -> float:
        """When an accepted transfer counts as stuck.

        The time counts from the answer or the link's last progress, whichever is later; the posted transfers
        may take their own time besides.
        """
        if self.link is None:
            return answered_at + timeout_s
        since = max(answered_at, self.link.progress_at)
        return since + timeout_s + self.link.outgoing_s

    @property
    def idle(self) -> bool:
        return self.uses == 0 and self.link is not None and not self.link.busy

    async def opened(self) -> TensorLink:
        """Waits for the link to be built and returns it.

        Raises:
            PeerUnreachable: It could not be built, or is over.
        """
        if self.link is not None:
            return self.link
        return await asyncio.shield(self.ready)


class LinkTable:
    """The slots, by peer incarnation. All methods on the event loop; they never block it.

    `broken(peer, error)` is called when a link ends without a goodbye: perhaps the first sign of a death.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        me: Member,
        job: str,
        config: LinkConfig,
        broken: Callable[[Member, PeerUnreachable], None],
    ) -> None:
        self._bus = bus
        self._me = me
        self._namespace = links_of(job)
        self._config = config
        self._broken = broken
        self._slots: OrderedDict[tuple[str, str], LinkSlot] = OrderedDict()
        self._fenced: set[tuple[str, str]] = set()
        self._tasks = TaskSet()  # those that build links, and those that wait for their end
        self.counts: dict[str, LinkCounts] = {}
        self._qualities: OrderedDict[tuple[str, str], LinkBothWays] = OrderedDict()

    def __len__(self) -> int:
        return sum(not slot.over for slot in self._slots.values())

    def is_fenced(self, peer: Member) -> bool:
        return _key(peer) in self._fenced

    def quality(self, peer: Member) -> LinkBothWays:
        """The measured quality of the links to an incarnation; begins to measure it.

        It outlives the links, for the `2 * most` latest incarnations.
        """
        quality = self._qualities.get(_key(peer))
        if quality is None:
            quality = self._qualities[_key(peer)] = LinkBothWays()
            while len(self._qualities) > 2 * self._config.most:
                self._qualities.popitem(last=False)
        self._qualities.move_to_end(_key(peer))
        return quality

    def known(self, peer: Member) -> LinkBothWays | None:
        """The measured quality of the links to an incarnation; None if there were no links."""
        return self._qualities.get(_key(peer))

    def qualities(self) -> dict[str, LinkBothWays]:
        """The quality by the peer's SID, of its latest incarnation."""
        return {sid: quality for (sid, _), quality in self._qualities.items()}

    def ping(self) -> None:
        """Measures the latency of all idle links."""
        for slot in self._slots.values():
            if not slot.over and slot.link is not None:
                slot.link.ping()

    def open(self, peer: Member) -> LinkSlot:
        """The present link to `peer`; begins to build one if there is none.

        Raises:
            PeerUnreachable: The peer is fenced.
        """
        if self.is_fenced(peer):
            raise _fenced(peer)
        slot = self._slots.get(_key(peer))
        if slot is not None and not slot.over and slot.next_tag < LAST_TAG:
            self._slots.move_to_end(_key(peer))
            return slot
        return self._begin(peer, slot.number + 1 if slot else 1)

    def adopt(self, peer: Member, name: str) -> LinkSlot | str | None:
        """The slot of the link that `peer` names in an offer, opened from this side too.

        Returns:
            The slot; or, if that link is over, the name of the link to use instead; or None if the name is
            not of this pair, or the peer is fenced.
        """
        if self.is_fenced(peer):
            return None
        slot = self._slots.get(_key(peer))
        if slot is not None and slot.name == name and not slot.over:
            self._slots.move_to_end(_key(peer))
            return slot
        pair = Pair.of(self._me, peer)
        number = pair.number(name)
        if number is None:
            return None
        if slot is None or number > slot.number:
            return self._begin(peer, number)
        return pair.link(slot.number + 1 if slot.over else slot.number)

    def advance(self, peer: Member, name: str) -> bool:
        """Switches to a newer link that `peer` names in an answer; returns whether it was newer."""
        number = Pair.of(self._me, peer).number(name)
        slot = self._slots.get(_key(peer))
        if number is None or self.is_fenced(peer) or (slot is not None and number <= slot.number):
            return False
        self._begin(peer, number)
        return True

    def drop(self, slot: LinkSlot, error: PeerUnreachable | None = None) -> None:
        """Ends a link now: its open transfers fail, and its waiters are released."""
        if slot.over:
            return
        slot.over = True
        slot.answered.clear()
        if slot.build is not None:
            slot.build.cancel()
        if not slot.ready.done():
            reason = error or LinkClosed(f"tensor link {slot.name} was given up", link=slot.name)
            slot.ready.set_exception(reason)
        if slot.link is not None:
            slot.link.close(error)
            self._tasks.create(slot.link.closed_fully())

    def fence(self, peer: Member) -> None:
        """Ends the links to this incarnation and never builds one again."""
        self._fenced.add(_key(peer))
        self._qualities.pop(_key(peer), None)
        slot = self._slots.get(_key(peer))
        if slot is not None:
            self.drop(slot, _fenced(peer))

    async def close(self) -> None:
        """Ends all links; returns when their threads have ended and their sockets are closed."""
        for slot in self._slots.values():
            self.drop(slot)
        await self._tasks.wait()
        self._slots.clear()

    # --- building ------------------------------------------------------------------------------------------
    def _begin(self, peer: Member, number: int) -> LinkSlot:
        old = self._slots.get(_key(peer))
        if old is not None:
            self.drop(old, LinkClosed(f"tensor link {old.name}: a newer one took its place", link=old.name))
        pair = Pair.of(self._me, peer)
        ready: asyncio.Future[TensorLink] = asyncio.get_running_loop().create_future()
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        slot = LinkSlot(peer, number, pair.link(number), pair.rank, ready)
        self._slots[_key(peer)] = slot
        self._slots.move_to_end(_key(peer))
        self._evict()
        slot.build = GroupBuild(
            self._bus,
            namespace=self._namespace,
            name=slot.name,
            rank=slot.rank,
            size=2,
            config=self._config,
        )
        self._tasks.create(self._build(slot, slot.build), name=f"build link {slot.name}")
        return slot

    async def _build(self, slot: LinkSlot, build: GroupBuild) -> None:
        try:
            group, device = await build.run()
        except PeerUnreachable as error:
            self._over(slot, error)
            return
        except DmscError as error:
            log.error("tensor link not built", link=slot.name, error=error.text)
            self._over(slot, PeerUnreachable(error.text, peer=slot.peer.sid))
            return
        finally:
            slot.build = None
        if slot.over:
            release(group)  # the link was given up while it was built
            return
        shaping = self._config.shaping
        slot.link = TensorLink(
            slot.name,
            group,
            device,
            counts=self.counts.setdefault(slot.peer.sid, LinkCounts()),
            quality=self.quality(slot.peer),
            config=self._config,
            ended=lambda error: self._over(slot, error),
            line=shaping.line(self._me.sid, slot.peer.sid) if shaping is not None else None,
        )
        slot.ready.set_result(slot.link)

    def _over(self, slot: LinkSlot, error: PeerUnreachable | None) -> None:
        """Records that a link broke, was closed by the peer, or could not be built."""
        if slot.link is not None:
            self._tasks.create(slot.link.closed_fully())
        if slot.over:
            return
        slot.over = True
        if not slot.ready.done():
            closed = LinkClosed(f"tensor link {slot.name} was closed", link=slot.name)
            slot.ready.set_exception(error or closed)
        if error is not None:
            if slot.link is None:
                counts = self.counts.setdefault(slot.peer.sid, LinkCounts())
                counts.errors += 1
                counts.refused += isinstance(error, LinkRefused)
            if slot.link is not None or self._bus.connected:  # else the bus is away, not the peer
                self._broken(slot.peer, error)

    def _evict(self) -> None:
        """Drops idle links, least recently used first, while there are too many; keeps busy ones."""
        excess = len(self) - self._config.most
        for slot in list(self._slots.values()):
            if excess <= 0:
                return
            if not slot.over and slot.idle:
                log.debug("least recently used tensor link dropped", link=slot.name)
                self.drop(slot)
                excess -= 1


def _key(member: Member) -> tuple[str, str]:
    return (member.sid, member.incarnation)


def _fenced(peer: Member) -> PeerUnreachable:
    return PeerUnreachable(f"{peer.sid} ({peer.incarnation}) is fenced", peer=peer.sid, fenced=True)


@dataclass(frozen=True, slots=True)
class Pair:
    """An unordered pair of incarnations, seen from one of them."""

    name: str
    rank: int

    @classmethod
    def of(cls, me: Member, peer: Member) -> Pair:
        """The pair of `me` and `peer`.

        Raises:
            ValueError: An instance has no link to itself.
        """
        ends = sorted(f"{member.sid}.{member.incarnation}" for member in (me, peer))
        if ends[0] == ends[1]:
            raise ValueError(f"{me.sid} has no tensor link to itself")
        return cls("+".join(ends), ends.index(f"{me.sid}.{me.incarnation}"))

    def link(self, number: int) -> str:
        """The name of this pair's link number `number`."""
        return f"{self.name}+{number}"

    def number(self, link: str) -> int | None:
        """The number in a link's name, or None if it is not a link of this pair."""
        pair, _, number = link.rpartition("+")
        return int(number) if pair == self.name and number.isascii() and number.isdigit() else None
