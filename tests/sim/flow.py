"""Steps of one job in virtual time: the real binders and machines of instances, with given service times.

`Flow` runs data instances and stages with unequal replicas; what it leaves out is the transaction (each step
begins when all have summed what the one before gave them, plus `pause_s`). A microbatch takes a third of its
service time forward, the rest backward, as padded devices do. It measures steps, bubbles and shares, so that
a figure of `benchmarks/routing.py` can be looked at without a mesh, and within milliseconds.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from entities.orchestrator.planning.task_graph import window
from schemas.data_plane import HopLoad, MicrobatchNotice, RouteEntry, RouteTable
from schemas.step import Member, MicrobatchDispatch
from workers.routing.next_hop import Binder
from workers.telemetry.load import ComputeLoad
from workers.transaction.data_machine import DataMachine, Send
from workers.transaction.stage_machine import Backward, Forward, Offer, StageMachine

FORWARD_PART = 1 / 3


@dataclass(kw_only=True)
class Step:
    """What one step took, in seconds, and who did it."""

    seconds: float
    shares: Counter[str]
    busy_s: dict[str, float]


@dataclass(eq=False)
class Stage:
    """A replica: one compute thread, backward before forward."""

    flow: Flow
    member: Member
    stage: int
    service_s: float
    place: int
    queue: list[tuple[int, int, Callable[[], None], float]] = field(default_factory=list)
    computing: bool = False
    busy_s: float = 0.0
    load: ComputeLoad = field(default_factory=ComputeLoad)

    def __post_init__(self) -> None:
        flow = self.flow
        self.last = self.stage == len(flow.services) - 1
        self.binder = flow.binder(self.place)
        self.machine = StageMachine(
            self.member, epoch=1, stage=self.stage, last=self.last, binder=self.binder
        )

    @property
    def done(self) -> int:
        return self.load.microbatches

    def told(self) -> HopLoad:
        return HopLoad(open=self.machine.open, service_ms=self.load.service_ms)

    def run(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            match effect:
                case Forward(hop):
                    part = 1.0 if self.last else FORWARD_PART
                    self.submit(2, part, lambda hop=hop: self._forwarded(hop))
                case Backward(hop):
                    self.submit(1, 1 - FORWARD_PART, lambda hop=hop: self._summed(hop))
                case Offer(hop, to, direction):
                    self.flow.offer(self.member, to, direction, hop.step, hop.microbatch)

    def _forwarded(self, hop: Any) -> None:
        if self.last:
            self._count()
        self.run(self.machine.forwarded(hop))

    def _summed(self, hop: Any) -> None:
        self._count()
        self.run(self.machine.accumulated(hop))

    def _count(self) -> None:
        took_ms = self.service_s * 1e3 * self.flow.noise()
        self.load.measured(FORWARD_PART * took_ms, (1 - FORWARD_PART) * took_ms)

    def submit(self, priority: int, part: float, work: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (priority, next(self.flow.order), work, part))
        self._next()

    def _next(self) -> None:
        if self.computing or not self.queue:
            return
        self.computing = True
        _, _, work, part = heapq.heappop(self.queue)
        seconds = part * self.service_s * self.flow.noise()
        self.busy_s += seconds

        def finished() -> None:
            self.computing = False
            work()
            self._next()

        self.flow.after(seconds, finished)


class Flow:
    """One job. `services[s][r]`: seconds per microbatch of replica r of stage s; they may be changed."""

    def __init__(
        self,
        services: Sequence[Sequence[float]],
        *,
        microbatches: int,
        algorithm: str = "expected-completion",
        data: int = 1,
        hop_s: float = 0.003,
        pause_s: float = 0.0,
        noise: float = 0.02,
        seed: int = 0,
    ) -> None:
        self.services = services
        self.microbatches = microbatches
        self.hop_s = hop_s
        self.pause_s = pause_s
        self.now = 0.0
        self.order = itertools.count()
        self._noise = noise
        self._random = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._left = 0
        self.stages = [
            [
                Stage(self, Member(sid=f"s{stage}-r{place}", incarnation="i"), stage, seconds, place)
                for place, seconds in enumerate(replicas)
            ]
            for stage, replicas in enumerate(services)
        ]
        self.data = [
            DataMachine(Member(sid=f"data-{place}", incarnation="i"), epoch=1, binder=self.binder(place))
            for place in range(data)
        ]
        self.nodes: dict[str, Any] = {
            node.member.sid: node for node in [*itertools.chain(*self.stages), *self.data]
        }
        for node in self.nodes.values():
            for stage, members in enumerate(self.stages):
                senders = len(self.stages[stage - 1]) if stage else data
                node.binder.update(
                    RouteTable(
                        job="j",
                        cluster="a",
                        stage=stage,
                        revision=1,
                        router="r",
                        algorithm=algorithm,
                        entries=tuple(
                            RouteEntry(
                                sid=one.member.sid,
                                incarnation="i",
                                cluster="a",
                                weight=1.0,
                                window=window(len(services), stage, senders, len(members)),
                            )
                            for one in members
                        ),
                    )
                )

    def binder(self, place: int) -> Binder:
        return Binder("a", place=place, microbatches=self.microbatches, clock=lambda: self.now)

    def noise(self) -> float:
        return max(0.2, self._random.gauss(1.0, self._noise))

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self.order), work))

    def offer(self, sender: Member, to: Member, direction: str, step: int, microbatch: int) -> None:
        """A hop: the answer comes back after half of it, the tensors are there after all of it."""
        source, target = self.nodes[sender.sid], self.nodes[to.sid]
        forward = direction == "forward"
        load = None if forward else source.told()
        notice = MicrobatchNotice.model_construct(
            job="j",
            epoch=1,
            step=step,
            attempt=0,
            microbatch=microbatch,
            stage=0,
            direction=direction,
            sender=sender,
            receiver=to,
            link="l",
            tag=1,
            tensors=(),
            evaluate=False,
            load=load,
        )

        def arrived() -> None:
            if isinstance(target, DataMachine):
                self._left -= 1
                self._send(target, target.arrived(notice))
            else:
                target.run(target.machine.arrived(notice, ()))

        if forward:
            self.after(self.hop_s / 2, lambda: source.binder.heard(to, target.told()))
        self.after(self.hop_s * self.noise(), arrived)

    def _send(self, machine: DataMachine, effects: Sequence[Send]) -> None:
        for effect in effects:
            self.offer(machine.member, effect.to, "forward", effect.work[0], effect.work[2])

    def step(self, number: int) -> Step:
        """Runs one step to its end."""
        began = self.now
        everyone = list(itertools.chain(*self.stages))
        busy = {one.member.sid: one.busy_s for one in everyone}
        done = {one.member.sid: one.done for one in everyone}
        for one in everyone:
            one.run(one.machine.applied(number))
        self._left = self.microbatches
        for place, machine in enumerate(self.data):
            order = MicrobatchDispatch(
                job="j",
                epoch=1,
                step=number,
                attempt=0,
                microbatches=tuple(range(place, self.microbatches, len(self.data))),
            )
            self._send(machine, machine.dispatch(order))
        while self._left:
            self.now, _, work = heapq.heappop(self._heap)
            work()
        seconds = self.now - began
        self.now += self.pause_s
        return Step(
            seconds=seconds,
            shares=Counter({one.member.sid: one.done - done[one.member.sid] for one in everyone}),
            busy_s={one.member.sid: one.busy_s - busy[one.member.sid] for one in everyone},
        )

    def bound(self) -> float:
        """Microbatches per second that the slowest stage can do: min over stages Σ speed."""
        return min(sum(1 / one.service_s for one in stage) for stage in self.stages)

    def efficiency(self, steps: range) -> list[float]:
        """Of each step: what was done per second, as a part of `bound`."""
        return [self.microbatches / self.step(number).seconds / self.bound() for number in steps]
