"""One link: a raw two-rank gloo group between two instances, both directions.

Sends are posted at once and matched by tag, in whatever order the receiver wants them: an offer whose
notice was lost holds up nobody. A transfer of n tensors takes n + 1 tags of the sender's parity; the last
is a one-byte trailer. The receiver waits for the trailer, never for the tensors themselves: gloo tells
queued operations that the connection broke, but not the one under way, whose wait would sit out its whole
timeout (`workers.transport.gloo`). Behind the trailer everything has arrived, because a pair writes in order.
For the same reason the sender does not wait for its sends but for the receiver's receipt, eight bytes that
name the finished transfer.

So a link has two threads: one waits for trailers in the order in which receives were posted (each belongs
to a send that is already posted, so none waits for anything but the wire), one waits for receipts. The
latter always has a receive queued, so it also notices at once when the other end dies or says goodbye.

What is said on the receipts' tag beside receipts is below 0, which a peer that does not know it ignores: a
goodbye, a ping and its answer, and how long the transfer took whose receipt follows
(`workers.links.link_quality`).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from schemas.data_plane import TensorMeta
from schemas.errors import DmscError, PeerUnreachable
from schemas.telemetry import LinkSample
from workers.links.link_quality import LinkBothWays
from workers.transport import gloo
from workers.transport.pinned_buffers import landing, size_bytes, to_device


class LinkClosed(PeerUnreachable):
    """A link ended on purpose: a goodbye, or a newer link took its place. No fault; offer again."""

    code = "link_closed"


Verdict = Literal["delivered", "held", "stale"]
VERDICTS: tuple[Verdict, ...] = ("delivered", "held", "stale")
"""What became of a transfer; a receipt is `first tag * len(VERDICTS) + index`."""
GOODBYE = -1
"""A receipt of this value says: I close this link on purpose."""
PING, PONG = -2, -3
"""A word that is answered at once by the other."""
TOOK = -1000
"""From here down: the transfer whose receipt follows took `TOOK - value` microseconds."""
PING_GAP_S = 0.1
"""A transfer has a ping ahead of it unless the last one was so short a while ago; the first two have."""
PING_PATIENCE_S = 10.0
"""An unanswered ping counts for nothing after this time, and another may be sent."""
WORD_BYTES = 8
FOREVER = timedelta(days=365)
SLOWEST_BYTES_PER_S = 4e6
"""A transfer may take its timeout plus its size at this rate, before its link counts as broken; at a quarter
of what was measured, where that is less."""
LEAST_BYTES_PER_S = 64e3
"""Whatever was measured."""
KEPT_RECEIPTS = 1024


def slowest_bytes_per_s(measured_bytes_per_s: float | None) -> float:
    """At which rate a link that moves may move."""
    if measured_bytes_per_s is None:
        return SLOWEST_BYTES_PER_S
    return min(SLOWEST_BYTES_PER_S, max(measured_bytes_per_s / 4, LEAST_BYTES_PER_S))


@dataclass(slots=True, eq=False)
class _Outgoing:
    done: asyncio.Future[Verdict]
    tensors: Sequence[Tensor]  # gloo reads their memory until the receipt
    size: int
    works: list[dist.Work] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Incoming:
    done: asyncio.Future[list[Tensor]]
    first: int
    verdict: Verdict
    target: torch.device
    tensors: list[Tensor]
    timeout: timedelta
    began: float
    timed: bool  # it had the link to itself
    works: list[dist.Work] = field(default_factory=list)


@dataclass(slots=True)
class LinkCounts:
    """What went over a peer's links. `transfers` and their milliseconds count arrivals, from the posted
    receive to the tensors in place; bytes count both ways."""

    sent_bytes: int = 0
    received_bytes: int = 0
    transfers: int = 0
    transfer_ms: float = 0.0
    errors: int = 0
    refused: int = 0

    def take(self, peer: str) -> LinkSample:
        """What has been counted since the last call."""
        sample = LinkSample(
            peer=peer,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            transfers=self.transfers,
            transfer_ms=self.transfer_ms,
            errors=self.errors,
            refused=self.refused,
        )
        self.sent_bytes = self.received_bytes = self.transfers = self.errors = self.refused = 0
        self.transfer_ms = 0.0
        return sample


class SendLine(Protocol):
    """What a link's sends go through; `put` posts them. Called from any thread."""

    def post(self, size: int, put: Callable[[], None], lost: Callable[[], None]) -> None: ...


class _PlainLine:
    def post(self, size: int, put: Callable[[], None], lost: Callable[[], None]) -> None:
        put()


class TensorLink:
    """A built link. All methods on the event loop.

    Args:
        group: two ranks, connected.
        device: the gloo device, kept open as long as the link.
        counts, quality: of the peer, added to.
        target: where received tensors are wanted.
        ended: called once, on the loop, when the link is over: None after a goodbye, else the error.
        line: what sends go through, where a link is shaped (`workers.links.link_shaping`).
    """

    def __init__(
        self,
        name: str,
        group: gloo.GlooGroup,
        device: gloo.Device,
        *,
        counts: LinkCounts,
        quality: LinkBothWays,
        target: torch.device,
        timeout_s: float,
        ended: Callable[[PeerUnreachable | None], None],
        line: SendLine | None = None,
    ) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._group: gloo.GlooGroup | None = group
        self._device = device
        self._me = group.rank()
        self._peer = 1 - group.rank()
        self._counts = counts
        self._quality = quality
        self._line = line or _PlainLine()
        self._target = target
        self._timeout_s = timeout_s
        self._ended = ended
        self.progress_at = time.monotonic()
        self._pinged_at: float | None = None
        self._last_ping_at = 0.0
        self._pongs = 0
        self._received = 0
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._arriving: queue.SimpleQueue[_Incoming | None] = queue.SimpleQueue()
        self._receipts: deque[tuple[dist.Work, Tensor]] = deque(maxlen=KEPT_RECEIPTS)
        self._closing: asyncio.Task[None] | None = None
        self._threads = [
            threading.Thread(target=self._watch_receipts, args=(group,), name="link-receipts", daemon=True),
            threading.Thread(target=self._watch_arrivals, name="link-arrivals", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether a transfer is open in either direction."""
        return bool(self._outgoing or self._incoming)

    @property
    def outgoing_s(self) -> float:
        """What has been posted, and is not known to have arrived, may take so long."""
        size = sum(outgoing.size for outgoing in self._outgoing.values())
        return size / slowest_bytes_per_s(self._quality.out.bandwidth_bytes_per_s)

    def send(self, first: int, tensors: Sequence[Tensor]) -> asyncio.Future[Verdict]:
        """Posts a transfer; done, with what the peer made of it, when the peer has all of it.

        Args:
            first: the first of its tags.
            tensors: contiguous, on the host, any dtype and shape; not to be changed until done.

        Raises (from the future): `PeerUnreachable`.
        """
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        outgoing = _Outgoing(self._future(), tensors, size)
        if self._group is None:
            outgoing.done.set_exception(LinkClosed(f"tensor link {self.name} is closed", link=self.name))
            return outgoing.done
        if self._pongs < 2 or time.perf_counter() - self._last_ping_at > PING_GAP_S:
            self.ping()
        self._outgoing[first] = outgoing

        def put(group: gloo.GlooGroup) -> None:
            tag = first
            for tensor in tensors:
                if tensor.numel():
                    outgoing.works.append(group.send([tensor], self._peer, tag))
                tag += 2
            trailer = torch.zeros(1, dtype=torch.uint8)
            outgoing.tensors = (*tensors, trailer)
            outgoing.works.append(group.send([trailer], self._peer, tag))
            self._counts.sent_bytes += size

        self._post(size, put)
        return outgoing.done

    def receive(
        self,
        first: int,
        metas: Sequence[TensorMeta],
        verdict: Verdict = "delivered",
        *,
        on_host: bool = False,
    ) -> asyncio.Future[list[Tensor]]:
        """Posts the receives of an offered transfer into fresh tensors; done when they are on the target.

        The sender is told the `verdict` once they are here. `on_host`: they stay in host memory.

        Raises (from the future): `PeerUnreachable`; `BadMessage` for a dtype that is none.
        """
        done: asyncio.Future[list[Tensor]] = self._future()
        if self._group is None:
            done.set_exception(LinkClosed(f"tensor link {self.name} is closed", link=self.name))
            return done
        try:
            target = torch.device("cpu") if on_host else self._target
            tensors = landing(metas, target)
        except DmscError as error:
            done.set_exception(error)
            return done
        size = size_bytes(metas)
        timeout = timedelta(
            seconds=self._timeout_s + size / slowest_bytes_per_s(self._quality.back.bandwidth_bytes_per_s)
        )
        self._received += 1
        timed = self._received > 1 and not self._incoming  # the first waits for the other end to be built
        incoming = _Incoming(done, first, verdict, target, tensors, timeout, time.perf_counter(), timed)
        self._incoming[first] = incoming

        def put(group: gloo.GlooGroup) -> None:
            tag = first
            for tensor in tensors:
                if tensor.numel():
                    incoming.works.append(group.recv([tensor], self._peer, tag))
                tag += 2
            incoming.works.append(group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, tag))
            self._arriving.put(incoming)

        self._post(0, put)
        return done

    def ping(self) -> None:
        """Measures the latency, if the link is idle: behind a transfer a word would wait for it."""
        now = time.perf_counter()
        waiting = self._pinged_at is not None and now - self._pinged_at < PING_PATIENCE_S
        if waiting or self.busy or self._group is None:
            return
        self._pinged_at = self._last_ping_at = now
        self._say(PING)

    def _post(self, size: int, put: Callable[[gloo.GlooGroup], None]) -> None:
        """Has `put` post its operations, now or when the line lets them through; from any thread."""

        def now() -> None:
            group = self._group
            if group is None:
                return
            try:
                put(group)
            except RuntimeError as error:
                self._tell(self._over, self._broken(gloo.first_line(error)))

        self._line.post(size, now, lambda: self._over(self._broken("lost, as it is shaped")))

    def _say(self, word: int) -> None:
        """A receipt, or what is said in its place; from any thread."""
        said = torch.tensor([word], dtype=torch.int64)

        def put(group: gloo.GlooGroup) -> None:
            self._receipts.append((group.send([said], self._peer, self._me), said))

        self._post(WORD_BYTES, put)

    def close(self, error: PeerUnreachable | None = None) -> None:
        """Ends the link now: open transfers fail, blocked threads come free. Twice is fine.

        Without an `error` the peer is told that this is on purpose.
        """
        group = self._group
        if group is not None and error is None:
            try:
                farewell = torch.tensor([GOODBYE], dtype=torch.int64)
                self._receipts.append((group.send([farewell], self._peer, self._me), farewell))
            except RuntimeError:
                pass  # it is broken already; then there is nobody to tell
        self._over(error)

    async def closed_fully(self) -> None:
        """Returns once the link's threads have ended and its sockets are closed."""
        if self._closing is not None:
            await asyncio.shield(self._closing)

    # --- the two threads ----------------------------------------------------------------------------------
    def _watch_receipts(self, group: gloo.GlooGroup) -> None:
        """Each receipt ends one of our sends. The peer's parity of the first tags carries them."""
        end: PeerUnreachable | None = None
        took_ms: float | None = None
        try:
            while True:
                receipt = torch.empty(1, dtype=torch.int64)
                group.recv([receipt], self._peer, self._peer).wait(FOREVER)
                word = int(receipt.item())
                if word == GOODBYE:
                    break
                if word == PING:
                    self._say(PONG)
                elif word == PONG:
                    self._tell(self._ponged, time.perf_counter())
                elif word <= TOOK:
                    took_ms = (TOOK - word) / 1e3
                elif word >= 0:
                    first, verdict = divmod(word, len(VERDICTS))
                    self._tell(self._sent, first, VERDICTS[verdict], took_ms)
                    took_ms = None
        except RuntimeError as error:
            end = self._broken(gloo.first_line(error))
        self._tell(self._over, end)

    def _watch_arrivals(self) -> None:
        while (incoming := self._arriving.get()) is not None:
            try:
                *works, trailer = incoming.works  # each is waited for once: a second wait never ends
                # First: of the link's end gloo tells those behind the one under way, not that one itself.
                trailer.wait(incoming.timeout)
                for work in works:
                    work.wait(incoming.timeout)
                wire_ms = (time.perf_counter() - incoming.began) * 1e3
                if incoming.timed:
                    self._say(TOOK - round(wire_ms * 1e3))
                self._say(incoming.first * len(VERDICTS) + VERDICTS.index(incoming.verdict))
                tensors = to_device(incoming.tensors, incoming.target)
            except RuntimeError as error:
                self._tell(self._over, self._broken(gloo.first_line(error)))
                return
            took_ms = (time.perf_counter() - incoming.began) * 1e3
            self._tell(self._arrived, incoming, tensors, took_ms, wire_ms)
            del incoming, tensors

    def _tell(self, what: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *args)
        except RuntimeError:
            return  # the loop has ended; nobody waits any more

    # --- on the loop --------------------------------------------------------------------------------------
    def _sent(self, first: int, verdict: Verdict, took_ms: float | None) -> None:
        self.progress_at = time.monotonic()
        outgoing = self._outgoing.pop(first, None)
        if outgoing is not None and took_ms is not None:
            self._quality.out.measured(outgoing.size, took_ms)
        if outgoing is not None and not outgoing.done.done():
            outgoing.done.set_result(verdict)

    def _ponged(self, at: float) -> None:
        if self._pinged_at is None:
            return
        took_ms, self._pinged_at = (at - self._pinged_at) * 1e3, None
        self._pongs += 1
        if self._pongs > 1:  # the first one waits for the other end to be built
            self._quality.out.pinged(took_ms)
            self._quality.back.pinged(took_ms)

    def _arrived(self, incoming: _Incoming, tensors: list[Tensor], took_ms: float, wire_ms: float) -> None:
        if self._incoming.pop(incoming.first, None) is None:
            return
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._counts.received_bytes += size
        if incoming.timed:
            self._quality.back.measured(size, wire_ms, ahead=False)
        self._counts.transfers += 1
        self._counts.transfer_ms += took_ms
        if not incoming.done.done():
            incoming.done.set_result(tensors)

    def _over(self, error: PeerUnreachable | None) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        reason = error or LinkClosed(f"tensor link {self.name} was closed", link=self.name)
        if error is not None and not isinstance(error, LinkClosed):
            self._counts.errors += 1
        for outgoing in self._outgoing.values():
            if not outgoing.done.done():
                outgoing.done.set_exception(reason)
        for incoming in self._incoming.values():
            if not incoming.done.done():
                incoming.done.set_exception(reason)
        self._closing = self._loop.create_task(self._free(group), name=f"close link {self.name}")
        self._ended(error)

    async def _free(self, group: gloo.GlooGroup) -> None:
        """Frees the threads, then what they and gloo held."""
        held = [group]
        del group

        def free() -> None:
            gloo.release(held[0])
            self._arriving.put(None)
            for thread in self._threads:
                thread.join()
            held.clear()

        await gloo.in_thread("link-close", free)
        self._outgoing.clear()
        self._incoming.clear()
        self._receipts.clear()
        self._device = None

    def _future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        # whoever lost interest need not fetch the error
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def _broken(self, text: str) -> PeerUnreachable:
        return PeerUnreachable(f"tensor link {self.name}: {text}", link=self.name)
