"""A job that is cut anew, again and again, while members and its leader die: by the real code of both.

Members hold real layers; what a step does to them is the same gradients whoever computes them, so that each
weight is known at each version. Messages take a random number of turns of the event loop, and whoever is
struck dies before or after it has obeyed. A newcomer takes the state of a replica; a stage without one takes
all back to the last checkpoint. No clock is involved.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bus.subjects import STEP_ABORT
from entities.orchestrator.job_state.guarded_tasks import GuardedTasks
from entities.orchestrator.job_state.instances import MemberLost
from entities.orchestrator.membership.recut_plan import recut_proposal
from entities.orchestrator.membership.recutting import Recutting
from entities.orchestrator.step.step_loop import StageGone
from entities.orchestrator.transaction.takeover_rules import ResumePoint
from schemas.errors import BadInput, Conflict, Fenced
from schemas.job import JobRecord
from schemas.recut import Cuts, RecutJob, RecutRecord, RecutState
from schemas.step import Member
from schemas.task_graph import TaskGraph
from tests.builders import graphs
from tests.builders.jobs import gpt, job, spec
from tests.job_context import job_context
from tests.sim.recut_members import CPU, LAYERS, SimData, SimMember
from tests.sim.recut_strikes import ORDERS, Strikes
from workers.compute.stage_compute import StageCompute
from workers.state.checkpoint import named_tensors
from workers.state.layer_state import load_layers

STEPS = 16


class LeaderDied(Exception):
    """The leader's code ends here, in the middle of whatever it did."""


class RecutWorld:
    """One schedule. `replicas`: of each of three stages; `strikes`: what befalls it, by `recut_strikes`."""

    def __init__(self, seed: int, *, replicas: int = 1, **strikes: int) -> None:
        self.chance = random.Random(seed)
        self.strikes = Strikes(self.chance, strikes)
        self.spec = spec(
            model=gpt(layers=LAYERS - 2, width=4, heads=1, context=4, dropout=0.1),
            data={"source": "stdlib:", "sample_tokens": 4},
            training={"steps": 40, "microbatches": 2, "microbatch_samples": 1},
            parallel={"stages": 3, "replicas": replicas},
        )
        self.members: dict[str, SimMember] = {}
        self.states: Counter[str] = Counter()
        """How many re-cuts ended how."""
        self.in_force = 0
        """The last plan that was told to be in force."""
        self.roll_backs = 0
        self.epoch, self.attempt = 0, 1
        self._born = 0
        cuts = ((0, 2), (2, 4), (4, 6))
        units = [
            graphs.unit(f"j-s{stage}-r{at}", first_layer=first, last_layer=last)
            for stage, (first, last) in enumerate(cuts)
            for at in range(replicas)
        ]
        places = tuple(graphs.placement(unit.sid, slot) for slot, unit in enumerate(units))
        graph = graphs.graph(*units, graphs.unit("j-data-r0"), placements=places, layer_count=LAYERS)
        self.bucket: JobRecord = job("j", spec=self.spec, graph=graph)
        whole = graphs.unit("j-s0-r0", first_layer=0, last_layer=LAYERS)
        self.reference = StageCompute(graphs.start(whole, spec=self.spec, stages=1, layer_count=LAYERS), CPU)
        self.reference.build()
        self._shapes = {name: tensor.shape for name, tensor in self.reference.module.trainable()}
        self.topology = graphs.topology(*(graphs.layer(index) for index in range(LAYERS)))
        self._checkpoint = 0, self._copied(named_tensors(self.reference.module, self.reference.optimizer))
        self._data = SimData(Member(sid="j-data-r0", incarnation="d"), self.attempt)

    # --- chance -----------------------------------------------------------------------------------------
    async def turns(self) -> None:
        for _ in range(self.chance.randrange(4)):
            await asyncio.sleep(0)

    async def _turn(self) -> None:
        """One turn of the loop; raises what a task of the leader's has failed with."""
        await asyncio.sleep(0)
        if self.tasks.failed:
            await self.tasks.unless_failed(asyncio.Event().wait())

    def gradient(self, name: str, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash((sum(name.encode()), len(name), step)) % (1 << 31))
        return torch.randn(self._shapes[name], generator=generator)

    @staticmethod
    def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor.detach().clone() for key, tensor in state.items()}

    def _strike(self, phase: str, *, after: bool, at: SimMember | SimData | None = None) -> None:
        """Perhaps somebody dies here: whoever obeys, or the leader."""
        if isinstance(at, SimData):
            if at.alive and self.strikes.due("data", phase, after=after):
                self._kill(at)
        elif at is not None and at.alive and self.strikes.due("member", phase, after=after, who=at.role):
            self._kill(at)
        if self.strikes.due("leader", phase, after=after):
            raise LeaderDied

    def _kill(self, at: SimMember | SimData) -> None:
        at.die()
        self.lost.add(at.member)
        for other in self.members.values():
            if other.alive:
                other.change.fence([at.member])

    # --- the leader -------------------------------------------------------------------------------------
    def _lead(self) -> None:
        self.epoch += 1
        self.bucket = self.bucket.model_copy(update={"epoch": self.epoch})
        self.lost: set[Member] = set()
        self.tasks = GuardedTasks()
        self._coming: dict[str, SimMember | None] = {}
        self._arrived: list[SimMember] = []
        assert self.bucket.graph is not None
        instances = SimpleNamespace(
            graph=self.bucket.graph,
            lost=self.lost,
            order=self.order,
            agent_of=lambda sid: None,
            patience_s=lambda least_s: least_s,
            units=self.bucket.graph.units,
        )
        self.instances = instances
        store = SimpleNamespace(record=self.bucket, note=self._note)
        quiet = SimpleNamespace(recut=self._told, recuts=lambda records: None, changed=lambda text: None)
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
            SimpleNamespace(coming=self._coming),  # type: ignore[arg-type]
            self._reopen,
            self._losing,
            lambda: None,
            lambda: None,
        )
        self.recutting.taken_over()

    async def order(
        self, row: Any, message: Any, members: Sequence[Member], *, deadline_s: float, moving: bool = False
    ) -> dict[str, Any]:
        answers = await asyncio.gather(
            *(self._order_one(row.name, message, member) for member in members), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return {member.sid: answer for member, answer in zip(members, answers, strict=True)}

    async def _order_one(self, row: str, message: Any, member: Member) -> Any:
        """One order: it may be lost, or given twice; whoever gets it may die, or the leader."""
        phase = row.rpartition(" ")[2] if row != STEP_ABORT.name else "switch"
        at = self._data if member.sid == self._data.member.sid else self.members[member.sid]
        await self.turns()
        self._still_leads(message)
        self._strike(phase, after=False, at=at)
        restarts = self.strikes.due("restart", phase, after=False)
        if not restarts and phase in ORDERS and self.strikes.due("silence", phase, after=False):
            raise MemberLost([member], f"{member.sid} does not answer: the order was lost")
        if phase == "switch" and isinstance(at, SimMember):
            assert self.in_force == message.plan, "members go over before anybody is told"
        answer = await self._obeyed(row, message, at, member)
        if restarts or self.chance.random() < 0.1 or self.strikes.due("restart", phase, after=True):
            await self.turns()
            answer = await self._obeyed(row, message, at, member)
        self._still_leads(message)
        self._strike(phase, after=True, at=at)
        if phase in ORDERS and self.strikes.due("silence", phase, after=True):
            raise MemberLost([member], f"{member.sid} does not answer: its answer was lost")
        await self.turns()
        if not at.alive:
            raise MemberLost([member], f"{member.sid} is dead")
        return answer

    def _still_leads(self, message: Any) -> None:
        if message.epoch != self.epoch:
            raise Fenced(f"epoch {message.epoch} is over")

    async def _obeyed(self, row: str, message: Any, at: SimMember | SimData, member: Member) -> Any:
        if at.member != member or not at.alive:
            raise MemberLost([member], f"{member.sid} is dead")
        if isinstance(at, SimData):
            return await at.abort(message)
        if message.epoch < at.epoch:
            raise Fenced(f"epoch {message.epoch} is over")
        return await at.handlers[row](message)

    async def _note(self, *, now: bool, **figures: Any) -> None:
        """Writes the job's record, by compare-and-set."""
        epoch = self.epoch
        await self.turns()
        self._strike("commit", after=False)
        for _ in range(1 + self.strikes.due("restart", "commit", after=self.chance.random() < 0.5)):
            if self.bucket.epoch != epoch:
                raise Fenced("another orchestrator leads")
            self.bucket = self.bucket.model_copy(update=figures)
            await self.turns()
        self._strike("commit", after=True)

    def _told(self, record: RecutRecord, records: tuple[RecutRecord, ...]) -> None:
        self.bucket = self.bucket.model_copy(update={"recuts": records})
        if record.state is RecutState.DONE:
            self.in_force = record.plan
        if record.state is not RecutState.PREPARING:
            self.states[record.state] += 1

    def _losing(self, members: Sequence[Member], why: str) -> None:
        for member in members:
            at = self._data if member.sid == self._data.member.sid else self.members[member.sid]
            if at.member == member and at.alive:
                self._kill(at)

    async def _reopen(self, resume_point: ResumePoint) -> None:
        await self.turns()
        self.attempt = resume_point.attempt
        for stage, members in enumerate(resume_point.stages):
            if not members:
                raise StageGone(stage)

    # --- what the leader sees as its step owner -----------------------------------------------------------
    running = True

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
        return self._resume_point(self.attempt + 1)

    def living(self, resume_point: ResumePoint) -> ResumePoint:
        return self._resume_point(resume_point.attempt)

    def _resume_point(self, attempt: int) -> ResumePoint:
        data = (self._data.member,) if self._data.alive else ()
        return ResumePoint(step=self.step, attempt=attempt, generation=1, stages=self.stages, data=data)

    # --- whoever died -----------------------------------------------------------------------------------
    async def take_over(self) -> None:
        """Another leader reads the record, and adopts who has the layers of the plan in force."""
        await self.tasks.close()
        self._lead()
        assert self.bucket.graph is not None
        self.attempt += 1
        for at in self.members.values():
            if at.alive:
                at.epoch = self.epoch
                await at.change.adopted(self.bucket.graph.revision, self.attempt)
                if at.change.plan != self.bucket.graph.revision:
                    self._kill(at)
        if self._data.alive:
            self._data.attempt = self.attempt

    async def _bring(self, sid: str) -> None:
        """Starts another incarnation of a unit, with the layers of the graph at that moment."""
        await self.turns()
        self._born += 1
        member = Member(sid=sid, incarnation=f"i{self._born}")
        newcomer = SimMember(self, member, self.instances.graph)
        for _ in range(self.chance.randrange(100)):
            await asyncio.sleep(0)
        self._coming.pop(sid)
        self._arrived.append(newcomer)

    def _replace(self) -> None:
        """Has dead members replaced; who has arrived takes the state of a replica, if there is one."""
        for unit in self.instances.graph.units:
            at = self.members.get(unit.sid)
            if unit.is_data or (at is not None and at.alive) or unit.sid in self._coming:
                continue
            if not any(newcomer.member.sid == unit.sid for newcomer in self._arrived):
                self._coming[unit.sid] = None
                self.tasks.spawn(self._bring(unit.sid))
        for newcomer in [*self._arrived]:
            (stage,) = (unit.stage for unit in self.instances.graph.units if unit.sid == newcomer.member.sid)
            if self.stages[stage]:
                source = self.members[self.stages[stage][0].sid]
                self._join(newcomer, self.step, self._copied(source.state()), source.member.sid)
        if not self._data.alive:
            self._born += 1
            self._data = SimData(Member(sid="j-data-r0", incarnation=f"d{self._born}"), self.attempt)

    def _join(self, newcomer: SimMember, version: int, state: dict[str, Tensor], source: str) -> None:
        newcomer.load(version, state, source)
        newcomer.attempt = self.attempt
        self._arrived.remove(newcomer)
        self.members[newcomer.member.sid] = newcomer

    async def _roll_back(self) -> None:
        """A stage has no member, or a leader died while all went back: all take the last checkpoint."""
        self.roll_backs += 1
        while True:
            self._replace()
            while self._coming:
                await self._turn()
            version, state = self._checkpoint
            everyone = [*(at for at in self.members.values() if at.alive), *self._arrived]
            for at in everyone:
                await self.turns()
                self._strike("restore", after=False, at=at)
                if at.alive:
                    at.load(version, self._copied(state), "the checkpoint")
                self._strike("restore", after=True, at=at)
            for newcomer in [*self._arrived]:
                if newcomer.alive:
                    self._join(newcomer, version, self._copied(state), "the checkpoint")
                else:
                    self._arrived.remove(newcomer)
            load_layers(self.reference, version, self._copied(state), "the checkpoint")
            if all(self.stages):
                break
        self.recutting.disturbed("all went back")

    async def _take_checkpoint(self) -> None:
        """One member of each stage writes its layers, by their full names; it counts once all are there."""
        state: dict[str, Tensor] = {}
        for members in self.stages:
            at = self.members[members[0].sid]
            await self.turns()
            self._strike("checkpoint", after=False, at=at)
            for _ in range(1 + self.strikes.due("restart", "checkpoint", after=self.chance.random() < 0.5)):
                state |= self._copied(at.state())
            self._strike("checkpoint", after=True, at=at)
            if not at.alive:
                return
        self._checkpoint = self.step, state

    # --- the schedule -----------------------------------------------------------------------------------
    def check(self) -> None:
        """All have the plan in force, and the bits of whoever was never disturbed."""
        graph = self.bucket.graph
        assert graph is not None
        assert graph.cuts == self.instances.graph.cuts, "the leader goes by another plan than its record's"
        expected = named_tensors(self.reference.module, self.reference.optimizer)
        assert self._data.attempt == self.attempt or not self._data.alive, (
            "samples of an attempt that is over"
        )
        for unit in graph.units:
            at = self.members.get(unit.sid)
            if at is None or not at.alive:
                continue
            module = at.layers.module
            assert at.change.plan == graph.revision, (unit.sid, at.change.plan, graph.revision)
            assert (module.first_layer, module.last_layer) == (unit.first_layer, unit.last_layer)
            assert at.layers.version == self.step
            own = named_tensors(module, at.layers.optimizer)
            wrong = [key for key, tensor in own.items() if not torch.equal(tensor, expected[key])]
            assert not wrong, (unit.sid, wrong[:3])

    @property
    def sha256(self) -> str:
        """Of what the members hold, by full names."""
        held: dict[str, Tensor] = {}
        for at in self.members.values():
            held |= at.state()
        digest = hashlib.sha256()
        for key in sorted(held):
            digest.update(key.encode())
            digest.update(held[key].detach().numpy().tobytes())
        return digest.hexdigest()

    async def run(self, recuts: int) -> None:
        """Trains `STEPS` steps, and asks for so many re-cuts on the way.

        Raises:
            AssertionError: a weight, a plan or an attempt is another than it must be.
        """
        self._lead()
        for unit in self.instances.graph.units:
            if not unit.is_data:
                member = Member(sid=unit.sid, incarnation="i0")
                self.members[unit.sid] = SimMember(self, member, self.instances.graph)
        asked = 0
        while self.step < STEPS or self.recutting.under_way or not self._is_whole:
            try:
                if not self._is_whole:
                    await self._roll_back()
                self.check()
                if self.step < STEPS:
                    await self._train()
                else:  # what is under way comes to an end
                    self.recutting.decided([], 0.1)
                if asked < recuts and self.step < STEPS and not self.recutting.under_way:
                    asked += self._ask()
                is_late = recuts - asked > STEPS - self.step - 4
                for _ in range(2000 if is_late and recuts > 1 else self.chance.randrange(400)):
                    if is_late and self.recutting.needs_rest:
                        break
                    await asyncio.sleep(0)
                await self._turn()
                await self._at_rest()
            except LeaderDied:
                await self.take_over()
            except StageGone:
                continue  # all go back
        await self._end()

    async def _end(self) -> None:
        """Whoever is missing at the last step comes, so that all weights can be compared."""
        sids = [unit.sid for unit in self.instances.graph.units if not unit.is_data]
        while not all(self.members[sid].alive for sid in sids):
            self._replace()
            await self._turn()
        await self.tasks.close()
        self.check()

    @property
    def _is_whole(self) -> bool:
        """Whether each stage has a member, and all are at the same step."""
        versions = {at.layers.version for at in self.members.values() if at.alive}
        return all(self.stages) and versions == {self.step}

    async def _train(self) -> None:
        """One step: by whoever is there; who dies before its update is missing afterwards."""
        self._replace()
        step = self.step
        for at in (*self.members.values(), self._data):
            self._strike("step", after=False, at=at)
        if not all(self.stages):
            return
        gradients = [self.gradient(name, step) for name in self.reference.summed_names]
        self.reference.redo(step, gradients, 0.01)
        for at in self.members.values():
            if at.alive:
                at.step(step)
        self.recutting.decided([], 0.1)
        for at in (*self.members.values(), self._data):
            self._strike("step", after=True, at=at)

    async def _at_rest(self) -> None:
        """What the orchestrator does at a boundary, in its order."""
        if self.chance.random() < 0.3 and all(self.stages):
            await self._take_checkpoint()
        if all(self.stages):
            await self.recutting.at_rest()

    def _ask(self) -> bool:
        first, second = sorted(self.chance.sample(range(1, LAYERS), 2))
        cuts: Cuts = ((0, first), (first, second), (second, LAYERS))
        try:
            message = RecutJob(job="j", user="rita", cuts=cuts)
            self.recutting.begin(message, recut_proposal(self.recutting.question(message, self.topology)))
        except (Conflict, BadInput):  # a member is missing, or it is cut so already
            return False
        return True
