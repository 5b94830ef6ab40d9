"""Raw gloo process groups: one shared device, built over the bus, freed explicitly.

This module follows from how gloo was measured to behave (torch 2.13):

- A group built eagerly takes 1–64 ms for 2–8 ranks; built lazily it fails later with connect timeouts.
- `abort()`, `shutdown()` and dropping the group free neither a thread that waits in `recv` nor one that
  waits in `all_reduce`. A wait that times out closes every pair of its group, and that frees the threads
  within
  milliseconds: so `release` lets one wait time out on purpose.
- When a pair closes, queued operations fail, but a transfer under way does not: its `wait` lasts the whole
  timeout, and on the sending side may even report success. So callers wait for an operation *queued behind*
  the data (see `workers.links.tensor_link`).
- The kernel chooses the listening port; `open_device` tries until one is in the range.
- The listening side waits for a connection five times the timeout: see `workers.transport.reachability`.
- A device's thread skips events of a connection that another thread has locked, and polls again at once. When
  its own wake-up displaces that other thread from its core, it spins until that one runs again: half of its
  CPU time, for transfers of 512 KiB between two processes on two busy cores. So it gets a scheduling class
  whose wake-ups displace nobody (`bus.scheduling_class`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore  # torch.distributed re-exports it at run time only

from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.rendezvous import Rendezvous
from bus.scheduling_class import displacing_nobody
from schemas.errors import BadInput, DmscError, PeerUnreachable
from workers.transport import link_authentication, reachability
from workers.transport.bus_store import BusStore

log = get_logger("workers.transport.gloo")

PORT_TRIES = 2048
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
RELEASE_TAG = 2**31 - 2
"""A tag on which nothing is ever sent, so that a wait for it times out."""

Device = Any  # dist.ProcessGroupGloo.Device, which torch's stubs and its runtime name differently
Address = tuple[str, tuple[int, int] | None]
_T = TypeVar("_T")
_lock = threading.Lock()
_devices: weakref.WeakValueDictionary[Address, Device] = weakref.WeakValueDictionary()
_port_of: dict[Address, int] = {}
"""The port on which the present device of an address listens; 0: unknown."""


class GlooGroup(link_authentication.AuthenticatedGroup, Protocol):
    """The part of `dist.ProcessGroupGloo` used here; torch's stubs leave most of it out."""

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work: ...


def open_device(address: str, ports: tuple[int, int] | None = None) -> Device:
    """The process's gloo device for `address`: one listening socket and one thread for all groups on it.

    All holders share it; it is closed when the last reference goes. Blocks (it may resolve a name).

    Args:
        address: The address that other instances connect to; a name or number of one of this machine's
            interfaces.
        ports: Inclusive range for the listening port, for firewalls. Gloo can't be given a port: it takes the
            kernel's choice. So the range must overlap `net.ipv4.ip_local_port_range`, and sockets are opened
            until one falls into it; a try takes 1–5 ms, so give hundreds of ports. Linux only.

    Raises:
        BadInput: The address is not this machine's, or no port of the range could be opened.
    """
    with _lock:
        device = _devices.get((address, ports))
        if device is None:
            before = reachability.listening()
            device = _new_device(address) if ports is None else _device_in(address, ports)
            _devices[address, ports] = device
            _port_of[address, ports] = max(reachability.listening() - before, default=0)
        return device


def _new_device(address: str) -> Device:
    try:
        with displacing_nobody():
            return dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
    except RuntimeError as error:
        raise BadInput(
            f"tensor links cannot listen on {address!r}: it is not an address of this machine; "
            "give the address by which other machines reach it",
            address=address,
        ) from error


def _device_in(address: str, ports: tuple[int, int]) -> Device:
    low, high = ports
    least, most = (int(number) for number in PORT_RANGE.read_text().split())
    possible = low <= high and low <= most and high >= least
    for _ in range(PORT_TRIES if possible else 0):
        before = reachability.listening()
        device = _new_device(address)
        opened = reachability.listening() - before
        if any(low <= port <= high for port in opened):
            return device
    raise BadInput(
        f"no port between {low} and {high} could be had for tensor links; give a range within the system's, "
        f"{least}-{most} (sysctl net.ipv4.ip_local_port_range)",
        ports=f"{low}-{high}",
    )


async def in_thread(name: str, work: Callable[[], _T]) -> _T:
    """Runs blocking work on a new thread. If it is cancelled, the thread ends by itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]  # without an error, it is a _T
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:  # raised again in the awaiting task
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop has ended; no task waits any more
        finally:
            del result, error  # the error's traceback refers to this frame: the cycle would keep groups alive

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """How this process builds groups."""

    address: str = "127.0.0.1"
    """The address that peers connect to."""
    ports: tuple[int, int] | None = None
    """The range of ports to listen on (see `open_device`)."""
    build_timeout_s: float = 5.0
    """Longer tolerates slow networks, shorter notices a dead peer sooner. Builds take 1–64 ms."""
    timeout_s: float = 5.0
    """Default timeout of an all-reduce. Longer tolerates late replicas, shorter frees the others sooner when
    one has died unnoticed (releasing the group frees them at once)."""
    grace_s: float = 1.0
    """Time beyond its timeout after which the caller gives a build up: gloo's listening side waits five times
    as long."""
    dial_after_s: float = 1.0
    """A build that takes longer than this probes the other ranks' addresses itself."""
    dial_s: float = 2.0
    """Timeout of one probe: two SYNs, a second apart."""
    watch_s: float = 4.0
    """Seconds between probes of the other ranks during an all-reduce."""
    silent_s: float = 4.0
    """A connection breaks after this long without an acknowledgement (TCP_USER_TIMEOUT). Longer survives
    longer gaps of the network, shorter notices a partition sooner. While a peer computes, its kernel
    acknowledges."""
    secret: bytes | None = field(default=None, repr=False)
    """The job's secret: a peer without it is refused (`workers.transport.link_authentication`). None: peers
    are not authenticated."""


class LinkRefused(PeerUnreachable):
    """A peer connected that can't prove to be a member of the job."""

    code = "link_refused"


class _Refusal(str):
    """Why a group was not built, if a peer in it was no member of the job."""


class GroupBuild:
    """One attempt to build a raw gloo group with the ranks that use the same `name`.

    Args:
        name: Unique to these members and this attempt.
        rank, size: This process's rank and the group's size.
        config: Where to listen, timeouts, and the job's secret.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        namespace: str,
        name: str,
        rank: int,
        size: int,
        config: GroupConfig,
    ) -> None:
        self.name = name
        self._rank = rank
        self._size = size
        self._config = config
        self._build_timeout = timedelta(seconds=config.build_timeout_s)
        self._began = time.monotonic()
        self._overdue = self._cancelled = False
        self._places: dict[int, tuple[str, int]] = {}
        self._rendezvous = Rendezvous(bus, namespace, config.secret)
        self._store = BusStore(self._rendezvous, asyncio.get_running_loop(), self._build_timeout)

    async def run(self) -> tuple[GlooGroup, Device]:
        """Builds the group on a thread; returns it with its device, to which the caller keeps a reference.

        Raises:
            PeerUnreachable: The others did not come, or could not be reached, in time. The field `unreached`
                names the ranks that came to the rendezvous but do not answer at their address.
            BadInput: The address is not this machine's.
        """
        building = asyncio.create_task(in_thread("gloo-build", self._build))
        dialling = asyncio.create_task(self._dial())
        try:
            both: set[asyncio.Task[Any]] = {building, dialling}
            first = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait(both, timeout=self._patience_s, return_when=first)
            if dialling in done and not dialling.result():
                done, _ = await asyncio.wait({building}, timeout=self._patience_s)
            built = building.result() if building in done else "timed out connecting"
            if not isinstance(built, str):
                return built
            refused = isinstance(built, _Refusal)
            if self._overdue and not self._cancelled:
                await asyncio.wait({dialling}, timeout=self._config.dial_s)
            unreached = dialling.result() if dialling.done() else ()
            if unreached:
                built = f"nothing answers where {_ranks(unreached)} said to be"
        finally:
            building.cancel()
            dialling.cancel()
        self._store.release()
        await self.forget()
        kind = LinkRefused if refused else PeerUnreachable
        raise kind(f"group {self.name} was not built: {built}", name=self.name, unreached=unreached)

    @property
    def _patience_s(self) -> float:
        limit_s = self._config.build_timeout_s + self._config.grace_s
        return max(0.0, self._began + limit_s - time.monotonic())

    async def _dial(self) -> tuple[int, ...]:
        """Once the build is overdue: the ranks that have announced an address but do not answer there."""
        await asyncio.sleep(self._config.dial_after_s)
        self._overdue = True
        await self.announce()
        return await self.silent()

    async def announce(self) -> None:
        """Announces this rank's address, so that others can probe it; port 0: unknown."""
        address = self._config.address
        port = _port_of.get((address, self._config.ports), 0)
        with contextlib.suppress(DmscError):  # without the address, only timeouts reveal a silent rank
            await self._store.write(self._place(self._rank), f"{address}:{port}")

    async def silent(self) -> tuple[int, ...]:
        """The ranks that have announced an address but do not answer there."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        answers = await asyncio.gather(*(self._reaches(rank) for rank in others))
        return tuple(rank for rank, answer in zip(others, answers, strict=True) if not answer)

    async def _reaches(self, rank: int) -> bool:
        host, port = await self._locate(rank)
        return not port or await reachability.reaches(host, port, self._config.dial_s)

    async def locate(self) -> None:
        """Reads the addresses of all other ranks, while the rendezvous certainly still has them."""
        await asyncio.gather(*(self._locate(rank) for rank in range(self._size) if rank != self._rank))

    async def _locate(self, rank: int) -> tuple[str, int]:
        """A rank's address, once announced; port 0: it was not announced, or the rank does not know it."""
        if rank not in self._places:
            timeout_s = self._config.build_timeout_s
            try:
                at = await self._rendezvous.get(self._place(rank), timeout_s=timeout_s)
            except DmscError:
                return "", 0
            host, _, port = at.decode().rpartition(":")
            self._places[rank] = (host, int(port))
        return self._places[rank]

    def _place(self, rank: int) -> str:
        return f"{self.name}/at/{rank}"

    async def forget(self) -> None:
        """Removes this rank's address from the rendezvous."""
        with contextlib.suppress(DmscError):  # it expires anyway
            await self._store.forget()

    def cancel(self) -> None:
        """Gives the build up: one that waits for other ranks ends now, one that connects at its timeout."""
        self._cancelled = True
        self._store.release()

    def _build(self) -> tuple[GlooGroup, Device] | str:
        """The group, or an error as text, since an error's traceback would keep the device alive."""
        device = open_device(self._config.address, self._config.ports)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
        options._timeout = self._build_timeout
        options._devices = [device]
        options._threads = 1
        store = PrefixStore(self.name, self._store)
        known = reachability.connections()
        try:
            group: Any = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        except RuntimeError as error:  # also DistStoreError
            return self._refusal(first_line(error)) if self._store.refused else first_line(error)
        reachability.give_up_silent(known, self._config.silent_s)
        secret = self._config.secret
        if secret is not None and (refusal := self._authenticate(group, secret)):
            release(group)
            return refusal
        group._set_default_timeout(timedelta(seconds=self._config.timeout_s))
        return cast(GlooGroup, group), device

    def _authenticate(self, group: GlooGroup, secret: bytes) -> str | None:
        """Checks that all peers are members of the job; returns why not, or None if they are."""
        try:
            unproven = link_authentication.unproven(group, secret, self.name, self._build_timeout)
        except RuntimeError as error:
            return f"not everyone proved to be a member of the job: {first_line(error)}"
        if not unproven:
            return None
        return self._refusal(f"{_ranks(unproven)} can't prove to be a member of the job")

    def _refusal(self, why: str) -> _Refusal:
        log.warning("an unknown peer was refused at a tensor link", group=self.name, reason=why)
        return _Refusal(why)


def _ranks(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def release(group: GlooGroup) -> None:
    """Closes all connections of the group: every thread that waits in it gets an error now.

    It takes a few milliseconds. Sockets are closed when the last reference to the group goes.
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        # One timeout closes all pairs. But a pair that is already closed fails without a timeout and leaves
        # the others open, so each one is tried.
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, RELEASE_TAG).wait(timedelta(milliseconds=1))


def first_line(error: BaseException) -> str:
    """The first sentence of a gloo error, without its source file; at most 200 characters."""
    text = str(error).strip().split("\n")[0]
    if text.startswith("[") and "]" in text:
        text = text[text.index("]") + 1 :].strip()
    return text.split(". This error")[0].split(" This is typically")[0][:200]
