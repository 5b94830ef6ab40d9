"""All-reduce among the replicas of a stage: a raw gloo group per (job, stage, generation); DESIGN §5, rule 8.

Any error ends the group; a new generation builds a new one. On an error, or on the orchestrator's order,
every member must release its group at once: a member that is not the dead member's neighbour in gloo's ring
would wait until the timeout.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bus.connection import Bus
from bus.messaging.rendezvous import reductions_of
from bus.tasks import TaskSet
from bus.wire import request_progress
from schemas.errors import BadInput, PeerUnreachable
from schemas.limits import LEAST_BYTES_PER_S, SLOWEST_BYTES_PER_S
from schemas.step import Member
from workers.links.link_config import slowest_bytes_per_s
from workers.transport import gloo

_T = TypeVar("_T")
REDUCIBLE = (torch.int64, torch.int32, torch.float32, torch.float64)


class ReductionPatience:
    """The timeout of a stage's all-reduces, from their bytes and the speed of the last ones.

    In a ring, each member sends and receives up to twice the tensor. The speed is unknown before the first
    all-reduce; one that runs out of time shows that it is lower than assumed. `least_s` is added for members
    that come late.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._least_bytes_per_s = SLOWEST_BYTES_PER_S

    def timeout_s(self, size_bytes: int) -> float:
        return self._least_s + 2 * size_bytes / self._least_bytes_per_s

    def took(self, size_bytes: int, seconds: float) -> None:
        self._least_bytes_per_s = slowest_bytes_per_s(2 * size_bytes / max(seconds, 1e-6))

    def failed(self, size_bytes: int, seconds: float) -> None:
        """Lowers the assumed speed after a timeout; other errors say nothing about it."""
        if seconds >= self.timeout_s(size_bytes):
            self._least_bytes_per_s = max(self._least_bytes_per_s / 4, LEAST_BYTES_PER_S)


class GroupExchange:
    """Sends and receives among the members of a group, for work that all of them do at the same time."""

    def __init__(self, group: gloo.GlooGroup, limit_s: float) -> None:
        self._group: Any = group
        self._until = time.monotonic() + limit_s
        self._tag = 0

    def swap(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Sends `sent[rank]` to other ranks, and fills `received[rank]` from them. Blocks.

        Both sides know the sizes; contiguous, on the host, any dtype; what is empty does not travel.

        Raises:
            RuntimeError: A member is gone, or late.
        """
        self._tag += 1
        works = [
            *(
                self._group.recv([tensor], rank, self._tag)
                for rank, tensor in received.items()
                if len(tensor)
            ),
            *(self._group.send([tensor], rank, self._tag) for rank, tensor in sent.items() if len(tensor)),
        ]
        for work in works:
            work.wait(timedelta(seconds=max(0.001, self._until - time.monotonic())))


class ReductionGroup:
    """The replicas of one stage in one generation; the order of `members` is the order of ranks.

    `build` creates it. A group of one has no connections: its all-reduce changes nothing.
    """

    def __init__(
        self,
        members: Sequence[Member],
        rank: int,
        name: str,
        config: gloo.GroupConfig,
        built: tuple[gloo.GlooGroup, gloo.Device] | None,
        build: gloo.GroupBuild | None,
        parts: Sequence[float] = (),
    ) -> None:
        self.members = tuple(members)
        self.parts = tuple(parts)
        self.rank = rank
        self.name = name
        self._config = config
        self._built = built
        self._build = build
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = TaskSet()
        self._rendezvous_tasks: tuple[asyncio.Task[None], ...] = ()

    @classmethod
    async def build(
        cls,
        bus: Bus,
        *,
        job: str,
        stage: int,
        generation: int,
        members: Sequence[Member],
        me: Member,
        epoch: int = 0,
        parts: Sequence[float] = (),
        config: gloo.GroupConfig = gloo.GroupConfig(),
    ) -> ReductionGroup:
        """Meets the other members over the bus and connects to all of them, off the event loop.

        Args:
            generation: With `epoch`, job, stage and the members' incarnations it names the rendezvous, so
                that members of different generations never meet.
            parts: How much of a sum each member adds up for all, relatively; empty: equal parts. The name
                has them, too.
            config: Where this process listens, timeouts, and the job's secret.

        Raises:
            PeerUnreachable: Not all members came in time; the field `unreached` names the incarnations that
                came to the rendezvous but do not answer at their address.
            BadInput: `me` is not among the members.
        """
        if me not in members:
            raise BadInput(f"{me.sid} ({me.incarnation}) is not a member of generation {generation}")
        rank = list(members).index(me)
        identities = ",".join(
            [*(f"{member.sid}.{member.incarnation}" for member in members), *map(repr, parts)]
        )
        digest = hashlib.blake2b(identities.encode(), digest_size=8).hexdigest()
        name = f"{job}/{stage}/{epoch}/{generation}/{digest}"
        if len(members) == 1:
            return cls(members, rank, name, config, None, None, parts)
        build = gloo.GroupBuild(
            bus,
            namespace=reductions_of(job),
            name=name,
            rank=rank,
            size=len(members),
            config=config,
        )
        try:
            group = cls(members, rank, name, config, await build.run(), build, parts)
        except asyncio.CancelledError:
            build.cancel()
            raise
        except PeerUnreachable as error:
            silent = [members[rank] for rank in error.fields.get("unreached", ())]
            raise (_silent(me, silent, error.text) if silent else error) from None
        group._rendezvous_tasks = (
            group._tasks.create(build.announce(), name=f"announce {name}"),
            group._tasks.create(build.locate(), name=f"locate {name}"),
        )
        return group

    @property
    def released(self) -> bool:
        return self._over.done()

    async def all_reduce(self, tensor: Tensor, *, timeout_s: float | None = None) -> Tensor:
        """Sums `tensor` over all members, in place, on a thread; returns it.

        Args:
            tensor: Contiguous, any shape, int64 (exact in any order) or float32; on the host, or on a GPU
                (then it passes through pinned host memory). Int64 sums wrap silently: bound the inputs.
            timeout_s: Time in which all members must join; by default the group's.

        Raises:
            PeerUnreachable: A member is gone, silent (then it is named, as by `build`) or late, or the group
                was released. The tensor's contents are then undefined, and the group is over.
        """
        if tensor.dtype not in REDUCIBLE:
            raise BadInput(f"an all-reduce takes int64 or float32, not {tensor.dtype}")
        if self.released:
            raise self._error("it was released")
        if self._built is not None and tensor.numel():
            limit = timedelta(seconds=self._config.timeout_s if timeout_s is None else timeout_s)
            await self._together(partial(_reduce, self._built[0], tensor, limit))
        return tensor

    async def exchange(
        self, work: Callable[[GroupExchange], None], *, timeout_s: float | None = None
    ) -> None:
        """Runs `work` on a thread; all members do so at the same time, and it swaps tensors with them.

        Args:
            work: A `RuntimeError` in it ends the group.
            timeout_s: Time in which all members must come to its end; by default the group's.

        Raises:
            PeerUnreachable: As by `all_reduce`.
        """
        if self.released or self._built is None:
            raise self._error("it was released")
        limit_s = self._config.timeout_s if timeout_s is None else timeout_s
        await self._together(partial(_work, work, GroupExchange(self._built[0], limit_s)))

    async def _together(self, work: Callable[[], str | None]) -> None:
        """Runs a part of this group's work on a thread, and meanwhile watches the other members."""
        reducing = self._tasks.create(gloo.in_thread("all-reduce", work), name=f"reduce {self.name}")
        watching = self._tasks.create(self._watch(), name=f"watch {self.name}")
        try:
            first: set[asyncio.Future[Any]] = {reducing, self._over, watching}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.release()
            raise
        finally:
            watching.cancel()
        # Gloo does not fail an operation under way when its connection closes. Its thread waits until the
        # timeout, but the caller need not.
        if watching.done() and not reducing.done():
            self.release()
            raise watching.result()
        failed = reducing.result() if reducing.done() else "it was released"
        if failed is not None:
            self.release()
            raise self._error(failed)

    async def _watch(self) -> PeerUnreachable:
        """Probes the other members every `watch_s` during a sum; returns once some of them are silent.

        Their answers count as the progress of the sum, since gloo does not report any.
        """
        assert self._build is not None
        while True:
            await asyncio.sleep(self._config.watch_s)
            silent = [self.members[rank] for rank in await self._build.silent()]
            if silent:
                return _silent(self.members[self.rank], silent, self.name)
            request_progress.moved()

    def release(self) -> None:
        """Ends the group: an all-reduce that waits in this process fails at once. Idempotent."""
        if not self._over.done():
            self._over.set_result(None)
        for task in self._rendezvous_tasks:
            task.cancel()
        built, self._built = self._built, None
        if built is not None:
            self._tasks.create(self._free(built[0]), name=f"release {self.name}")

    async def _free(self, group: gloo.GlooGroup) -> None:
        await gloo.in_thread("release-group", partial(gloo.release, group))
        del group
        if self._build is not None:
            await self._build.forget()

    async def released_fully(self) -> None:
        """Returns once all tasks and threads of the group have ended."""
        await self._tasks.wait()

    def _error(self, text: str) -> PeerUnreachable:
        return PeerUnreachable(f"reduction group {self.name}: {text}", group=self.name)


def _silent(me: Member, peers: Sequence[Member], text: str) -> PeerUnreachable:
    names = ", ".join(member.sid for member in peers)
    incarnations = " ".join(member.incarnation for member in peers)
    return PeerUnreachable(f"{me.sid} does not reach {names}: {text}", unreached=incarnations)


def _reduce(group: gloo.GlooGroup, tensor: Tensor, limit: timedelta) -> str | None:
    """Sums in place; returns an error as text, since a traceback would keep the group's sockets open."""
    host = tensor if tensor.device.type == "cpu" else tensor.to("cpu").pin_memory()
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    options.timeout = limit
    try:
        work = group.allreduce([host], options)
        work.wait(limit)
    except RuntimeError as error:
        return gloo.first_line(error)
    if host is not tensor:
        tensor.copy_(host)
    return None


def _work(work: Callable[[GroupExchange], None], line: GroupExchange) -> str | None:
    """Does the work; returns an error as text, as `_reduce` does."""
    try:
        work(line)
    except RuntimeError as error:
        return gloo.first_line(error)
    return None
