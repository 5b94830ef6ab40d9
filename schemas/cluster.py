"""Messages between the orchestrator and the node agents of a microservice instance cluster (MIC)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.base import Message, Part, Time, Token
from schemas.job import KeptSpec
from schemas.marks import Secret, Url
from schemas.registry import Capability, Labels, TensorSchema, kind_of_device
from schemas.task_graph import TaskUnit


class Slot(Part):
    """One place for a stage instance. `busy_with` is the SID of the instance in it, or None.

    `memory_bytes` is its part of the device's memory. For the other fields see `Capability`.
    """

    index: int
    device: str
    kind: str = "cpu"
    device_name: str = ""
    memory_bytes: int = 0
    flops_per_s: float = 0.0
    speed: dict[str, float] = {}
    precisions: tuple[str, ...] = ()
    bits_class: str = ""
    mig: str = ""
    emulated: bool = False
    labels: Labels = {}
    busy_with: Token | None = None
    condition: Literal["", "stalled", "underperforming"] = Field(
        "", description="the agent's judgement of the instance in it, or of the last one"
    )
    performance: float = Field(
        1.0, gt=0, description="share of its speed that it was judged to give; 1: as registered"
    )

    @property
    def device_kind(self) -> str:
        """`kind`, also of a slot that an older agent registered."""
        return kind_of_device(self.device, self.kind)

    def capability(self, compute_threads: int = 1) -> Capability:
        """What an instance in this slot registers (Type 1)."""
        return Capability(
            device=self.device,
            kind=self.kind,
            device_name=self.device_name,
            memory_bytes=self.memory_bytes,
            flops_per_s=self.flops_per_s,
            compute_threads=compute_threads,
            speed=self.speed,
            precisions=self.precisions,
            bits_class=self.bits_class,
            mig=self.mig,
            emulated=self.emulated,
            labels=self.labels,
        )


class NodeStatus(Message, wire="cluster.node.status", version=(1, 3)):
    """A node agent's report of its state; also its registration at the orchestrator."""

    sid: Token
    cluster: Token
    node: Token
    incarnation: Token
    slots: tuple[Slot, ...]
    address: str
    warm: bool = Field(description="the fork server has torch loaded, and the slots are offered")
    version: str = ""
    torch_version: str = ""
    sealing_key: str = Field("", description="what is secret in orders to this agent is sealed to this key")

    def slot(self, index: int) -> Slot | None:
        """The slot of this number; None: it offers none."""
        return next((slot for slot in self.slots if slot.index == index), None)


class InstanceStart(Message, wire="cluster.instance.start", version=(1, 5)):
    """SMO → node agent: start this unit. Idempotent by (sid, incarnation).

    `code_digest` is that of the analysed code; the instance refuses with one line if its own differs.
    """

    job: Token
    epoch: int
    spec: KeptSpec
    unit: TaskUnit
    incarnation: Token
    slot: int
    stages: int
    layer_count: int
    code_digest: str
    data_digest: str = Field(
        "", description="of the analysed data; a data instance compares; empty: not known"
    )
    inexact: bool = Field(False, description="operations without a deterministic form are let run")
    compiler: str = Field(
        "", description="digest of the analysed compiler; a stage compares; empty: no layer is compiled"
    )
    batch: tuple[TensorSchema, ...] = Field((), description="what travels of a batch (`TaskGraph.batch`)")
    joins: bool = Field(False, description="the job runs: active only once a reduction group admits it")
    link_secret: Secret = Field(
        "", description="by which members of the job know each other; empty: not asked"
    )
    secrets: Secret = Field("", description="JSON: what the `secret://` URLs of the job stand for")
    user: str = Field("", description="whose job it is: with whose other jobs it shares the node's cache")
    plan: int = Field(0, ge=0, description="revision of the plan that gives the unit its layers")


class LinkSecret(Message, wire="cluster.link.secret"):
    """The secret that a job's members share on their tensor links. In the bucket `link_secrets`."""

    job: Token
    secret: Secret


class InstanceStarted(Message, wire="cluster.instance.started"):
    sid: Token
    incarnation: Token
    pid: int


class InstanceStop(Message, wire="cluster.instance.stop"):
    """SMO → node agent: end this incarnation; drain first unless `now`."""

    job: Token
    sid: Token
    incarnation: Token
    now: bool = False


class Judge(Message, wire="cluster.judge"):
    """SMO → node agent (draft §5.5): what is this instance's state, and how far does the fault reach?"""

    job: Token | None = None
    sid: Token
    incarnation: Token


class Judgement(Message, wire="cluster.judgement", version=(1, 3)):
    """The judgement on an instance: `process` is its state by the operating system, `condition` how it does.

    `scope` is the instance alone or the whole node; `kind` is transient (it lives and may go on) or
    structural (it will not come back by itself).
    """

    sid: Token
    incarnation: Token
    process: Literal["running", "stopped", "gone", "unknown"]
    scope: Literal["none", "instance", "node"]
    kind: Literal["transient", "structural"]
    broken: tuple[str, ...] = Field(
        (),
        description="dependencies of the topology that it broke, each `from -> to: what flows`; of one that "
        "gets on, its links that do not work, by its samples",
    )
    evidence: str = ""
    log: tuple[str, ...] = Field((), description="the last lines that it wrote to its log")
    condition: Literal["", "well", "stalled", "underperforming"] = Field(
        "", description="as of `ClusterReport`; empty: it has said nothing yet"
    )
    waiting: tuple[Token, ...] = Field((), description="instances of the node that wait for it")


class Strike(Message, wire="cluster.strike"):
    """MG → node agent, for an operator: inject a fault into this incarnation, as from outside.

    The fault is not reported to the mesh, which has to detect it.
    """

    sid: Token
    incarnation: Token
    fault: Literal["kill", "freeze", "resume"]
    user: str


class Struck(Message, wire="cluster.struck"):
    """The signal was sent."""

    agent: Token
    sid: Token
    incarnation: Token
    fault: Literal["kill", "freeze", "resume"]
    pid: int


LeaveSource = Literal["signal", "person", "cloud", "taint", "other"]
"""Who says that a machine goes away: its system by a signal, a person, a cloud's notice, a node's taint."""
MOST_NOTICE = 86_400.0
"""Seconds: a node that leaves later than in a day is drained, and needs no deadline."""


class LeaveNotice(Message, wire="cluster.leave"):
    """A node goes away, at the latest `deadline_s` seconds after this was said.

    Its agent says so about itself (with its `incarnation`), a gateway for whoever asked, and the orchestrator
    tells it to the agent. The soonest deadline counts; a repetition changes nothing.
    """

    node: Token = Field(description="an agent's SID, or a node's name if it is unique")
    deadline_s: float = Field(ge=0, le=MOST_NOTICE)
    source: LeaveSource = "person"
    reason: str = ""
    by: str = Field(description="a user, or the SID of a service")
    incarnation: Token | None = Field(None, description="of the agent that leaves; null: the present one")


class Departure(Part):
    """That a cordoned node goes away: by when, which incarnation of its agent, and on whose word."""

    until: Time = Field(description="then the machine may be gone, whoever is left there")
    incarnation: Token
    source: LeaveSource
    cordoned: bool = Field(False, description="it was cordoned before the notice, and stays so after it")
    drained: bool = Field(False, description="it was being drained before the notice, likewise")


class Cordon(Message, wire="cluster.cordon", version=(1, 1)):
    """A place that gets no new instances: a slot, or (`slot` None) a whole node. In the bucket `cordons`.

    Instances there go on, unless the node is being drained: then they move elsewhere, one at a time, and all
    at once if it `leaves`. The cordon of a node that leaves ends with that incarnation of its agent. A lifted
    cordon of a device stays on record with the ECC errors known at that time: only further errors cordon it
    again.
    """

    agent: Token = Field(description="SID of the node agent")
    cluster: Token
    node: Token
    slot: int | None = None
    reason: str
    by: str = Field(description="who asked for it: a user, or the SID of a service")
    at: Time
    draining: bool = False
    progress: str = Field("", description="of a drain: what is left there, and what it waits for")
    lifted: bool = False
    ecc_errors: int = 0
    leaves: Departure | None = Field(None, description="the node itself goes away")


class Analyse(Message, wire="cluster.analyse", version=(1, 2)):
    """SMO → node agent: analyse the job's model and data in a short-lived worker (§5.3).

    Answered by `Ack` once accepted; the result comes as `ModelTopology` or `AnalysisFailed`.
    """

    job: Token
    spec: KeptSpec
    secrets: Secret = Field("", description="as of `InstanceStart`")
    user: str = Field("", description="as of `InstanceStart`")


class AnalysisFailed(Message, wire="cluster.analysis.failed"):
    """MIC → SMO: the job can't be trained as written; `text` is one line for the user."""

    job: Token
    code: str
    text: str


class ForgetTopology(Message, wire="cluster.forget"):
    """SMO → node agent (§4.4(6)): drop the job's topology and everything else that is left of the job."""

    job: Token


class WriteSample(Message, wire="cluster.sample", version=(1, 2)):
    """SMO → node agent: load these weights in a short-lived worker and have the model generate text."""

    job: Token
    spec: KeptSpec
    weights_url: Url
    secrets: Secret = Field("", description="as of `InstanceStart`")


class SampleWritten(Message, wire="cluster.sample.written"):
    """MIC → SMO: the text that the model generated; if it failed, `error` (one line) and an empty `text`."""

    job: Token
    text: str
    error: str = ""
