"""A job as the user submits it (`JobSpec`), its record (`JobRecord`) and its events (`JobEvent`)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from schemas.alert import Alert
from schemas.automation import Automation, AutomationSpec, BudgetSpec, PinnedKnob
from schemas.base import CallerSpan, Message, Part, Seconds, Time, Token
from schemas.changes import JobChange, JobObjective
from schemas.fault_choices import FaultChoice
from schemas.job_file.code import CodeSpec
from schemas.job_file.data import DataSpec
from schemas.job_file.initial_weights import InitialWeightsField
from schemas.job_file.model import ModelSpec
from schemas.job_file.parallel import ParallelSpec
from schemas.job_file.plan import PlanSpec
from schemas.job_file.queue import MOST_MEMBERS, ArraySpec, Priority, QueueSpec, Values
from schemas.job_file.recovery import RecoverySpec
from schemas.job_file.requires import RequiresSpec
from schemas.job_file.training import LossScaleSpec, SampleSpec, TrainingSpec
from schemas.marks import HOLDS_URL, HOLDS_USER_VALUES, Url
from schemas.models.reference import RegisterSpec
from schemas.queue import QueueShare
from schemas.recipe_progress import RecipeProgress
from schemas.recut import RecutRecord
from schemas.routing import RoutingSpec
from schemas.serve_spec import ServeSpec, need_not_train, refuse_training, trains_or_serves
from schemas.setbacks import CodeFailure, MicrobatchFault, StepSetbacks
from schemas.stored_values import breaks_rules, read_stored
from schemas.task_graph import TaskGraph
from schemas.usage import JobUsage
from schemas.weights_digest import WeightsManifest as WeightsManifest

# What every class has of `ABCMeta`, and no instance: the job file's word hides nothing.
warnings.filterwarnings("ignore", 'Field name "register" in "JobSpec" shadows')

MOST_EVALUATED = 1 << 20
"""Most microbatches of a validation, of all its sets together: orders list each."""


class JobSpec(Part):
    """A training job, or a version of a service, as a user writes it in YAML or JSON."""

    model_config = ConfigDict(json_schema_extra=trains_or_serves)

    name: Token = Field(description="what it is called; several jobs may have the same name")
    model: ModelSpec
    code: CodeSpec | None = Field(None, description="modules that travel with the job")
    data: DataSpec = DataSpec()
    training: TrainingSpec = Field(description="required, unless there is `serve`")
    parallel: ParallelSpec = ParallelSpec()
    requires: RequiresSpec = RequiresSpec()
    plan: PlanSpec = PlanSpec()
    queue: QueueSpec = QueueSpec()
    array: ArraySpec | None = Field(None, description="many jobs of this file, submitted together")
    automation: AutomationSpec = AutomationSpec()
    recovery: RecoverySpec = RecoverySpec()
    routing: RoutingSpec = RoutingSpec()
    initial_weights: Annotated[InitialWeightsField | None, HOLDS_URL] = Field(
        None, description="folder or URL of safetensors to start from, or {url, map, strict}"
    )
    resume_from: Annotated[str | None, HOLDS_URL] = Field(
        None,
        description="URL of a checkpoint, or of a job's checkpoints, to go on from: weights, optimizer, step",
    )
    artifacts: Url = Field("bus://artifacts", description="where weights and checkpoints go")
    sample: SampleSpec | None = Field(None, description="a text that the trained model writes at the end")
    serve: ServeSpec | None = Field(None, description="its instances answer requests, and train nothing")

    @model_validator(mode="before")
    @classmethod
    def _need_not_train(cls, value: Any) -> Any:
        return need_not_train(value)

    register: RegisterSpec | None = Field(
        None, description="the version that the weights become in the registry"
    )

    @property
    def weights_url(self) -> str | None:
        """The URL of the initial weights, if the job names some."""
        return None if self.initial_weights is None else self.initial_weights.url

    @property
    def loss_scale(self) -> LossScaleSpec | None:
        """How the loss is scaled; None: it is not, as nothing is computed in fp16."""
        in_fp16 = self.training.precision == "fp16" or self.model.dtype == "float16"
        return self.training.loss_scale or (LossScaleSpec() if in_fp16 else None)

    @property
    def user_callables(self) -> tuple[str, ...]:
        """Each `module:callable` of the job that decides numbers: nodes must have the same code."""
        training = self.training
        optimizer, evaluation = training.optimizer, training.evaluation
        factories = [
            optimizer.factory,
            *(group.factory for group in optimizer.groups),
            training.schedule.factory,
        ]
        named = [self.model.factory, self.model.loss, *self.data.user_code(), *factories, *evaluation.metrics]
        return tuple(dict.fromkeys(each for each in named if each is not None and ":" in each))

    @model_validator(mode="after")
    def _sets_exist(self) -> JobSpec:
        there = self.data.evaluation_sets
        for each in self.training.evaluation.sets:
            if each.name not in there:
                found = ", ".join(there) or "none: give data.validation"
                raise ValueError(f"training.evaluation.sets: data has no set {each.name}; it has {found}")
        named = sum(each.microbatches for each in self.training.evaluation.sets)
        count = named or len(there) * self.training.validation_microbatches
        if count > MOST_EVALUATED:
            raise ValueError(
                f"a validation would have {count:,} microbatches over its sets, at most {MOST_EVALUATED:,}: "
                "lower training.validation_microbatches, or those of training.evaluation.sets"
            )
        return self

    @model_validator(mode="after")
    def _has_a_feed_that_ends(self) -> JobSpec:
        if self.ends_with_feed and self.data.arriving is None:
            raise ValueError(
                "training.until.feed: there is no feed in the order of arrival; give data.kind: feed, "
                "or until.epochs"
            )
        return self

    @property
    def ends_with_feed(self) -> bool:
        """Whether training ends with the feed whose records it takes as they arrive."""
        return self.training.until is not None and self.training.until.feed

    @model_validator(mode="after")
    def _watches_what_is_measured(self) -> JobSpec:
        """A metric without a value would end the training as one that does not improve."""
        training, evaluation = self.training, self.training.evaluation
        sets = tuple(each.name for each in evaluation.sets) or self.data.evaluation_sets
        measured = tuple(dict.fromkeys(("loss", *evaluation.metrics)))
        for place, watched in training.watched:
            of, _, metric = watched.rpartition("/")
            problem = ""
            if not sets or not (evaluation.sets or training.validation_microbatches):
                problem = "nothing is measured: give data.validation or data.validation_fraction"
            elif of and len(sets) == 1:
                problem = f"with one set its metrics bear no set's name: say {metric}"
            elif of and of not in sets:
                problem = f"the sets are {', '.join(sets)}"
            elif not any(":" in each for each in measured) and metric not in measured:
                problem = f"only {', '.join(measured)} is measured: name it in training.evaluation.metrics"
            if problem:
                raise ValueError(f"training.{place} watches {watched}, but {problem}")
        return self

    @model_validator(mode="after")
    def _one_half_precision(self) -> JobSpec:
        if (self.training.precision, self.model.dtype) in (("fp16", "bfloat16"), ("bf16", "float16")):
            raise ValueError(
                f"training.precision: {self.training.precision} computes in another type than model.dtype: "
                f"{self.model.dtype}; leave training.precision out"
            )
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> JobSpec:
        if self.training.schedule.warmup_steps > self.training.steps:
            raise ValueError("training.schedule.warmup_steps exceeds training.steps")
        return self

    @model_validator(mode="after")
    def _serves_or_trains(self) -> JobSpec:
        if self.serve is not None:
            named = {"array": self.array, "resume_from": self.resume_from}
            refuse_training({**named, "parallel.standbys": any(self.parallel.standbys_per_stage())})
        elif (within := self.parallel.replica_range) is not None and not within.min:
            raise ValueError("parallel.replicas: min 0 is for services, which start with a request: give 1")
        return self

    @model_validator(mode="after")
    def _one_beginning(self) -> JobSpec:
        if self.initial_weights is not None and self.resume_from is not None:
            raise ValueError(
                "initial_weights and resume_from exclude each other: a checkpoint has the weights, so "
                "leave initial_weights out (--set initial_weights=null)"
            )
        return self


def kept_spec(value: Any) -> JobSpec:
    """The job file of an accepted job; the rules for submitting no longer apply to it."""
    return read_stored(value, JobSpec)


def _kept_spec(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(value)
    except ValidationError as error:
        if not breaks_rules(error):
            raise
    return kept_spec(value)


KeptSpec = Annotated[JobSpec, WrapValidator(_kept_spec)]


class JobState(StrEnum):
    QUEUED = "queued"
    ANALYSING = "analysing"
    DEPLOYING = "deploying"
    RUNNING = "running"
    RECOVERING = "recovering"
    FINISHING = "finishing"
    PARKED = "parked"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_away = frozenset({JobState.PARKED, JobState.FAILED, JobState.CANCELLED})
JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.ANALYSING, JobState.RECOVERING, *_away}),
    JobState.ANALYSING: frozenset({JobState.DEPLOYING, JobState.QUEUED, *_away}),
    JobState.DEPLOYING: frozenset({JobState.RUNNING, JobState.QUEUED, JobState.RECOVERING, *_away}),
    JobState.RUNNING: frozenset({JobState.RECOVERING, JobState.FINISHING, JobState.QUEUED, *_away}),
    JobState.RECOVERING: frozenset({JobState.RUNNING, JobState.QUEUED, *_away}),
    JobState.FINISHING: frozenset({JobState.DONE, JobState.RECOVERING, JobState.QUEUED, *_away}),
    JobState.PARKED: frozenset({JobState.DEPLOYING, JobState.FAILED, JobState.CANCELLED}),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
"""Legal transitions of a job. `… → queued` is done by a new orchestrator: `recovering` if it adopts the
living instances, else the job starts again from the last checkpoint. A `parked` job has no instances and
waits at its last checkpoint, or its beginning: for room, for another mesh, or for a user (`held`). An illegal
transition raises `IllegalTransition` with the job's history."""

ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})


class StepPhases(Part):
    """The consecutive phases of a step's time, by the orchestrator's clock.

    `begin_s` lasts until the gateway has dispatched, `claims_s` until the last stage's claims are complete,
    `prepare_s` until all votes are in, `decide_s` until the decision is recorded.
    """

    begin_s: Seconds
    claims_s: Seconds
    prepare_s: Seconds
    decide_s: Seconds


class StepResult(Part):
    """One committed step. `loss` is the mean over the step's microbatches, before the update."""

    step: int = Field(ge=0, lt=1 << 63)
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    step_s: Seconds
    tokens_per_s: float
    loss_scale: float | None = Field(None, description="of a step in fp16")
    overflowed: tuple[int, ...] = Field((), description="microbatches for which the step was left out")
    attempt: int = Field(0, ge=0, lt=1 << 63)
    shares: dict[str, int] = Field({}, description="microbatches per SID in this step")
    replaced: int = Field(0, ge=0, description="samples in the place of unreadable ones")
    phases: StepPhases | None = None


class LiveInstanceView(Part):
    """An instance in the live view.

    The orchestrator leaves `service_ms` at 0; the viewer fills in the present measurement (`JobLoad`).
    """

    sid: Token
    role: str
    stage: int
    cluster: Token
    node: Token
    state: str
    device: str = "cpu"
    service_ms: float = 0.0
    standby: bool = Field(False, description="keeps up, and works when no other replica lives")


InstanceView = LiveInstanceView
"""Its former name, which goes with the next release."""


class NodeCut(Part):
    """Two nodes, each (cluster, node), that can't reach each other, and which one the job gave up."""

    kept: tuple[Token, Token]
    given_up: tuple[Token, Token]
    at: Time
    reason: str


class ArrayPlace(Part):
    """A job's place in an array: its index among `size` members, of which at most `limit` run at a time."""

    array: Token
    index: int = Field(ge=0, lt=MOST_MEMBERS)
    size: int = Field(ge=1, le=MOST_MEMBERS)
    limit: int | None = None
    values: Annotated[Values, HOLDS_USER_VALUES] = Field({}, description="what it has of its own")


class FormerShape(Part):
    """The shape that a job had before a loss that could not be staffed; it goes back to it."""

    parallel: ParallelSpec
    left_at: Time | None = Field(None, description="when it began to go back")


class JobRecord(Message, wire="job.record", version=(1, 28)):
    """The orchestrator's record of a job, as kept in the bucket `jobs` (key: job id)."""

    job: Token
    spec: KeptSpec
    state: JobState
    epoch: int = Field(0, description="how often an orchestrator has started this job; fences older ones")
    user: str = ""
    array: ArrayPlace | None = None
    guaranteed_slots: int | None = Field(
        None, ge=0, description="of its user, as the quota said when it was submitted"
    )
    queue_share: QueueShare = QueueShare()
    may_read: tuple[Url, ...] = Field((), description="what it names on the bus, as Type 3 let its user")
    command: str = Field("", description="id of the command that submitted it: repeated, it is the same job")
    correlation: str = Field("", description="of the request that submitted it; all that follows carries it")
    caller_span: CallerSpan = ""
    reason: str = ""
    submitted_at: Time
    changed_at: Time
    history: tuple[str, ...] = Field((), description="`state: reason`, oldest first, last 50")
    graph: TaskGraph | None = None
    step: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    validation_loss: float | None = None
    metrics: dict[str, float] = Field({}, description="of the last validation; of several sets `set/metric`")
    progress: RecipeProgress = RecipeProgress()
    tokens_per_s: float = 0.0
    recoveries: int = 0
    checkpoint_step: int | None = None
    weights: WeightsManifest | None = None
    exact: bool = Field(True, description="whether the weights' bits do not depend on who did what")
    inexact_because: str = ""
    bits_class: str = Field("", description="of all devices that it uses; empty: not chosen, or any")
    sample: str | None = None
    microbatch_faults: tuple[MicrobatchFault, ...] = Field((), description="what a new orchestrator inherits")
    setbacks: tuple[StepSetbacks, ...] = ()
    roll_backs: int = Field(0, description="in a row, because a step failed too often; none went further")
    replaced: int = Field(0, description="samples in the place of unreadable ones, in all steps so far")
    furthest: int = Field(0, description="steps that were ever committed, whatever was rolled back since")
    code_failures: tuple[CodeFailure, ...] = Field(
        (), description="those that `recovery` counts, oldest first"
    )
    changes: tuple[JobChange, ...] = Field(
        (), description="that altered its speed, the last 16; and of routes 8"
    )
    automation: Automation | None = Field(None, description="as a person switched it; none: as its file says")
    objective: JobObjective | None = Field(None, description="likewise")
    budget: BudgetSpec | None = Field(None, description="likewise, with all its limits")
    priority: Priority | None = Field(None, description="likewise, of the queue")
    pins: tuple[PinnedKnob, ...] = Field((), description="what persons have set and not released")
    recuts: tuple[RecutRecord, ...] = Field((), description="of its layers while it trained, the last 16")
    fault_choices: tuple[FaultChoice, ...] = Field(
        (), description="what was done about faults that modules were asked about, the last 16"
    )
    former_shape: FormerShape | None = Field(
        None, description="of one that has fewer stages, or parks, because a loss could not be staffed"
    )
    cuts: tuple[NodeCut, ...] = Field((), description="cuts between nodes that the job met, oldest first")
    alerts: tuple[Alert, ...] = Field((), description="those that are not over; `step` says since when")
    ends_as: JobState | None = Field(
        None, description="how it ends, once that is certain: then it is cleaned up"
    )
    ends_because: str = ""
    held: str = Field("", description="by whom it was parked, and why; it waits until it is resumed")
    dormant: bool = Field(False, description="parked because nobody asks it; the next request resumes it")
    usage: JobUsage = JobUsage()
    resumed_held_s: float = Field(0.0, ge=0, description="of `usage`, before a person last resumed it")

    @model_validator(mode="before")
    @classmethod
    def _moves_of_former_versions(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or "moves" not in value:
            return value
        return {"changes" if key == "moves" else key: item for key, item in value.items()}

    @property
    def automated(self) -> Automation:
        """How far the job lets itself be changed; the mesh's mode may be lower."""
        return self.automation or Automation(self.spec.automation.mode)

    @property
    def objective_in_force(self) -> JobObjective:
        """What is to be small of the job."""
        return self.objective or JobObjective(self.spec.automation.objective)

    @property
    def budget_in_force(self) -> BudgetSpec:
        """The most that the job may use."""
        return self.spec.automation.budget if self.budget is None else self.budget

    @property
    def priority_in_force(self) -> int:
        """The job's class in the queue."""
        return self.spec.queue.priority if self.priority is None else self.priority

    @property
    def last_step(self) -> int:
        """The step before which training ends, as far as that is certain."""
        steps, stopped_at = self.spec.training.steps, self.progress.stopped_at
        return steps if stopped_at is None else min(steps, stopped_at)


class JobEvent(Message, wire="job.event", version=(1, 9)):
    """An event of a job, in order on the stream `JOBS`. The live view and the loss curve read it."""

    job: Token
    kind: Literal[
        "state",
        "instances",
        "step",
        "validation",
        "checkpoint",
        "fault",
        "recovery",
        "policy",
        "weights",
        "sample",
        "skipped",
        "change",
        "recut",
        "fault_choice",
        "alert",
    ]
    at: Time
    text: str = ""
    warning: bool = Field(False, description="a `fault` by which nothing is lost")
    state: JobState | None = None
    total_steps: int | None = None
    result: StepResult | None = None
    instances: tuple[LiveInstanceView, ...] | None = None
    plan_s: Seconds | None = None
    skipped_step: int | None = None
    change: JobChange | None = None
    recut: RecutRecord | None = None
    fault_choice: FaultChoice | None = None
    alert: Alert | None = None
    validation_step: int | None = None
    validation_loss: float | None = None
    metrics: dict[str, float] = {}
    weights: WeightsManifest | None = None
    sample: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _moves_of_former_versions(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or value.get("kind") != "rebalancing":
            return value
        return {"change" if key == "move" else key: item for key, item in value.items()} | {"kind": "change"}
