"""All-reduce among the replicas of a stage: a raw gloo group per (job, stage, generation); DESIGN §5, rule 8.

Any error ends the group for good; a new generation builds a new one. On an error, or at the
orchestrator's word, every member must release its own at once: a member that waits for one which is not
the dead one's neighbour in gloo's ring would sit there until the timeout.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bus.connection import Bus
from bus.messaging.rendezvous import reductions_of
from bus.wire import request_progress as progress
from schemas.errors import BadInput, PeerUnreachable
from schemas.step import Member
from workers.links.tensor_link import LEAST_BYTES_PER_S, SLOWEST_BYTES_PER_S, slowest_bytes_per_s
from workers.transport import gloo

TIMEOUT_S = 5.0
"""Default for an all-reduce. Longer tolerates replicas that come late, shorter frees the others sooner
when one has died unnoticed (`release` frees them at once)."""
LOOK_S = 4.0
"""An all-reduce under way for this long looks whether the others can be reached, and again."""
_T = TypeVar("_T")
REDUCIBLE = (torch.int64, torch.int32, torch.float32, torch.float64)


class ReductionPatience:
    """How long all-reduces of one stage may take: by their bytes, and by how fast the last ones were.

    In a ring, each member sends and receives up to twice the tensor. Nobody knows how fast the way to the
    others is before the first: one that runs out of time says that it is slower than was thought.
    """

    def __init__(self) -> None:
        self._least_bytes_per_s = SLOWEST_BYTES_PER_S

    def timeout_s(self, size_bytes: int) -> float:
        return TIMEOUT_S + 2 * size_bytes / self._least_bytes_per_s

    def took(self, size_bytes: int, seconds: float) -> None:
        self._least_bytes_per_s = slowest_bytes_per_s(2 * size_bytes / max(seconds, 1e-6))

    def failed(self, size_bytes: int, seconds: float) -> None:
        """Any other error than running out of time says nothing of that."""
        if seconds >= self.timeout_s(size_bytes):
            self._least_bytes_per_s = max(self._least_bytes_per_s / 4, LEAST_BYTES_PER_S)


class ReductionGroup:
    """The replicas of one stage in one generation; the order of `members` is the order of ranks.

    Made by `build`. A group of one has no connections: its all-reduce changes nothing.
    """

    def __init__(
        self,
        members: Sequence[Member],
        rank: int,
        name: str,
        timeout_s: float,
        built: tuple[gloo.GlooGroup, gloo.Device] | None,
        build: gloo.GroupBuild | None,
    ) -> None:
        self.members = tuple(members)
        self.rank = rank
        self.name = name
        self._timeout_s = timeout_s
        self._built = built
        self._build = build
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._meeting: tuple[asyncio.Task[None], ...] = ()

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
        address: str = "127.0.0.1",
        ports: tuple[int, int] | None = None,
        epoch: int = 0,
        secret: bytes | None = None,
        build_timeout_s: float = 5.0,
        timeout_s: float = TIMEOUT_S,
    ) -> ReductionGroup:
        """Meets the other members over the bus and connects to all of them, off the event loop.

        Args:
            generation: with `epoch`, job, stage and the members' incarnations it names the meeting, so that
                nobody ever meets a member of another generation.
            address, ports: where this process listens (`workers.transport.gloo.open_device`).
            secret: the job's; who does not know it is refused. None: nobody is asked.
            timeout_s: of each all-reduce that names none.

        Raises:
            PeerUnreachable: not everyone came in time; `unreached`: the incarnations of
                those that came to the rendezvous, and do not answer where they are.
            BadInput: `me` is not among the members.
        """
        if me not in members:
            raise BadInput(f"{me.sid} ({me.incarnation}) is not a member of generation {generation}")
        rank = list(members).index(me)
        crew = ",".join(f"{member.sid}.{member.incarnation}" for member in members)
        digest = hashlib.blake2b(crew.encode(), digest_size=8).hexdigest()
        name = f"{job}/{stage}/{epoch}/{generation}/{digest}"
        if len(members) == 1:
            return cls(members, rank, name, timeout_s, None, None)
        build = gloo.GroupBuild(
            bus,
            namespace=reductions_of(job),
            name=name,
            rank=rank,
            size=len(members),
            address=address,
            ports=ports,
            build_timeout_s=build_timeout_s,
            operation_timeout_s=timeout_s,
            secret=secret,
        )
        try:
            group = cls(members, rank, name, timeout_s, await build.run(), build)
        except asyncio.CancelledError:
            build.cancel()
            raise
        except PeerUnreachable as error:
            silent = [members[rank] for rank in error.fields.get("unreached", ())]
            raise (_silent(me, silent, error.text) if silent else error) from None
        group._meeting = (
            group._beside(build.announce(), f"announce {name}"),
            group._beside(build.locate(), f"locate {name}"),
        )
        return group

    def _beside(self, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def released(self) -> bool:
        return self._over.done()

    async def all_reduce(self, tensor: Tensor, *, timeout_s: float | None = None) -> Tensor:
        """Sums `tensor` over all members, in place, on a thread; returns it.

        Args:
            tensor: contiguous, any shape, int64 (exact and free of order) or float32; on the host, or on a
                GPU (then it passes through pinned host memory). Int64 sums wrap silently: bound what goes in.
            timeout_s: from now until everyone must have come; by default the group's.

        Raises:
            PeerUnreachable: a member is gone, silent (then it is named, as by `build`) or late, or the group
                was released. The tensor's contents are then undefined, and the group is over.
        """
        if tensor.dtype not in REDUCIBLE:
            raise BadInput(f"an all-reduce takes int64 or float32, not {tensor.dtype}")
        if self.released:
            raise self._gone("it was released")
        if self._built is None or not tensor.numel():
            return tensor
        limit = timedelta(seconds=self._timeout_s if timeout_s is None else timeout_s)
        work = partial(_reduce, self._built[0], tensor, limit)
        reducing = self._beside(gloo.in_thread("all-reduce", work), f"reduce {self.name}")
        watching = self._beside(self._watch(), f"watch {self.name}")
        try:
            first: set[asyncio.Future[Any]] = {reducing, self._over, watching}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.release()
            raise
        finally:
            watching.cancel()
        # Gloo does not tell an operation under way that its connection closed; its thread then sits out the
        # timeout, but whoever waits for the sum need not.
        if watching.done() and not reducing.done():
            self.release()
            raise watching.result()
        failed = reducing.result() if reducing.done() else "it was released"
        if failed is not None:
            self.release()
            raise self._gone(failed)
        return tensor

    async def _watch(self) -> PeerUnreachable:
        """Dials the others now and then, beside a sum; returns once some of them are silent.

        That they answer is the only progress that a sum has: gloo does not say how far it is.
        """
        assert self._build is not None
        while True:
            await asyncio.sleep(LOOK_S)
            silent = [self.members[rank] for rank in await self._build.silent()]
            if silent:
                return _silent(self.members[self.rank], silent, self.name)
            progress.moved()

    def release(self) -> None:
        """Ends the group: whoever waits in it, here, gets its error at once. Twice is fine."""
        if not self._over.done():
            self._over.set_result(None)
        for task in self._meeting:
            task.cancel()
        built, self._built = self._built, None
        if built is not None:
            self._beside(self._free(built[0]), f"release {self.name}")

    async def _free(self, group: gloo.GlooGroup) -> None:
        await gloo.in_thread("release-group", partial(gloo.release, group))
        del group
        if self._build is not None:
            await self._build.forget()

    async def released_fully(self) -> None:
        """Returns once nothing works in the group any more, no thread either."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _gone(self, text: str) -> PeerUnreachable:
        return PeerUnreachable(f"reduction group {self.name}: {text}", group=self.name)


def _silent(me: Member, peers: Sequence[Member], text: str) -> PeerUnreachable:
    names = ", ".join(member.sid for member in peers)
    incarnations = " ".join(member.incarnation for member in peers)
    return PeerUnreachable(f"{me.sid} does not reach {names}: {text}", unreached=incarnations)


def _reduce(group: gloo.GlooGroup, tensor: Tensor, limit: timedelta) -> str | None:
    """Returns what went wrong as text: a traceback would keep the group, and its sockets, alive."""
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
