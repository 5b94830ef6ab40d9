"""The gateway's APIs: requests of clients over NATS and (as JSON) over HTTP, and commands of MG to SMO."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from schemas.alert import Alert
from schemas.automation import LIMITS, Automation
from schemas.base import CallerSpan, Message, Part, Token
from schemas.changes import JobObjective
from schemas.cluster import Cordon, NodeStatus
from schemas.fault import FaultRecord
from schemas.job import JobRecord, JobSpec
from schemas.job_file.parallel import MOST_INSTANCES, MOST_STAGES
from schemas.job_file.queue import Priority
from schemas.marks import HOLDS_USER_VALUES, Secret, Url
from schemas.module_status import OrderBody, QuestionBody
from schemas.observation import Observation
from schemas.plans import PlanBody
from schemas.quota import Quota
from schemas.recut import MOST_PLAN_TEXT, MOST_REVISION
from schemas.registry import ServiceRecord
from schemas.signals import ComputeEntry, QosReport, Role
from schemas.unreadable import UnreadableNote


class DoorRequest(Message, wire="door.request", version=(1, 5)):
    """A client's request over NATS, with the fields that its action needs."""

    token: Secret
    action: str = Field(
        description="job.submit | job.list | job.read | job.cancel | job.park | job.resume | "
        "job.prioritise | job.recut | mesh.read | plan.make | policy.list | policy.order | policy.ask | "
        "policy.automation | observation.write"
    )
    job: Token | None = None
    spec: JobSpec | None = None
    module: Token | None = None
    order: OrderBody | None = None
    question: QuestionBody | None = Field(None, description="for policy.ask")
    observations: tuple[Observation, ...] = Field((), max_length=1000)
    mode: Automation | None = Field(None, description="for policy.automation: switch to it")
    objective: JobObjective | None = Field(None, description="for policy.automation, of a job: switch to it")
    budget: str | None = Field(
        None,
        max_length=200,
        pattern=LIMITS,
        description="for policy.automation, of a job: limits to set, as `cost=12,energy=none`",
    )
    priority: Priority | None = Field(None, description="for job.prioritise: the new class")
    plan: str | None = Field(
        None, max_length=MOST_PLAN_TEXT, description="for job.recut, as at HTTP; none: the planner chooses"
    )
    revision: int | None = Field(
        None, ge=0, le=MOST_REVISION, description="for job.recut, of the plan that was seen"
    )
    dry_run: bool = Field(False, description="for job.recut: it changes nothing")
    plan_body: PlanBody | None = Field(None, description="for plan.make, as POST /v1/plans takes it")


DOOR_KEY = "door.key"
"""The action that needs no token: it returns the key to which tokens for this API are sealed."""


class DoorKey(Message, wire="door.key"):
    """The gateways' public key (`bus.security.sealing`), hexadecimal.

    Empty on a bus without a guard, where nothing is sealed.
    """

    key: str


class SubmitJob(Message, wire="job.submit", version=(1, 6)):
    """MG → SMO, after Type 3: queue this job."""

    spec: JobSpec
    user: str
    gateway: Token
    caller_span: CallerSpan = ""
    quota: Quota | None = Field(None, description="the user's, as Type 3 told it")
    may_read: tuple[Url, ...] = Field((), description="what the job names on the bus, as Type 3 let its user")


class DatasetOwner(Message, wire="dataset.owner"):
    """The user who stored a data set. In the bucket `datasets`, by 32 digits of the SHA-256 of its name."""

    name: str
    user: str


class UploadHold(Part):
    """Space reserved for a data set during its upload. `upload` names its object; `until` is Unix time, s."""

    upload: Token
    name: str
    size_bytes: int = Field(ge=0)
    until: float


class UserUploads(Message, wire="dataset.uploads"):
    """The uploads of a user that are under way, through any gateways.

    In the bucket `uploads`, by the first 32 digits of the SHA-256 of the user's name; each change is a
    compare-and-set.
    """

    user: str = Field(max_length=1000)
    holds: tuple[UploadHold, ...] = Field((), max_length=256)


class ScaleJob(Message, wire="job.scale", version=(1, 3)):
    """MG → SMO: give a stage (all stages if none is named) this many working replicas.

    `unit` names units that make batches instead: `data`, or a function of `data.preprocess`.
    """

    job: Token
    replicas: int = Field(ge=1, le=MOST_INSTANCES)
    stage: int | None = Field(None, ge=0, le=MOST_INSTANCES)
    unit: str = Field("", max_length=64)
    user: str = ""
    quota: Quota | None = Field(None, description="the user's, as Type 3 told it")


class ChangeStage(Message, wire="job.change_stage"):
    """MG → SMO: have this instance leave its stage, and its slot host an instance of `stage` instead."""

    job: Token
    sid: Token
    stage: int = Field(ge=0, le=MOST_INSTANCES)
    user: str


class CancelJob(Message, wire="job.cancel"):
    job: Token
    user: str
    reason: str = ""


class ParkJob(Message, wire="job.park"):
    """MG → SMO: the job gives its slots back, and waits until it is resumed."""

    job: Token
    user: str
    reason: str = ""


class ResumeJob(Message, wire="job.resume", version=(1, 2)):
    """MG → SMO: a parked job goes on as soon as there is room, in another shape if one is given."""

    job: Token
    user: str
    stages: int | None = Field(None, ge=1, le=MOST_STAGES)
    replicas: int | None = Field(None, ge=1, le=MOST_INSTANCES)
    quota: Quota | None = Field(None, description="the user's, as Type 3 told it")


class PrioritiseJob(Message, wire="job.prioritise"):
    """MG → SMO: a job has another class in the queue from now on, whether it waits or runs."""

    job: Token
    user: str
    priority: Priority


class JobQuery(Message, wire="job.query"):
    """MG → SMO: one job, or all."""

    job: Token | None = None


class JobList(Message, wire="job.list"):
    jobs: tuple[JobRecord, ...]


class JobLoad(Part):
    """The present load of a job's instances, as the routers last reported it to the gateway (Type 4)."""

    job: Token
    entries: tuple[ComputeEntry, ...]


class MeshQuery(Message, wire="mesh.query"):
    """MG → SMO: give an overview of the mesh."""


class JobSummary(Part):
    job: Token
    array: str = Field("", description="of which it is a member")
    name: str
    state: str
    step: int
    steps: int
    reason: str = ""
    alerts: tuple[Alert, ...] = ()


class MeshStatus(Message, wire="mesh.status", version=(1, 4)):
    """The overview that `dmsc status` shows."""

    services: tuple[ServiceRecord, ...]
    nodes: tuple[NodeStatus, ...]
    jobs: tuple[JobSummary, ...]
    quality: tuple[QosReport, ...] = ()
    """The last Type 5 report of each gateway and router about each running job."""
    cordons: tuple[Cordon, ...] = ()
    """Places that get no new instances, and why."""
    unreadable: tuple[UnreadableNote, ...] = ()
    """Values in buckets that could not be read lately, and where their bytes are kept."""


class CordonPlace(Message, wire="mesh.cordon"):
    """MG → SMO: place no new instances there. `node` is an agent's SID, or a node's name if it is unique.

    `drain` (whole nodes only) also moves the instances there elsewhere; `progress` of the cordon says how far
    that is.
    """

    node: Token
    slot: int | None = None
    reason: str = ""
    user: str
    drain: bool = False


class UncordonPlace(Message, wire="mesh.uncordon"):
    """MG → SMO: allow new instances there again. For a whole node, its slots' cordons are lifted, too."""

    node: Token
    slot: int | None = None
    user: str


class Cordons(Message, wire="mesh.cordons"):
    """The present cordons of the node."""

    agent: Token
    cordons: tuple[Cordon, ...]


class TapScope(Part):
    """The messages of the bus that a user may tap.

    `hidden` has names of rows of the table of subjects; with `everything` the user may also tap subjects that
    are not in the table.
    """

    user: str
    role: Role | None
    everything: bool
    hidden: tuple[str, ...] = ()


class KeptAnswer(Message, wire="door.answer"):
    """The answer to a request with an `Idempotency-Key`, or which gateway is handling it (`status` 0).

    `request` is a digest of method, path, query and body: the same key with another digest is an error.
    """

    request: str
    gateway: Token
    incarnation: Token
    status: int = 0
    location: str = ""
    body: Annotated[dict[str, Any], HOLDS_USER_VALUES] = {}


class FaultList(Message, wire="fault.list"):
    """Each fault's last record, in the order in which they were opened."""

    faults: tuple[FaultRecord, ...]
