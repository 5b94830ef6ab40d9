"""What a policy sees of a job: its instances, measurements, the policy's own suggestions and their decisions.

`Observations` takes every received message and keeps a `JobView` per live job. It has no clock and no I/O:
the live module, a rebuild after a crash and a replay of a recorded run feed it the same messages in the same
order and so get the same views.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from policies.numerics.features import Floats, Panel
from schemas.actions import Migrate, knob_of
from schemas.base import Message
from schemas.data_plane import MicrobatchNotice
from schemas.envelope import EntityKind
from schemas.fault_choices import FaultQuestion
from schemas.job import ENDED, JobEvent, JobRecord, JobState
from schemas.names import agent_name
from schemas.observation import Observation
from schemas.policy import (
    Detour,
    ExpectFailures,
    MoveInstance,
    NoAction,
    PolicyDecision,
    PolicySuggestion,
    SetWeights,
)
from schemas.registry import InstanceState, ServiceRecord
from schemas.services.outcomes import ServiceOutcomes
from schemas.signals import ComputeNotification, QosReport, RouteAdvertisement
from schemas.step import MicrobatchClaim
from schemas.task_graph import JobTopology, TaskGraph, is_data
from schemas.telemetry import InstanceSample, NodeSample

FIELDS = (
    "service_ms",
    "forward_ms",
    "backward_ms",
    "queue",
    "in_flight",
    "busy",
    "tokens_per_s",
    "reduce_ms",
    "microbatches",
)
"""Columns of the sliding windows, as named in `InstanceSample`."""

_row = attrgetter(*FIELDS)

WINDOW = 64
"""Samples kept per instance; at one a second and one after each step that is 20 to 60 s."""

OBSERVED_KEPT = 4096
"""Most outside observations that one view keeps, each the last of its source, what and about."""

OCCUPY = frozenset({InstanceState.PENDING, InstanceState.ACTIVE, InstanceState.DRAINING})
"""States of an instance that has its slot."""

ENDED_KEPT = 1024
"""Most ended jobs remembered, so that a late sample does not bring one back."""


@dataclass(slots=True)
class InstanceView:
    """The last state of one instance of the job. `state` is None until the registry has reported it."""

    sid: str
    stage: int
    cluster: str
    node: str
    incarnation: str
    state: InstanceState | None = None
    sample: InstanceSample | None = None
    sampled_at: float = float("-inf")
    samples: int = 0
    weight: float = 1.0
    """Its weight at the routers (Type 4), if the policy subscribes to that; 0: no work, like a standby."""
    fenced: set[str] = field(default_factory=set, repr=False)

    @property
    def usable(self) -> bool:
        """Whether it may be named in a suggestion: active, or not known to be anything else."""
        return self.state in (None, InstanceState.ACTIVE)

    @property
    def service_ms(self) -> float:
        """Milliseconds of compute per microbatch as last reported; 0 until measured."""
        return 0.0 if self.sample is None else self.sample.service_ms


@dataclass(slots=True)
class OwnSuggestion:
    """A suggestion of this module, and the decision on it."""

    at: float
    id: str
    suggestion: PolicySuggestion
    decision: PolicyDecision | None = None

    @property
    def declined(self) -> bool:
        return self.decision is not None and not self.decision.adopted

    @property
    def weights(self) -> dict[str, float]:
        """The suggested weights of a stage, unless declined; an instance that is not named has weight 1."""
        action = self.suggestion.action
        return action.weights if isinstance(action, SetWeights) and not self.declined else {}


class JobView:
    """One job as a policy reads it. Read it, never write to it."""

    def __init__(self, job: str, records: Callable[[], Mapping[str, ServiceRecord]] = dict) -> None:
        self.job = job
        self._records = records
        self.state: JobState | None = None
        self.step = 0
        self.total_steps = 0
        """Steps of the whole job; 0 until an event has named them."""
        self.instances: dict[str, InstanceView] = {}
        self._by_stage: dict[int, list[InstanceView]] | None = None
        self.qos: dict[str, QosReport] = {}
        self.own: dict[str, OwnSuggestion] = {}
        self.decisions: deque[PolicyDecision] = deque(maxlen=64)
        self.events: deque[JobEvent] = deque(maxlen=64)
        self.faults: deque[FaultQuestion] = deque(maxlen=64)
        """Faults that modules were asked about, if the policy has `on_fault`."""
        self.owners: dict[tuple[int, int], str] = {}
        self.panel = Panel(FIELDS, WINDOW)
        self.algorithms: dict[int, str] = {}
        """Stage → the routing algorithm among its instances, from the routers (Type 4)."""
        self.graph: TaskGraph | None = None
        """The dependency topology: units, edges with bytes per microbatch, places; None until known."""
        self.observed: dict[tuple[str, str, str], Observation] = {}
        """(source, what, about) → the last outside observation of this job or of all jobs, if the policy
        subscribes to those."""

    def __repr__(self) -> str:
        return f"JobView({self.job!r}, step={self.step}, instances={sorted(self.instances)})"

    @property
    def stages(self) -> list[int]:
        """Model stages with an instance, in order; the data unit (-1) is not one of them."""
        return [stage for stage in sorted(self._in_order()) if not is_data(stage)]

    def put(self, instance: InstanceView) -> None:
        """Adds a new instance, or a new incarnation of one. For the owner of the view, not for policies."""
        self.instances[instance.sid] = instance
        self._by_stage = None

    def _in_order(self) -> dict[int, list[InstanceView]]:
        """The instances of each stage by SID; sorted once until `put` adds one."""
        if self._by_stage is None:
            self._by_stage = {}
            for _, instance in sorted(self.instances.items()):
                self._by_stage.setdefault(instance.stage, []).append(instance)
        return self._by_stage

    def stage(
        self, stage: int, now: float | None = None, *, fresh_s: float = 15.0, samples: int = 0
    ) -> list[InstanceView]:
        """The usable instances of a stage by SID.

        Args:
            stage: Number of the stage; -1 is the data unit.
            now: If given, only instances sampled in the last `fresh_s` seconds.
            fresh_s: Seconds.
            samples: Only instances with at least this many measured samples (service time above 0).
        """
        return [
            instance
            for instance in self._in_order().get(stage, ())
            if instance.usable
            and instance.samples >= samples
            and (now is None or now - instance.sampled_at <= fresh_s)
        ]

    def series(self, name: str, sids: list[str]) -> Floats:
        """Sliding windows of one of `FIELDS`, shape `(sids, WINDOW)`, oldest first, NaN where unknown."""
        return self.panel.window(name, sids)

    def mean(self, name: str, sids: list[str], half_life_s: float = 10.0) -> Floats:
        """Exponentially weighted mean of one of `FIELDS` per instance, shape `(sids,)`."""
        return self.panel.ewma(name, sids, half_life_s)

    def is_due(self, topic: str, now: float, every_s: float) -> bool:
        """Whether this module suggested nothing on this topic in the last `every_s` seconds."""
        own = self.own.get(topic)
        return own is None or now - own.at >= every_s

    def record(self, sid: str) -> ServiceRecord | None:
        """The registration of any service of the mesh, as last heard of."""
        return self._records().get(sid)

    def free_slots(self) -> dict[str, int]:
        """Agent's SID → slots of its node in which the registry shows nobody; nodes without any are left out.

        Slots that the orchestrator keeps for somebody count as free: it declines what needs them.
        """
        agents: dict[tuple[str, str], ServiceRecord] = {}
        taken: Counter[tuple[str, str]] = Counter()
        for record in self._records().values():
            place = record.endpoint.cluster, record.endpoint.node
            if record.kind is EntityKind.CLUSTER and record.state is InstanceState.ACTIVE:
                agents[place] = record
            elif record.kind is EntityKind.INSTANCE and record.state in OCCUPY:
                taken[place] += record.stage is not None and not is_data(record.stage)
        free = {agent.sid: agent.capability.slots - taken[place] for place, agent in agents.items()}
        return {sid: count for sid, count in sorted(free.items()) if count > 0}

    def claims(self, step: int) -> dict[str, int]:
        """Microbatches claimed per SID in the running step (only if the policy subscribes to claims)."""
        counts: dict[str, int] = {}
        if step == self.step:
            for sid in self.owners.values():
                counts[sid] = counts.get(sid, 0) + 1
        return counts


def topic(suggestion: PolicySuggestion) -> str:
    """The topic of a suggestion, by which a later one replaces it: `stage 1`, `instance x`, `move`."""
    match suggestion.action:
        case SetWeights(stage=stage):
            return f"stage {stage}"
        case Detour(sid=sid):
            return f"instance {sid}"
        case ExpectFailures():
            return "failures"
        case MoveInstance() | Migrate():
            return "move"
        case NoAction():
            return "note"
        case action:
            return knob_of(action) or action.action


class Observations:
    """All messages seen so far, as one view per job. `take` is the only way in."""

    def __init__(self, jobs: tuple[str, ...] = ()) -> None:
        self.only = frozenset(jobs)
        """The watched jobs; empty: all."""
        self.jobs: dict[str, JobView] = {}
        self.nodes: dict[str, NodeSample] = {}
        self.records: dict[str, ServiceRecord] = {}
        self._for_all_jobs: dict[tuple[str, str, str], Observation] = {}
        self._ended: dict[str, None] = {}

    def admit(self, job: str) -> None:
        """Watches this job as well."""
        if self.only:
            self.only |= {job}

    def take(self, message: Message, at: float, *, id: str = "") -> JobView | None:
        """Adds one message; returns the changed view, if the message was about one job.

        `id` is the message's envelope id, to which decisions on own suggestions refer.
        """
        match message:
            case InstanceSample():
                return self._sample(message, at)
            case MicrobatchClaim() | MicrobatchNotice():
                return self._progress(message)
            case RouteAdvertisement():
                self._advertisement(message)
            case JobEvent():
                return self._event(message)
            case PolicyDecision():
                return self._decision(message)
            case PolicySuggestion():
                view = self.view(message.job)
                if view is not None:
                    # The orchestrator may answer before the suggestion is recorded here.
                    answers = [decision for decision in view.decisions if decision.suggestion == id]
                    view.own[topic(message)] = OwnSuggestion(at, id, message, *answers[-1:])
                return view
            case QosReport():
                views = self.jobs.values() if message.job is None else filter(None, [self.view(message.job)])
                for view in views:
                    view.qos[message.sid] = message
            case ComputeNotification():
                for entry in message.entries:
                    job_view = self.jobs.get(entry.job)
                    if job_view is not None and entry.sid in job_view.instances:
                        job_view.instances[entry.sid].state = entry.state
                        job_view.instances[entry.sid].weight = entry.weight
                for load in message.stages:
                    if load.job in self.jobs:
                        self.jobs[load.job].algorithms[load.stage] = load.algorithm
            case JobTopology():
                view = self.view(message.job)
                if view is not None:
                    view.graph = message.graph
                return view
            case JobRecord():
                return self._known_job(message)
            case Observation():
                return self._observation(message)
            case FaultQuestion():
                view = self.view(message.job)
                if view is not None:
                    view.faults.append(message)
                return view
            case ServiceOutcomes():
                for job in message.candidate_jobs:
                    self.view(job)
            case NodeSample():
                self.nodes[agent_name(message.cluster, message.node)] = message
        return None

    def view(self, job: str) -> JobView | None:
        """The job's view, made at its first message; None if the job has ended or is not watched."""
        if job in self._ended or (self.only and job not in self.only):
            return None
        view = self.jobs.get(job)
        if view is None:
            view = self.jobs[job] = JobView(job, lambda: self.records)
            view.observed.update(self._for_all_jobs)
            for record in self.records.values():
                self._record(record)
        return view

    def _observation(self, observation: Observation) -> JobView | None:
        key = (observation.source, observation.what, observation.about or "")
        if observation.job is not None:
            view = self.view(observation.job)
            if view is not None:
                _remember(view.observed, key, observation)
            return view
        _remember(self._for_all_jobs, key, observation)
        for view in self.jobs.values():
            _remember(view.observed, key, observation)
        return None

    def _sample(self, sample: InstanceSample, at: float) -> JobView | None:
        view = self.view(sample.job)
        if view is None:
            return None
        instance = self._instance(
            view, sample.sid, sample.stage, sample.cluster, sample.node, sample.incarnation
        )
        if instance is None:
            return None
        instance.sample, instance.sampled_at = sample, at
        view.step = max(view.step, sample.step)
        if sample.service_ms > 0:
            instance.samples += 1
            view.panel.push(sample.sid, at, _row(sample))
        return view

    def _progress(self, message: MicrobatchClaim | MicrobatchNotice) -> JobView | None:
        view = self.view(message.job)
        if view is None or message.evaluate or message.step < view.step:
            return view
        if message.step > view.step:
            view.step = message.step
            view.owners.clear()
        if isinstance(message, MicrobatchClaim):
            view.owners[(message.stage, message.microbatch)] = message.owner.sid
        return view

    def _advertisement(self, advertisement: RouteAdvertisement) -> None:
        changed = {record.sid: record for record in advertisement.changed}
        gone = set(advertisement.removed)
        if advertisement.full:
            gone |= self.records.keys() - changed.keys()
            self.records = {}
        for sid in gone:
            self.records.pop(sid, None)
            for view in self.jobs.values():
                if sid in view.instances:
                    view.instances[sid].state = InstanceState.GONE
        self.records.update(changed)
        for record in changed.values():
            self._record(record)

    def _record(self, record: ServiceRecord) -> None:
        view = self.jobs.get(record.job) if record.job is not None else None
        if view is None or record.stage is None:
            return
        instance = self._instance(
            view, record.sid, record.stage, record.endpoint.cluster, record.endpoint.node, record.incarnation
        )
        if instance is not None:
            instance.state = record.state

    def _instance(
        self, view: JobView, sid: str, stage: int, cluster: str, node: str, incarnation: str
    ) -> InstanceView | None:
        """The view of this incarnation, made if it is new; None if a later one has replaced it."""
        present = view.instances.get(sid)
        if present is not None and present.incarnation == incarnation:
            return present
        if present is not None and incarnation in present.fenced:
            return None
        # Another incarnation is another process: measurements of the old one do not apply to it.
        fenced = set() if present is None else {*present.fenced, present.incarnation}
        view.panel.drop(sid)
        new = InstanceView(sid, stage, cluster, node, incarnation, fenced=fenced)
        view.put(new)
        record = self.records.get(sid)
        if record is not None and record.incarnation == incarnation:
            new.state = record.state
        return new

    def _event(self, event: JobEvent) -> JobView | None:
        view = self.view(event.job)
        if view is None:
            return None
        view.events.append(event)
        view.state = event.state or view.state
        view.total_steps = event.total_steps or view.total_steps
        if event.result is not None:
            view.step = max(view.step, event.result.step)
        if view.state in ENDED:
            self._end(event.job)
        return view

    def _known_job(self, record: JobRecord) -> JobView | None:
        """Adds a job's record from the bucket when the module starts; events that came since are newer."""
        if record.state in ENDED:
            self._end(record.job)
            return None
        view = self.view(record.job)
        if view is not None:
            view.state = view.state or record.state
            view.total_steps = view.total_steps or record.spec.training.steps
            view.step = max(view.step, record.step)
            view.graph = view.graph or record.graph
        return view

    def _end(self, job: str) -> None:
        self.jobs.pop(job, None)
        self._ended[job] = None
        while len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def _decision(self, decision: PolicyDecision) -> JobView | None:
        view = self.view(decision.job)
        if view is None:
            return None
        view.decisions.append(decision)
        for own in view.own.values():
            if own.id == decision.suggestion:
                own.decision = decision
        return view


def _remember(
    observed: dict[tuple[str, str, str], Observation], key: tuple[str, str, str], observation: Observation
) -> None:
    """Adds the observation as the last one; drops the oldest beyond `OBSERVED_KEPT`."""
    observed.pop(key, None)
    observed[key] = observation
    while len(observed) > OBSERVED_KEPT:
        del observed[next(iter(observed))]
