"""`JobContext`: what the parts of one job's run share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bus.connection import Bus
from entities.orchestrator.job_state.decision_record import DecisionRecord
from entities.orchestrator.job_state.event_writer import EventWriter
from entities.orchestrator.job_state.guarded_tasks import GuardedTasks
from entities.orchestrator.job_state.ingress_gateway import IngressGateway
from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.job_state.job_faults import JobFaults
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.job_state.policy_distribution import PolicyDistribution
from entities.orchestrator.job_state.quarantine import Quarantine
from entities.orchestrator.job_state.retry_limits import RetryLimits
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.eligible_slots import eligible, query_of
from entities.orchestrator.planning.plan_rules import open_to
from entities.orchestrator.queue.job_queue import JobQueue
from entities.planner.planning_process import PlanningConfig
from schemas.cluster import NodeStatus
from schemas.fault_choices import FaultQuestion, FaultRuling
from schemas.job import JobSpec
from schemas.step import MicrobatchClaim

Claims = dict[str, Callable[[MicrobatchClaim], None]]
"""What takes the claims of the open step, by job; a job without a step loop has no entry."""

AskModules = Callable[[str, Callable[[], FaultQuestion], Mapping[str, str]], Awaitable[FaultRuling | None]]
"""(job, what makes the question, modules that are distrusted and why) → the ruling; None: nobody answers."""


async def nobody_answers(
    job: str, question_of: Callable[[], FaultQuestion], distrusted: Mapping[str, str]
) -> None:
    """A mesh without modules that answer about faults."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Deadlines and pauses of the step transaction, in seconds during which the bus is heard."""

    begin_s: float = 5.0
    """Longer than a gateway takes to restart; after it another gateway dispatches."""
    fence_s: float = 20.0
    abort_s: float = 20.0
    assign_s: float = 20.0
    group_s: float = 20.0
    prepare_s: float = 30.0
    """Counts from the last progress of the computation, as `commit_s` does, and of reaching peers."""
    commit_s: float = 30.0
    state_s: float = 120.0
    """Longest time without progress of a transfer of a small state. A large state gets more time, because it
    may be a single tensor (`JobInstances.patience_s`)."""
    follow_s: float = 30.0
    """An instance that a newcomer follows answers every 10 s, however far the newcomer is."""
    last_redo_s: float = 5.0
    """How long a stage waits for a newcomer's last redo, if its state is small."""
    last_redo_part: float = 0.25
    """For a large state, the part of the time of a whole transfer that is added to that."""
    repeat_s: float = 0.2
    """Pause before an order is repeated that failed although no member is to blame."""
    quiet_s: float = 1.0
    """Time without a claim after which instances are asked what they hold."""
    stall_s: float = 30.0
    """After max(this, 10 × the time of a way through the pipeline) without progress the step begins again."""
    status_s: float = 2.0


@dataclass(frozen=True, kw_only=True)
class RecoveryTimes:
    """Deadlines and pauses of what finds, starts and ends members, in seconds."""

    parked_after_s: float = 10.0
    """How long a stage without members waits for room, in time during which the bus is heard
    (`bus.nats.liveness`). A node that restarts is back sooner; a longer wait would keep the slots of all
    other stages from other jobs."""
    look_s: float = 0.2
    stop_s: float = 3.0
    start_retry_s: float = 0.5
    """First pause before a failed start is tried again; it doubles with each failure in a row."""
    start_retry_most_s: float = 30.0
    last_words_s: float = 1.0
    """How long to wait until the registry says how a lost instance ended; mostly it says so already."""
    free_s: float = 3.0
    """How long to wait for the agent to say that a slot is free, before another one is looked for."""
    agent_s: float = 3.0
    """Deadline of a question to a node's agent, which answers in milliseconds."""
    copy_order_s: float = 5.0
    copy_status_s: float = 1.0
    """A living instance answers within milliseconds, whatever it computes."""
    copy_search_s: float = 1.0
    """How long to repeat the search for a copy of the open step: its last redo may still be arriving."""
    copy_search_pause_s: float = 0.1
    copy_send_s: float = 120.0
    wait_most_s: float = 30.0
    """The longest time for which a module may have a replacement held, whatever a loss costs."""
    loss_s: float = 10.0
    """What a loss is taken to cost before the job has measured one: bounds such waits till then."""
    asked_again_s: float = 5.0
    """Modules are asked about the same fault of an instance at most so often."""
    given_up_again_s: float = 60.0
    """Pause between two working instances of a job that are given up because a module says so."""


@dataclass(frozen=True, kw_only=True)
class CheckpointTimes:
    """Deadlines of checkpoints, in seconds."""

    take_s: float = 60.0
    """Deadline of copying a small stage's state, which runs at gigabytes a second."""
    end_s: float = 120.0
    """How long the end of a job waits for a checkpoint that is being written, if its stages are small. Large
    ones get more time (`JobInstances.patience_s`)."""
    publish_s: float = 90.0
    """Deadline of an instance that writes a file; it gives up sooner."""
    remove_s: float = 150.0
    """Deadline of a node that removes files; it gives up sooner."""
    waited_s: float = 10.0
    """A job that has waited for records so long gets a checkpoint of its step: it may wait for days, and what
    dies meanwhile must not cost steps. Longer loses more, shorter writes more in short pauses of a feed."""
    waited_share: float = 0.05
    """The most that such a checkpoint may cost of the wait before it: the wait is at least cost ÷ share."""


@dataclass(frozen=True, kw_only=True)
class RecutTimes:
    """Deadlines of a re-cut's orders, in seconds; where nothing is said, more for large states."""

    build_s: float = 120.0
    """Building a stage beside the present one."""
    send_s: float = 30.0
    """An instance that others follow answers every 10 s, however far they are."""
    fill_s: float = 30.0
    """Training rests meanwhile; an instance gives up sooner, and then nothing has changed."""
    switch_s: float = 20.0
    """What is not there by then is fenced: the plan is in force."""
    drop_s: float = 5.0
    left_s: float = 5.0
    """A job that is to have fewer stages: for the slots that it has just left to be free."""
    look_s: float = 5.0
    """One that may have its former number of stages again: pause before it is looked at again."""
    usual_cost_s: float = 10.0
    """What that costs, as long as the job's own change of stages has not been measured."""


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """Deadlines and pauses of a job's run outside its steps, in seconds."""

    analysis_repeat_s: float = 30.0
    """Pause before the order is repeated: an agent that was restarted does not know of the analysis. An agent
    that is working on it ignores the repetition; it ends a worker without progress, and sets no other
    limit."""
    analysis_asked_s: float = 10.0
    """A command about a running job waits so long for its model: less than a gateway waits for the answer."""
    analysis_accept_s: float = 20.0
    """A living agent takes an order within milliseconds; after this time (while the bus is heard) the next
    agent is asked."""
    sample_s: float = 90.0
    """How long a text sample of a small model may take. A large one gets more time (SLOWEST_BYTES_PER_S); a
    worker that makes no progress is ended before."""
    deploy_pause_s: float = 0.1
    """Pause before a deployment that a node's death broke is planned again; it doubles each time."""
    deploy_pause_most_s: float = 10.0
    search_again_s: float = 60.0
    """Pause before a waiting job searches for a plan again, after a search that was late or failed."""
    adopt_s: float = 3.0
    """A living instance answers within milliseconds, whatever it computes."""
    restore_pause_s: float = 0.5
    """First pause before a store that did not answer is asked again."""
    restore_pause_most_s: float = 5.0
    rest_s: float = 20.0
    """How long the open step and the checkpoint after it may take when the job is to be parked."""
    order_kept_s: float = 5.0
    """How long to wait until the bus has written a person's order: its disk may be full. This is shorter
    than a gateway waits for the answer; the record is written as soon as there is room."""
    reported_s: float = 2.0
    """How long MG and SR have to report a failure that the registry knows; then it is taken up without."""
    clean_up_s: float = 3.0
    """A whole mesh may be stopping: then nobody is left who would answer."""
    termination_s: float = 5.0
    answer_s: float = 10.0
    """How long to wait for an answer of the registry or an agent, in time during which the bus is heard."""
    agents_back_s: float = 12.0
    """How long a restarted orchestrator waits for the agents of a job; they register again every 5 s."""


@dataclass(frozen=True, kw_only=True)
class JobTimes:
    """Deadlines and pauses of a job's parts."""

    steps: StepTimes = StepTimes()
    recovery: RecoveryTimes = RecoveryTimes()
    checkpoints: CheckpointTimes = CheckpointTimes()
    recut: RecutTimes = RecutTimes()
    run: RunTimes = RunTimes()


@dataclass(kw_only=True)
class JobContext:
    """One run of one job, in one epoch. It holds references and does nothing.

    `spec` changes by `settle`: an analysis has told what the job left open, or a person gives it a shape.
    """

    bus: Bus
    mesh: MeshView
    name: str
    spec: JobSpec
    epoch: int
    store: JobStore
    instances: JobInstances
    policies: PolicyDistribution
    gateway: IngressGateway
    decisions: DecisionRecord
    events: EventWriter
    tasks: GuardedTasks
    """Tasks of the training; a failure of one reaches whoever waits with `unless_failed`."""
    faults: JobFaults
    quarantine: Quarantine
    retry_limits: RetryLimits
    queue: JobQueue
    """Where the job waits for its slots; it knows what other jobs hold."""
    claims: Claims
    """The term's; the job's step loop enters itself."""
    ask_modules: AskModules = nobody_answers
    """Asks the term's modules about a fault at hand."""
    times: JobTimes = JobTimes()
    planning: PlanningConfig = field(default_factory=PlanningConfig)

    def eligible_nodes(self, among: Sequence[NodeStatus] | None = None) -> list[NodeStatus]:
        """The nodes with the slots that the job may use: one class of bits, once it was planned.

        `among`: of these; None: of all.
        """
        query = query_of(self.spec, self.store.record.bits_class)
        nodes = self.mesh.open_nodes() if among is None else among
        return open_to(self.spec, eligible(nodes, query, self.mesh.records))


async def settle(job: JobContext, spec: JobSpec, **figures: Any) -> None:
    """From now on this is the job, for instances that start and for whoever goes on with it.

    `figures`: fields of its record that change with it.
    """
    job.spec = spec
    job.instances.settle(spec)
    await job.store.note(now=True, spec=spec, **figures)


def why_not_eligible(job: JobContext) -> str:
    """What other slots lack for a job, in words."""
    bits_class = job.store.record.bits_class
    if job.spec.requires.bits == "same" and bits_class:
        return f"not with the bits of {bits_class}, in which the job was begun"
    return "not with what the job requires"
