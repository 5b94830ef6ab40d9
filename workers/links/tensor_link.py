"""One link: a raw two-rank gloo group between two instances, both directions.

Sends are posted at once and matched by tag, in any order that the receiver chooses: an offer whose notice was
lost blocks no other. A transfer of n tensors takes n + 1 tags of the sender's parity; the last is a one-byte
trailer. The receiver waits for the trailer, never for the tensors themselves: when a connection breaks, gloo
fails queued operations, but not the one under way, whose wait would last its whole timeout
(`workers.transport.gloo`). When the trailer arrives, so has everything before it, because a pair writes in
order. For the same reason the sender does not wait for its sends but for the receiver's receipt, eight bytes
that name the finished transfer.

So a link has two threads. One waits for trailers, in the order in which receives were posted; each belongs to
a send that is already posted, so it waits only for the wire. The other waits for receipts. It always has a
receive queued, so it also notices at once when the other end dies or says goodbye.

Other words on the receipts' tag are below 0, and a peer that does not know one ignores it: a goodbye, a ping
and its answer, and how long the transfer took whose receipt follows (`workers.links.link_quality`).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from schemas.data_plane import TensorMeta
from schemas.errors import DmscError, PeerUnreachable
from schemas.telemetry import LinkSample
from workers.links.link_config import LinkConfig, slowest_bytes_per_s
from workers.links.link_quality import LinkBothWays, LinkQuality
from workers.transport import gloo
from workers.transport.pinned_buffers import landing, size_bytes, to_device


class LinkClosed(PeerUnreachable):
    """A link ended on purpose: a goodbye, or a newer link replaced it. This is no fault; offer again."""

    code = "link_closed"


Verdict = Literal["delivered", "held", "stale"]
VERDICTS: tuple[Verdict, ...] = ("delivered", "held", "stale")
"""The receiver's verdicts on a transfer; a receipt is `first tag * len(VERDICTS) + index`."""
GOODBYE = -1
"""A receipt of this value says that the sender closes this link on purpose."""
PING, PONG = -2, -3
"""A ping, and the pong that answers it at once."""
TOOK = -1000
"""A value from here down says: the transfer whose receipt follows took `TOOK - value` microseconds."""
WORD_BYTES = 8
FOREVER = timedelta(days=365)
KEPT_RECEIPTS = 1024


@dataclass(slots=True, eq=False)
class _Outgoing:
    done: asyncio.Future[Verdict]
    tensors: Sequence[Tensor]  # kept because gloo reads their memory until the receipt
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
    """Traffic over a peer's links, since the last sample.

    `transfers` and `transfer_ms` count arrivals, from the posted receive to the tensors in place; bytes count
    both ways.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    transfers: int = 0
    transfer_ms: float = 0.0
    errors: int = 0
    refused: int = 0

    def take(self, peer: str) -> LinkSample:
        """Returns the counts since the last call and resets them."""
        sample = LinkSample(peer=peer, **asdict(self))
        for counter in fields(self):
            setattr(self, counter.name, counter.default)
        return sample


class SendLine(Protocol):
    """The queue that a link's sends pass through; `put` posts them. Called from any thread."""

    def post(self, size: int, put: Callable[[], None], lost: Callable[[], None]) -> None: ...


class _PlainLine:
    def post(self, size: int, put: Callable[[], None], lost: Callable[[], None]) -> None:
        put()


class TensorLink:
    """A built link. All methods on the event loop.

    Args:
        group: A connected group of two ranks.
        device: The gloo device, kept open as long as the link.
        counts, quality: The peer's figures, which this link updates.
        ended: Called once, on the loop, when the link is over: None after a goodbye, else the error.
        config: Where tensors are delivered, timeouts, and when to ping.
        line: The queue for sends, if the link is shaped (`workers.links.link_shaping`).
    """

    def __init__(
        self,
        name: str,
        group: gloo.GlooGroup,
        device: gloo.Device,
        *,
        counts: LinkCounts,
        quality: LinkBothWays,
        config: LinkConfig,
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
        self._config = config
        self._target = torch.device(config.target)
        self._ended = ended
        self.progress_at = time.monotonic()
        self._pinged_at: float | None = None
        self._last_ping_at = 0.0
        self._pongs = 0
        self._received = 0
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._arriving: queue.SimpleQueue[_Incoming | None] = queue.SimpleQueue()
        self._trailer = torch.zeros(1, dtype=torch.uint8)
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
        """How long the posted transfers without a receipt may take, in seconds."""
        size = sum(outgoing.size for outgoing in self._outgoing.values())
        return size / self._slowest(self._quality.out)

    def _slowest(self, quality: LinkQuality) -> float:
        return slowest_bytes_per_s(quality.bandwidth_bytes_per_s, self._config.slowest_bytes_per_s)

    def send(self, first: int, tensors: Sequence[Tensor]) -> asyncio.Future[Verdict]:
        """Posts a transfer; the future is done, with the peer's verdict, when the peer has all of it.

        Args:
            first: The first of its tags.
            tensors: Contiguous, on the host, any dtype and shape; not to be changed until done.

        Raises (from the future): `PeerUnreachable`.
        """
        size = sum(tensor.nbytes for tensor in tensors)
        outgoing = _Outgoing(self._future(), tensors, size)
        if self._group is None:
            outgoing.done.set_exception(LinkClosed(f"tensor link {self.name} is closed", link=self.name))
            return outgoing.done
        if self._pongs < 2 or time.perf_counter() - self._last_ping_at > self._config.ping_gap_s:
            self.ping()
        self._outgoing[first] = outgoing

        def put(group: gloo.GlooGroup) -> None:
            tag = first
            for tensor in tensors:
                if tensor.numel():
                    outgoing.works.append(group.send([tensor], self._peer, tag))
                tag += 2
            outgoing.works.append(group.send([self._trailer], self._peer, tag))
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
        """Posts the receives of an offered transfer into new tensors; done when they are on the target.

        The sender gets the `verdict` once they have arrived. `on_host`: they stay in host memory.

        Raises (from the future): `PeerUnreachable`; `BadMessage` for an unknown dtype.
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
            seconds=self._config.transfer_timeout_s + size / self._slowest(self._quality.back)
        )
        self._received += 1
        timed = (
            self._received > 1 and not self._incoming
        )  # the first also waits until the peer's end is built
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
        """Measures the latency, if the link is idle: a ping behind a transfer would wait for it."""
        now = time.perf_counter()
        pending = self._pinged_at is not None and now - self._pinged_at < self._config.ping_timeout_s
        if pending or self.busy or self._group is None:
            return
        self._pinged_at = self._last_ping_at = now
        self._say(PING)

    def _post(self, size: int, put: Callable[[gloo.GlooGroup], None]) -> None:
        """Calls `put` to post operations, now or when the line lets them through; from any thread."""

        def now() -> None:
            group = self._group
            if group is None:
                return
            try:
                put(group)
            except RuntimeError as error:
                self._call_on_loop(self._end, self._broken(gloo.first_line(error)))

        self._line.post(size, now, lambda: self._end(self._broken("lost, as it is shaped")))

    def _say(self, word: int) -> None:
        """Sends a receipt or another word on its tag; from any thread."""
        payload = torch.tensor([word], dtype=torch.int64)

        def put(group: gloo.GlooGroup) -> None:
            self._receipts.append((group.send([payload], self._peer, self._me), payload))

        self._post(WORD_BYTES, put)

    def close(self, error: PeerUnreachable | None = None) -> None:
        """Ends the link now: open transfers fail, blocked threads are released. Idempotent.

        Without an `error`, the peer is sent a goodbye.
        """
        group = self._group
        if group is not None and error is None:
            try:
                farewell = torch.tensor([GOODBYE], dtype=torch.int64)
                self._receipts.append((group.send([farewell], self._peer, self._me), farewell))
            except RuntimeError:
                pass  # the link is broken already
        self._end(error)

    async def closed_fully(self) -> None:
        """Returns once the link's threads have ended and its sockets are closed."""
        if self._closing is not None:
            await asyncio.shield(self._closing)

    # --- the two threads ----------------------------------------------------------------------------------
    def _watch_receipts(self, group: gloo.GlooGroup) -> None:
        """Ends a send with each receipt; receipts come on the first tag of the peer's parity."""
        end: PeerUnreachable | None = None
        took_ms: float | None = None
        try:
            receipt = torch.empty(1, dtype=torch.int64)
            while True:
                group.recv([receipt], self._peer, self._peer).wait(FOREVER)
                word = int(receipt.item())
                if word == GOODBYE:
                    break
                if word == PING:
                    self._say(PONG)
                elif word == PONG:
                    self._call_on_loop(self._take_pong, time.perf_counter())
                elif word <= TOOK:
                    took_ms = (TOOK - word) / 1e3
                elif word >= 0:
                    first, verdict = divmod(word, len(VERDICTS))
                    self._call_on_loop(self._send_done, first, VERDICTS[verdict], took_ms)
                    took_ms = None
        except RuntimeError as error:
            end = self._broken(gloo.first_line(error))
        self._call_on_loop(self._end, end)

    def _watch_arrivals(self) -> None:
        while (incoming := self._arriving.get()) is not None:
            try:
                *works, trailer = incoming.works  # waited for once each: a second wait never ends
                # The trailer first: when a link ends, gloo fails queued operations, not the one under way.
                trailer.wait(incoming.timeout)
                for work in works:
                    work.wait(incoming.timeout)
                wire_ms = (time.perf_counter() - incoming.began) * 1e3
                if incoming.timed:
                    self._say(TOOK - round(wire_ms * 1e3))
                self._say(incoming.first * len(VERDICTS) + VERDICTS.index(incoming.verdict))
                tensors = to_device(incoming.tensors, incoming.target)
            except RuntimeError as error:
                self._call_on_loop(self._end, self._broken(gloo.first_line(error)))
                return
            took_ms = (time.perf_counter() - incoming.began) * 1e3
            self._call_on_loop(self._receive_done, incoming, tensors, took_ms, wire_ms)
            del incoming, tensors

    def _call_on_loop(self, what: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *args)
        except RuntimeError:
            return  # the loop has ended; no caller waits any more

    # --- on the loop --------------------------------------------------------------------------------------
    def _send_done(self, first: int, verdict: Verdict, took_ms: float | None) -> None:
        self.progress_at = time.monotonic()
        outgoing = self._outgoing.pop(first, None)
        if outgoing is not None and took_ms is not None:
            self._quality.out.measured(outgoing.size, took_ms)
        if outgoing is not None and not outgoing.done.done():
            outgoing.done.set_result(verdict)

    def _take_pong(self, at: float) -> None:
        if self._pinged_at is None:
            return
        took_ms, self._pinged_at = (at - self._pinged_at) * 1e3, None
        self._pongs += 1
        if self._pongs > 1:  # the first also waits until the peer's end is built
            self._quality.out.pinged(took_ms)
            self._quality.back.pinged(took_ms)

    def _receive_done(
        self, incoming: _Incoming, tensors: list[Tensor], took_ms: float, wire_ms: float
    ) -> None:
        if self._incoming.pop(incoming.first, None) is None:
            return
        size = sum(tensor.nbytes for tensor in tensors)
        self._counts.received_bytes += size
        if incoming.timed:
            self._quality.back.measured(size, wire_ms, ahead=False)
        self._counts.transfers += 1
        self._counts.transfer_ms += took_ms
        if not incoming.done.done():
            incoming.done.set_result(tensors)

    def _end(self, error: PeerUnreachable | None) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        reason = error or LinkClosed(f"tensor link {self.name} was closed", link=self.name)
        if error is not None and not isinstance(error, LinkClosed):
            self._counts.errors += 1
        transfers: list[_Outgoing | _Incoming] = [*self._outgoing.values(), *self._incoming.values()]
        for transfer in transfers:
            if not transfer.done.done():
                transfer.done.set_exception(reason)
        self._closing = self._loop.create_task(self._free(group), name=f"close link {self.name}")
        self._ended(error)

    async def _free(self, group: gloo.GlooGroup) -> None:
        """Ends the threads, then frees the memory that they and gloo used."""
        references = [group]
        del group

        def free() -> None:
            gloo.release(references[0])
            self._arriving.put(None)
            for thread in self._threads:
                thread.join()
            references.clear()

        await gloo.in_thread("link-close", free)
        self._outgoing.clear()
        self._incoming.clear()
        self._receipts.clear()
        self._device = None

    def _future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        # Fetches the error, so that asyncio does not warn if no caller does.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def _broken(self, text: str) -> PeerUnreachable:
        return PeerUnreachable(f"tensor link {self.name}: {text}", link=self.name)
