"""A job that is cut anew, again and again, while members and its leader die: by the real code of both.

Members hold real layers; what a step does to them is the same gradients whoever computes them, so that each
weight is known at each version. Messages take a random number of turns of the event loop, some orders come
twice, and whoever is struck dies before or after it has obeyed. No clock is involved.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from entities.orchestrator.job_state.guarded_tasks import GuardedTasks
from entities.orchestrator.job_state.instances import MemberLost
from entities.orchestrator.membership.recutting import Recutting
from entities.orchestrator.transaction.takeover_rules import ResumePoint
from schemas.errors import BadInput, Conflict, PeerUnreachable
from schemas.job import JobRecord
from schemas.recut import Cuts, RecutJob, RecutRecord
from schemas.step import Member
from schemas.task_graph import TaskGraph
from tests.builders import graphs
from tests.builders.jobs import gpt, job, spec
from tests.job_context import job_context
from workers.compute.stage_compute import StageCompute
from workers.stage.layer_change import LayerChange, LayerChangeTimes
from workers.state.checkpoint import named_tensors
from workers.state.layer_state import layer_state, load_layers

LAYERS = 6
CPU = torch.device("cpu")


class LeaderDied(Exception):
    """The leader's code ends here, in the middle of whatever it did."""


class SimThread:
    """Tasks one after the other, each some turns later."""

    def __init__(self, turns: Callable[[], Any]) -> None:
        self._turns = turns
        self._last: asyncio.Future[Any] | None = None

    def order(self, task: Callable[[], Any]) -> asyncio.Future[Any]:
        before = self._last

        async def run() -> Any:
            if before is not None:
                await asyncio.wait([before])
            await self._turns()
            return task()

        self._last = asyncio.ensure_future(run())
        return self._last


class SimMember:
    """One incarnation: its layers, and its part in re-cuts."""

    def __init__(self, world: RecutWorld, member: Member, graph: TaskGraph) -> None:
        self.member, self.alive, self._world = member, True, world
        started = graphs.start(
            graph.unit(member.sid), spec=world.spec, stages=len(graph.cuts), layer_count=LAYERS
        ).model_copy(update={"incarnation": member.incarnation, "plan": graph.revision})
        self.layers = StageCompute(started, CPU)
        self.layers.build()
        self.change = LayerChange(
            started,
            CPU,
            SimThread(world.turns),  # type: ignore[arg-type]
            self.layers,
            lambda: self.layers.version,
            self._send,
            lambda: None,
            self._between,
            lambda start: None,
            LayerChangeTimes(follow_s=60.0, fill_s=60.0),
        )
        self.handlers = {row.name: handle for row, handle in self.change.orders()}

    async def _between(self, attempt: int, fenced: Sequence[Member]) -> None:
        await self._world.turns()

    async def _send(
        self,
        to: Member,
        plan: int,
        direction: str,
        first: int,
        step: int,
        tensors: Sequence[Tensor],
        rate: float | None,
    ) -> str:
        notice: Any = SimpleNamespace(
            transfer=plan,
            sender=self.member,
            microbatch=first,
            direction=direction,
            step=step,
            learning_rate=rate,
        )
        carried = [tensor.clone() for tensor in tensors]
        while True:
            await self._world.turns()
            there = self._world.members.get(to.sid)
            if not self.alive or there is None or there.member != to or not there.alive:
                raise PeerUnreachable(f"{to.sid} is dead", peer=to.sid)
            answer = there.change.offered(notice)
            if answer == "accepted":
                there.change.received(notice, carried)
                return "delivered"
            if answer != "later":
                return answer

    def step(self, step: int) -> None:
        gradients = [self._world.gradient(name, step) for name in self.layers.summed_names]
        self.layers.redo(step, gradients, 0.01)
        self.change.applied(step, gradients, 0.01)


class RecutWorld:
    """One schedule. `kills`: how many deaths at most; `replicas`: of each of three stages."""

    def __init__(self, seed: int, *, replicas: int = 1, kills: int = 0, takeovers: int = 0) -> None:
        self.chance = random.Random(seed)
        self.spec = spec(
            model=gpt(layers=LAYERS - 2, width=4, heads=1, context=4, dropout=0.1),
            data={"source": "stdlib:", "sample_tokens": 4},
            training={"steps": 40, "microbatches": 2, "microbatch_samples": 1},
            parallel={"stages": 3, "replicas": replicas},
        )
        self.kills, self.takeovers = kills, takeovers
        self.members: dict[str, SimMember] = {}
        self.struck: list[str] = []
        self.done = self.dropped = 0
        self._born = 0
        cuts = ((0, 2), (2, 4), (4, 6))
        units = [
            graphs.unit(f"j-s{stage}-r{at}", first_layer=first, last_layer=last)
            for stage, (first, last) in enumerate(cuts)
            for at in range(replicas)
        ]
        places = tuple(graphs.placement(unit.sid, slot) for slot, unit in enumerate(units))
        graph = graphs.graph(*units, placements=places, layer_count=LAYERS)
        self.bucket: JobRecord = job("j", spec=self.spec, graph=graph, epoch=1)
        whole = graphs.unit("j-s0-r0", first_layer=0, last_layer=LAYERS)
        self.reference = StageCompute(graphs.start(whole, spec=self.spec, stages=1, layer_count=LAYERS), CPU)
        self.reference.build()
        self._shapes = {name: tensor.shape for name, tensor in self.reference.module.trainable()}
        self.topology = graphs.topology(*(graphs.layer(index) for index in range(LAYERS)))

    # --- chance -----------------------------------------------------------------------------------------
    async def turns(self) -> None:
        for _ in range(self.chance.randrange(4)):
            await asyncio.sleep(0)

    def gradient(self, name: str, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash((sum(name.encode()), len(name), step)) % (1 << 31))
        return torch.randn(self._shapes[name], generator=generator)

    def strike(self, where: str, member: SimMember | None = None) -> None:
        """Perhaps somebody dies here: the member at hand, or the leader."""
        if member is not None and self.kills and self.chance.random() < 0.06:
            self.kills -= 1
            self.kill(member, where)
        elif self.takeovers and self.chance.random() < 0.06:
            self.takeovers -= 1
            self.struck.append(f"leader {where}")
            raise LeaderDied

    def kill(self, member: SimMember, where: str) -> None:
        self.struck.append(f"{member.member.sid} {where}")
        member.alive = False
        member.change.close()
        self.lost.add(member.member)
        for other in self.members.values():
            if other.alive:
                other.change.fence([member.member])

    # --- the leader -------------------------------------------------------------------------------------
    def _lead(self) -> None:
        self.lost: set[Member] = set()
        self.tasks = GuardedTasks()
        assert self.bucket.graph is not None
        instances = SimpleNamespace(
            graph=self.bucket.graph,
            lost=self.lost,
            order=self.order,
            agent_of=lambda sid: None,
            patience_s=lambda least_s: least_s,
        )
        instances.units = self.bucket.graph.units
        self.instances = instances
        store = SimpleNamespace(record=self.bucket, note=self._note)
        quiet = SimpleNamespace(recut=self._told, changed=lambda text: None)
        context = job_context(
            self.bucket,
            instances=instances,
            tasks=self.tasks,
            store=store,
            events=quiet,
            policies=SimpleNamespace(refer=lambda reason, reference_ms: None),
            mesh=SimpleNamespace(nodes={}),
        )
        self.recutting = Recutting(
            context,
            self,  # type: ignore[arg-type]
            SimpleNamespace(coming=()),  # type: ignore[arg-type]
            self._reopen,
            self._losing,
            lambda: None,
            lambda: None,
        )
        self.recutting.taken_over()

    async def order(
        self, row: Any, message: Any, members: Sequence[Member], *, deadline_s: float
    ) -> dict[str, Any]:
        answers = await asyncio.gather(
            *(self._order_one(row.name, message, member) for member in members), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return {member.sid: answer for member, answer in zip(members, answers, strict=True)}

    async def _order_one(self, row: str, message: Any, member: Member) -> Any:
        await self.turns()
        at = self.members[member.sid]
        self.strike(f"before {row}", at)
        answer: Any = None
        for _ in range(1 + (self.chance.random() < 0.1)):
            if at.member != member or not at.alive:
                raise MemberLost([member], f"{member.sid} is dead")
            answer = await at.handlers[row](message)
        self.strike(f"after {row}", at)
        await self.turns()
        if not at.alive:
            raise MemberLost([member], f"{member.sid} is dead")
        return answer

    async def _note(self, *, now: bool, **figures: Any) -> None:
        await self.turns()
        self.strike("before the commit point")
        self.bucket = self.bucket.model_copy(update=figures)
        self.strike("behind the commit point")
        await self.turns()

    def _told(self, record: RecutRecord, records: tuple[RecutRecord, ...]) -> None:
        self.bucket = self.bucket.model_copy(update={"recuts": records})

    def _losing(self, members: Sequence[Member], why: str) -> None:
        for member in members:
            at = self.members[member.sid]
            if at.member == member and at.alive:
                self.kill(at, f"fenced: {why}")

    async def _reopen(self, resume_point: ResumePoint) -> None:
        await self.turns()

    # --- what the leader sees as its step owner -----------------------------------------------------------
    running = True
    data = ()

    @property
    def step(self) -> int:
        return self.reference.version

    @property
    def loop(self) -> Any:
        async def beside(waiting: Any) -> Any:
            return await waiting

        return SimpleNamespace(beside=beside)

    @property
    def stages(self) -> tuple[tuple[Member, ...], ...]:
        graph: TaskGraph = self.instances.graph
        return tuple(
            tuple(
                self.members[unit.sid].member
                for unit in graph.stage(stage)
                if unit.sid in self.members and self.members[unit.sid].alive
            )
            for stage in range(len(graph.cuts))
        )

    async def close(self) -> ResumePoint:
        await self.turns()
        return ResumePoint(step=self.step, attempt=1, generation=1, stages=self.stages, data=())

    def living(self, resume_point: ResumePoint) -> ResumePoint:
        return ResumePoint(step=self.step, attempt=1, generation=1, stages=self.stages, data=())

    # --- the schedule -----------------------------------------------------------------------------------
    async def take_over(self) -> None:
        """Another leader reads the record, and adopts who has the layers of the plan in force."""
        await self.tasks.close()
        self._lead()
        assert self.bucket.graph is not None
        for at in self.members.values():
            if at.alive:
                await at.change.adopted(self.bucket.graph.revision, 1)
                if at.change.plan != self.bucket.graph.revision:
                    self.kill(at, "not adopted")

    def replace_dead(self) -> None:
        """Each dead member's unit gets another incarnation, with the state of the step."""
        graph: TaskGraph = self.instances.graph
        for unit in graph.units:
            at = self.members.get(unit.sid)
            if at is not None and at.alive:
                continue
            self._born += 1
            fresh = SimMember(self, Member(sid=unit.sid, incarnation=f"i{self._born}"), graph)
            names = fresh.layers.names_in(0, LAYERS)
            load_layers(fresh.layers, self.step, layer_state(self.reference, names), "the reference")
            self.members[unit.sid] = fresh

    def check(self) -> None:
        """All have the plan in force, and the bits of whoever was never disturbed."""
        graph = self.bucket.graph
        assert graph is not None
        assert graph.cuts == self.instances.graph.cuts, "the leader goes by another plan than its record's"
        expected = named_tensors(self.reference.module, self.reference.optimizer)
        for unit in graph.units:
            at = self.members[unit.sid]
            if not at.alive:
                continue
            module = at.layers.module
            assert at.change.plan == graph.revision, (unit.sid, at.change.plan, graph.revision)
            assert (module.first_layer, module.last_layer) == (unit.first_layer, unit.last_layer)
            own = named_tensors(module, at.layers.optimizer)
            wrong = [key for key, tensor in own.items() if not torch.equal(tensor, expected[key])]
            assert not wrong, (unit.sid, wrong[:3])

    def _drawn(self) -> Cuts:
        first, second = sorted(self.chance.sample(range(1, LAYERS), 2))
        return (0, first), (first, second), (second, LAYERS)

    async def run(self, steps: int, recuts: int) -> None:
        """Trains so many steps, and asks for so many re-cuts on the way."""
        self._lead()
        asked = 0
        for step in range(steps):
            self.replace_dead()
            self.check()
            gradients = [self.gradient(name, step) for name in self.reference.summed_names]
            self.reference.redo(step, gradients, 0.01)
            for at in self.members.values():
                at.step(step)
            try:
                self.recutting.decided([], 0.1)
                if asked < recuts and not self.recutting.under_way and self.chance.random() < 0.5:
                    asked += self._ask()
                for _ in range(self.chance.randrange(300)):
                    await asyncio.sleep(0)
                if self.tasks.failed:
                    await self.tasks.unless_failed(asyncio.sleep(0))
                if self.recutting.needs_rest:
                    await self.recutting.at_rest()
            except LeaderDied:
                await self.take_over()
        await self.tasks.close()
        self.replace_dead()
        self.check()
        states = [str(record.state) for record in self.bucket.recuts]
        self.done, self.dropped = states.count("done"), states.count("dropped")

    def _ask(self) -> bool:
        try:
            self.recutting.ask(RecutJob(job="j", user="rita", cuts=self._drawn()), self.topology)
        except Conflict:
            return False
        except BadInput:  # it is cut so already
            return False
        return True
