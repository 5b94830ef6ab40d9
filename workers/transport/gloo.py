"""Raw gloo process groups: one shared device, built over the bus, freed on purpose.

What gloo does and does not do, as measured (torch 2.13), and what follows from it:

- A group built eagerly takes 1–64 ms for 2–8 ranks; built lazily it fails later with connect timeouts.
- `abort()`, `shutdown()` and dropping the group free neither a thread that waits in `recv` nor one that
  waits in `all_reduce`. A wait that times out closes every pair of its group, and that frees them within
  milliseconds: `release` lets one fail on purpose.
- A transfer under way when the pair closes is not told (only operations that are still queued are): its
  `wait` sits out the whole timeout, and on the sending side may even report success. Whoever needs to
  know waits for something *queued behind* the data (see `workers.links.tensor_link`).
- The listening port is the kernel's choice; `open_device` asks until it likes one.
- Who listens waits for a connection five times the timeout: see `workers.transport.reachability`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
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
from schemas.errors import BadInput, DmscError, PeerUnreachable
from workers.transport import link_authentication as link_proof
from workers.transport import reachability
from workers.transport.bus_store import BusStore

log = get_logger("workers.transport.gloo")

PORT_TRIES = 2048
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
GRACE_S = 1.0
"""Beyond its timeout a build is given up from outside: gloo's listening side waits five times as long."""
DIAL_AFTER_S = 1.0
"""A build that takes longer than this dials the others itself; builds take 1-64 ms."""
RELEASE_TAG = 2**31 - 2
"""A tag on which nothing is ever sent: to wait for it is to fail."""

Device = Any  # dist.ProcessGroupGloo.Device, which torch's stubs and its runtime name differently
Address = tuple[str, tuple[int, int] | None]
_T = TypeVar("_T")
_lock = threading.Lock()
_devices: weakref.WeakValueDictionary[Address, Device] = weakref.WeakValueDictionary()
_port_of: dict[Address, int] = {}
"""Where the present device of an address listens."""


class GlooGroup(Protocol):
    """What we use of `dist.ProcessGroupGloo`; torch's stubs leave most of it out."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int) -> dist.Work: ...
    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work: ...


def open_device(address: str, ports: tuple[int, int] | None = None) -> Device:
    """The process's gloo device for `address`: one listening socket and one thread for all groups on it.

    Shared by all who hold it, closed when the last lets go. Blocks (it may resolve a name).

    Args:
        address: what other instances connect to; a name or number of one of this machine's interfaces.
        ports: inclusive range for the listening port, for firewalls. Gloo cannot be told a port: it takes
            the kernel's choice, so the range must lie within `net.ipv4.ip_local_port_range`, and sockets
            are opened until one falls into it: 1–5 ms a try, so ask for hundreds of ports. Linux only.

    Raises:
        BadInput: the address is not this machine's, or no port of the range could be had.
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
    """Runs blocking work on a thread of its own. Cancelled, it leaves the thread to end by itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]  # without an error it is one
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:  # handed to whoever awaits
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop has ended; nobody waits any more
        finally:
            del result, error  # an error's traceback holds this frame: a cycle that would keep groups alive

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


class LinkRefused(PeerUnreachable):
    """Somebody connected who can't prove to be a member of the job."""

    code = "link_refused"


class _Refusal(str):
    """Why a group was not built, where it was for a stranger in it."""


class GroupBuild:
    """One attempt to build a raw gloo group with the ranks that use the same `name`.

    Args:
        name: unique to these members and this attempt.
        rank, size: this process's place.
        operation_timeout_s: of collectives, once built.
        secret: the job's, by which the members prove that they are; None: nobody is asked.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        namespace: str,
        name: str,
        rank: int,
        size: int,
        address: str,
        ports: tuple[int, int] | None = None,
        build_timeout_s: float = 5.0,
        operation_timeout_s: float = 5.0,
        secret: bytes | None = None,
    ) -> None:
        self.name = name
        self._rank = rank
        self._size = size
        self._address = address
        self._ports = ports
        self._build_timeout = timedelta(seconds=build_timeout_s)
        self._operation_timeout = timedelta(seconds=operation_timeout_s)
        self._began = time.monotonic()
        self._overdue = self._cancelled = False
        self._places: dict[int, tuple[str, int]] = {}
        self._secret = secret
        self._rendezvous = Rendezvous(bus, namespace, secret)
        self._store = BusStore(self._rendezvous, asyncio.get_running_loop(), self._build_timeout)

    async def run(self) -> tuple[GlooGroup, Device]:
        """The connected group and the device to hold on to; on a thread, never on the event loop.

        Raises:
            PeerUnreachable: the others did not come, or could not be reached, in time. `unreached` are the
                ranks that came to the rendezvous, but where they are, nothing answers.
            BadInput: the address is not this machine's.
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
                await asyncio.wait({dialling}, timeout=reachability.DIAL_S)
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
        return max(0.0, self._began + self._build_timeout.total_seconds() + GRACE_S - time.monotonic())

    async def _dial(self) -> tuple[int, ...]:
        """Once the build is overdue: ranks that have said where they are, and do not answer there."""
        await asyncio.sleep(DIAL_AFTER_S)
        self._overdue = True
        await self.announce()
        return await self.silent()

    async def announce(self) -> None:
        """Says where this rank listens, for those who want to know whether it can be reached; 0: unknown."""
        port = _port_of.get((self._address, self._ports), 0)
        with contextlib.suppress(DmscError):  # without it, silence is told by timeouts alone
            await self._store.write(self._place(self._rank), f"{self._address}:{port}")

    async def silent(self) -> tuple[int, ...]:
        """Ranks that have said where they are, and do not answer there."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        reached = await asyncio.gather(*(self._reaches(rank) for rank in others))
        return tuple(rank for rank, found in zip(others, reached, strict=True) if not found)

    async def _reaches(self, rank: int) -> bool:
        host, port = await self._locate(rank)
        return not port or await reachability.reaches(host, port)

    async def locate(self) -> None:
        """Learns where all the others are, while they surely can be asked."""
        await asyncio.gather(*(self._locate(rank) for rank in range(self._size) if rank != self._rank))

    async def _locate(self, rank: int) -> tuple[str, int]:
        """Where a rank listens, once it has come; port 0: it did not come, or does not know itself."""
        if rank not in self._places:
            patience_s = self._build_timeout.total_seconds()
            try:
                at = await self._rendezvous.get(self._place(rank), timeout_s=patience_s)
            except DmscError:
                return "", 0
            host, _, port = at.decode().rpartition(":")
            self._places[rank] = (host, int(port))
        return self._places[rank]

    def _place(self, rank: int) -> str:
        return f"{self.name}/at/{rank}"

    async def forget(self) -> None:
        """Takes back this rank's address from the rendezvous: nobody is to find it there any more."""
        with contextlib.suppress(DmscError):  # it expires
            await self._store.forget()

    def cancel(self) -> None:
        """Gives up: a build that waits for the others ends now, one that connects at its timeout."""
        self._cancelled = True
        self._store.release()

    def _build(self) -> tuple[GlooGroup, Device] | str:
        """The group, or what went wrong: an error's traceback would keep the device alive."""
        device = open_device(self._address, self._ports)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
        options._timeout = self._build_timeout
        options._devices = [device]
        options._threads = 1
        store = PrefixStore(self.name, self._store)
        known = reachability.connections()
        try:
            group: Any = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        except RuntimeError as error:  # DistStoreError is one, too
            return self._refusal(first_line(error)) if self._store.refused else first_line(error)
        reachability.give_up_silent(known)
        if self._secret is not None and (refusal := self._strangers(group, self._secret)):
            release(group)
            return refusal
        group._set_default_timeout(self._operation_timeout)
        return cast(GlooGroup, group), device

    def _strangers(self, group: GlooGroup, secret: bytes) -> str | None:
        """Why somebody who connected is no member; None where all are."""
        try:
            found = link_proof.unproven(group, secret, self.name, self._build_timeout)
        except RuntimeError as error:
            return f"not everyone proved to be a member of the job: {first_line(error)}"
        if not found:
            return None
        return self._refusal(f"{_ranks(found)} can't prove to be a member of the job")

    def _refusal(self, why: str) -> _Refusal:
        log.warning("a stranger was refused at a tensor link", group=self.name, reason=why)
        return _Refusal(why)


def _ranks(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def release(group: GlooGroup) -> None:
    """Closes all of the group's connections: every thread that waits in it gets an error now.

    Takes a few milliseconds. Sockets are closed when the last reference goes.
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        # One timeout closes all pairs. But a pair that is closed already fails without a timeout, and
        # leaves the others open: hence each in turn.
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, RELEASE_TAG).wait(timedelta(milliseconds=1))


def first_line(error: BaseException) -> str:
    """Gloo's errors are long, name its source files, and tell jokes; what matters is the first sentence."""
    text = str(error).strip().split("\n")[0]
    if text.startswith("[") and "]" in text:
        text = text[text.index("]") + 1 :].strip()
    return text.split(". This error")[0].split(" This is typically")[0][:200]
