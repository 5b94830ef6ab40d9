"""One job in `dmsc.simulation`, as a module hears of it: samples, steps, and a free slot if there is one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.outcome_training.disturbances import STEPS, DisturbedJob
from bus import subjects
from bus.subject_row import Subject
from dmsc.simulation.membership import StepDone
from dmsc.simulation.scenarios.scenario import Migration
from dmsc.simulation.world import World
from policies.kit.engine import Event
from schemas.base import Message
from schemas.envelope import EntityKind
from schemas.job import JobEvent, JobState, StepResult
from schemas.registry import Capability, Endpoint, InstanceState, ServiceRecord
from schemas.signals import RouteAdvertisement
from schemas.telemetry import InstanceSample

SPARE = "agent-a-spare"

Hears = Callable[[Event], None]


class SimulatedMesh:
    """Runs one disturbed job; `hears` gets every message with the virtual time at which it was sent.

    Args:
        disturbed: the job.
        hears: what listens; None: nobody.
        changes: instances that leave, and when.
    """

    def __init__(
        self, disturbed: DisturbedJob, hears: Hears | None = None, changes: Iterable[Migration] = ()
    ) -> None:
        scenario = disturbed.scenario.model_copy(update={"events": (*disturbed.scenario.events, *changes)})
        self.world = World(scenario, scenario.seed, Path("."))
        (self.job,) = self.world.jobs.values()
        self._hears = hears
        self.stepped_at: list[float] = []
        self.steps: list[StepResult] = []
        self.newcomers: dict[tuple[str, str], float] = {}
        """SID and incarnation → when its first microbatch was seen, of those that were not there at first."""
        self._first = {(member.sid, member.incarnation) for member in self.job.instances}
        if hears is not None:
            self._say(subjects.JOB_EVENT, self._event("state", state=JobState.RUNNING, total_steps=STEPS))
            if disturbed.room:
                self._say(subjects.ADVERTISEMENT, _spare_slot())
        self.job.watcher = self

    def run(self) -> None:
        self.world.run()

    @property
    def now(self) -> float:
        return self.job.kernel.now

    def done_until(self, at_s: float) -> float:
        """Steps until a moment, with the part of the one that is under way."""
        number = bisect_right(self.stepped_at, at_s)
        if not 0 < number < len(self.stepped_at):
            return float(number)
        last, following = self.stepped_at[number - 1], self.stepped_at[number]
        return number + (at_s - last) / (following - last)

    # --- as a watcher of the job ------------------------------------------------------------------------
    def sampled(self, samples: Sequence[InstanceSample]) -> None:
        for sample in samples:
            who = sample.sid, sample.incarnation
            if sample.microbatches and self.stepped_at and who not in self._first:
                self.newcomers.setdefault(who, self.now)
            elif not self.stepped_at:
                self._first.add(who)
            self._say(subjects.INSTANCE_SAMPLE, sample)

    def stepped(self, done: StepDone, shares: Mapping[str, int]) -> None:
        result = StepResult(
            step=done.step,
            loss=0.0,
            gradient_norm=0.0,
            learning_rate=0.0,
            tokens=0,
            step_s=done.ended_s - done.began_s,
            tokens_per_s=0.0,
            shares=dict(shares),
        )
        self.stepped_at.append(done.ended_s)
        self.steps.append(result)
        self._say(subjects.JOB_EVENT, self._event("step", result=result))

    def _event(self, kind: str, **fields: object) -> JobEvent:
        return JobEvent.model_validate({"job": "j", "kind": kind, "at": self.now, **fields})

    def _say(self, row: Subject, message: Message) -> None:
        if self._hears is not None:
            self._hears(Event(row=row, message=message, id="", at=self.now))


def _spare_slot() -> RouteAdvertisement:
    """A node with room, as the registry advertises its agent."""
    agent = ServiceRecord(
        sid=SPARE,
        prefix="entity/cluster/a",
        kind=EntityKind.CLUSTER,
        incarnation="1",
        state=InstanceState.ACTIVE,
        endpoint=Endpoint(cluster="a", node="spare"),
        capability=Capability(slots=1),
    )
    return RouteAdvertisement(revision=1, previous=0, changed=(agent,))
