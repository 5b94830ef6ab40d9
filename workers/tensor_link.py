"""One link: a raw two-rank gloo group between two instances, both directions.

Sends are posted at once and matched by tag, in whatever order the receiver wants them: an offer whose
notice was lost holds up nobody. A transfer of n tensors takes n + 1 tags of the sender's parity; the last
is a one-byte trailer. The receiver waits for the trailer, never for the tensors themselves: gloo tells
queued operations that the connection broke, but not the one under way, whose wait would sit out its whole
timeout (`workers.gloo`). Behind the trailer everything has arrived, because a pair writes in order. For
the same reason the sender does not wait for its sends but for the receiver's receipt, eight bytes that
name the finished transfer.

So a link has two threads: one waits for trailers in the order in which receives were posted (each belongs
to a send that is already posted, so none waits for anything but the wire), one waits for receipts. The
latter always has a receive queued, so it also notices at once when the other end dies or says goodbye.
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
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from schemas.data_plane import TensorMeta
from schemas.errors import DmscError, PeerUnreachable
from schemas.telemetry import LinkSample
from workers import gloo
from workers.staging import landing, size_bytes, to_device


class LinkClosed(PeerUnreachable):
    """A link ended on purpose: a goodbye, or a newer link took its place. No fault; offer again."""

    code = "link_closed"


Verdict = Literal["delivered", "held", "stale"]
VERDICTS: tuple[Verdict, ...] = ("delivered", "held", "stale")
"""What became of a transfer; a receipt is `first tag * len(VERDICTS) + index`."""
GOODBYE = -1
"""A receipt of this value says: I close this link on purpose."""
FOREVER = timedelta(days=365)
SLOWEST_BYTES_PER_S = 4e6
"""A transfer may take its timeout plus its size at this rate, before its link counts as broken."""
KEPT_RECEIPTS = 1024


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
    works: list[dist.Work]
    trailer: dist.Work
    timeout: timedelta
    began: float


@dataclass(slots=True)
class LinkCounts:
    """What went over a peer's links. `transfers` and their milliseconds count arrivals, from the posted
    receive to the tensors in place; bytes count both ways."""

    sent_bytes: int = 0
    received_bytes: int = 0
    transfers: int = 0
    transfer_ms: float = 0.0
    errors: int = 0

    def take(self, peer: str) -> LinkSample:
        """What has been counted since the last call."""
        sample = LinkSample(
            peer=peer,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            transfers=self.transfers,
            transfer_ms=self.transfer_ms,
            errors=self.errors,
        )
        self.sent_bytes = self.received_bytes = self.transfers = self.errors = 0
        self.transfer_ms = 0.0
        return sample


class TensorLink:
    """A built link. All methods on the event loop.

    Args:
        group: two ranks, connected.
        device: the gloo device, kept open as long as the link.
        counts: of the peer, added to.
        target: where received tensors are wanted.
        ended: called once, on the loop, when the link is over: None after a goodbye, else the error.
    """

    def __init__(
        self,
        name: str,
        group: gloo.Group,
        device: gloo.Device,
        *,
        counts: LinkCounts,
        target: torch.device,
        timeout_s: float,
        ended: Callable[[PeerUnreachable | None], None],
    ) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._group: gloo.Group | None = group
        self._device = device
        self._me = group.rank()
        self._peer = 1 - group.rank()
        self._counts = counts
        self._target = target
        self._timeout_s = timeout_s
        self._ended = ended
        self.progress_at = time.monotonic()
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._arriving: queue.SimpleQueue[_Incoming | None] = queue.SimpleQueue()
        self._receipts: deque[tuple[dist.Work, Tensor]] = deque(maxlen=KEPT_RECEIPTS)
        self._closing: asyncio.Task[None] | None = None
        self._threads = [
            threading.Thread(target=self._watch_receipts, args=(group,), name="link-receipts", daemon=True),
            threading.Thread(target=self._watch_arrivals, args=(group,), name="link-arrivals", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether a transfer is open in either direction."""
        return bool(self._outgoing or self._incoming)

    @property
    def outgoing_bytes(self) -> int:
        """What has been posted and is not known to have arrived."""
        return sum(outgoing.size for outgoing in self._outgoing.values())

    def send(self, first: int, tensors: Sequence[Tensor]) -> asyncio.Future[Verdict]:
        """Posts a transfer; done, with what the peer made of it, when the peer has all of it.

        Args:
            first: the first of its tags.
            tensors: contiguous, on the host, any dtype and shape; not to be changed until done.

        Raises (from the future): `PeerUnreachable`.
        """
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        outgoing = _Outgoing(self._future(), tensors, size)
        group = self._group
        if group is None:
            outgoing.done.set_exception(LinkClosed(f"tensor link {self.name} is closed", link=self.name))
            return outgoing.done
        self._outgoing[first] = outgoing
        tag = first
        try:
            for tensor in tensors:
                if tensor.numel():
                    outgoing.works.append(group.send([tensor], self._peer, tag))
                tag += 2
            trailer = torch.zeros(1, dtype=torch.uint8)
            outgoing.tensors = (*tensors, trailer)
            outgoing.works.append(group.send([trailer], self._peer, tag))
            self._counts.sent_bytes += size
        except RuntimeError as error:
            self._over(self._broken(gloo.first_line(error)))
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
        group = self._group
        if group is None:
            done.set_exception(LinkClosed(f"tensor link {self.name} is closed", link=self.name))
            return done
        try:
            target = torch.device("cpu") if on_host else self._target
            tensors = landing(metas, target)
        except DmscError as error:
            done.set_exception(error)
            return done
        works: list[dist.Work] = []
        tag = first
        try:
            for tensor in tensors:
                if tensor.numel():
                    works.append(group.recv([tensor], self._peer, tag))
                tag += 2
            trailer = group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, tag)
        except RuntimeError as error:
            done.set_exception(self._broken(gloo.first_line(error)))
            self._over(self._broken(gloo.first_line(error)))
            return done
        timeout = timedelta(seconds=self._timeout_s + size_bytes(metas) / SLOWEST_BYTES_PER_S)
        incoming = _Incoming(
            done, first, verdict, target, tensors, works, trailer, timeout, time.perf_counter()
        )
        self._incoming[first] = incoming
        self._arriving.put(incoming)
        return done

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
    def _watch_receipts(self, group: gloo.Group) -> None:
        """Each receipt ends one of our sends. The peer's parity of the first tags carries them."""
        end: PeerUnreachable | None = None
        try:
            while True:
                receipt = torch.empty(1, dtype=torch.int64)
                group.recv([receipt], self._peer, self._peer).wait(FOREVER)
                if receipt.item() == GOODBYE:
                    break
                first, verdict = divmod(int(receipt.item()), len(VERDICTS))
                self._tell(self._sent, first, VERDICTS[verdict])
        except RuntimeError as error:
            end = self._broken(gloo.first_line(error))
        self._tell(self._over, end)

    def _watch_arrivals(self, group: gloo.Group) -> None:
        while (incoming := self._arriving.get()) is not None:
            try:
                incoming.trailer.wait(incoming.timeout)
                for work in incoming.works:
                    work.wait(incoming.timeout)
                code = incoming.first * len(VERDICTS) + VERDICTS.index(incoming.verdict)
                receipt = torch.tensor([code], dtype=torch.int64)
                self._receipts.append((group.send([receipt], self._peer, self._me), receipt))
                tensors = to_device(incoming.tensors, incoming.target)
            except RuntimeError as error:
                self._tell(self._over, self._broken(gloo.first_line(error)))
                return
            took_ms = (time.perf_counter() - incoming.began) * 1e3
            self._tell(self._arrived, incoming, tensors, took_ms)
            del incoming, tensors

    def _tell(self, what: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *args)
        except RuntimeError:
            return  # the loop has ended; nobody waits any more

    # --- on the loop --------------------------------------------------------------------------------------
    def _sent(self, first: int, verdict: Verdict) -> None:
        self.progress_at = time.monotonic()
        outgoing = self._outgoing.pop(first, None)
        if outgoing is not None and not outgoing.done.done():
            outgoing.done.set_result(verdict)

    def _arrived(self, incoming: _Incoming, tensors: list[Tensor], took_ms: float) -> None:
        if self._incoming.pop(incoming.first, None) is None:
            return
        self._counts.received_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
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

    async def _free(self, group: gloo.Group) -> None:
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
