"""Records of the service registry (draft §3 SRD, §4.5(2) unit metadata)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Protocol

from pydantic import Field, StringConstraints

from schemas.base import Message, Part, Token
from schemas.envelope import EntityKind

READY = "ready"
"""Reason in the record of an instance that is built. While it joins a running job it is still pending."""

SILENT = "no heartbeat"
"""Begins the reason of an instance that the registry has given up because its heartbeats stopped."""

PASSING = "for want of others"
"""Begins the reason of an instance that ended by no fault of its own: its fork server was lost, or the bus or
a store was away before it was ready. Another start may succeed."""
PASSING_EXIT = 75
"""Exit code of such an instance (`EX_TEMPFAIL`): it may have ended before it could report to the registry."""


class InstanceState(StrEnum):
    """Runtime status of an instance (draft §4.5(3): active, pending, faulted; plus draining and gone)."""

    PENDING = "pending"
    ACTIVE = "active"
    DRAINING = "draining"
    FAULTED = "faulted"
    GONE = "gone"


INSTANCE_TRANSITIONS: dict[InstanceState, frozenset[InstanceState]] = {
    InstanceState.PENDING: frozenset({InstanceState.ACTIVE, InstanceState.FAULTED, InstanceState.GONE}),
    InstanceState.ACTIVE: frozenset({InstanceState.DRAINING, InstanceState.FAULTED, InstanceState.GONE}),
    InstanceState.DRAINING: frozenset({InstanceState.FAULTED, InstanceState.GONE}),
    InstanceState.FAULTED: frozenset({InstanceState.GONE}),
    InstanceState.GONE: frozenset(),
}
"""Legal transitions of one *incarnation*. A new incarnation starts again at pending."""


class Culprit(Part):
    """The training microbatch at which an instance ended itself.

    User code raised, or a gradient could not be summed. If another incarnation fails at the same microbatch,
    the microbatch is at fault.
    """

    step: int
    microbatch: int


class TensorSchema(Part):
    """One tensor at a unit's boundary. `shape` without the sample dimension; dtype as torch spells it.

    Before the entry it is one value of a sample; its dtype may also be `text`, `bytes`, `list` or `mapping`.
    """

    name: str = Field("", description="of the wire, or in the batch; empty: it has none")
    shape: tuple[int, ...]
    dtype: str


Labels = Annotated[
    dict[Token, Annotated[str, StringConstraints(min_length=1, max_length=120)]], Field(max_length=32)
]
"""What an operator says of a node, by name: `region`, `trust`, `price` (of a slot per hour), `carbon` (grams
of CO2 per kWh)."""


def kind_of_device(device: str, kind: str) -> str:
    """`kind`, or what stands before the colon of `device`, where an older agent wrote no kind."""
    return device.partition(":")[0] if kind == "cpu" else kind


class Capability(Part):
    """What a place can do: an instance's slot, a node agent's whole node, or a service's node.

    Bytes and FLOP/s (float32); 0 if not measured. `speed`, by kind of work, is relative to the reference of
    the standard stage (`workers.tasks.standard_stage`): `stage`, `matmul`, `matmul_bf16`, `matmul_fp16`,
    `memory`; empty if not measured.
    """

    device: str = "cpu"
    kind: str = Field("cpu", description="kind of device: cpu, cuda, …")
    device_name: str = ""
    memory_bytes: int = 0
    flops_per_s: float = 0.0
    compute_threads: int = 1
    cores: int = Field(0, description="processor cores of the node; 0: not registered")
    slots: int = Field(0, description="of a node agent")
    speed: dict[str, float] = {}
    precisions: tuple[str, ...] = Field((), description="in which it computes without emulation")
    bits_class: str = Field("", description="places of one class give the same bits; empty: not known")
    mig: str = Field("", description="profile of the slice of a GPU; empty: it is none")
    emulated: bool = Field(False, description="the speed is set, for tests: only padded layers keep to it")
    labels: Labels = {}

    @property
    def device_kind(self) -> str:
        """`kind`, also of a record that an older agent wrote."""
        return kind_of_device(self.device, self.kind)


class AbleDevice(Protocol):
    """What a query for capabilities looks at: a capability, or a slot that has them."""

    @property
    def device_kind(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def flops_per_s(self) -> float: ...
    @property
    def precisions(self) -> tuple[str, ...]: ...
    @property
    def bits_class(self) -> str: ...


class Endpoint(Part):
    """The location of an instance: cluster, node, process, and the address of its tensor links.

    `metrics` is the URL of its process's Prometheus metrics; empty if it has none, like instances.
    """

    cluster: Token
    node: Token
    pid: int = 0
    address: str = ""
    metrics: str = ""


class PeerLink(Part):
    """A node's link to another one, as the transfers of jobs have measured it; None: not measured.

    `peer` is the SID of the other node's agent. A transfer takes the latency and its size at the bandwidth.
    """

    peer: Token
    latency_ms: float | None = None
    bandwidth_bytes_per_s: float | None = None


class ServiceRecord(Message, wire="registry.record", version=(1, 4)):
    """A leased registration, as the registry keeps it. Its key in the bucket is the SID.

    `prefix` is the service's content name (`train/<job>/stage/0`); callers resolve by prefix, schema,
    tags and capability, never by address (draft §1, content-semantic addressing).
    """

    sid: Token
    prefix: str = Field(max_length=512)
    kind: EntityKind
    incarnation: Token
    state: InstanceState
    endpoint: Endpoint
    capability: Capability = Capability()
    offers: tuple[Capability, ...] = Field((), description="of a node agent: its slots' different ones")
    links: tuple[PeerLink, ...] = Field((), description="of a node agent: to the nodes it has sent to")
    input_schema: tuple[TensorSchema, ...] = ()
    output_schema: tuple[TensorSchema, ...] = ()
    tags: tuple[str, ...] = ()
    job: Token | None = None
    stage: int | None = None
    route_id: int = 0
    version: str = ""
    reason: str = ""
    fault: str = Field(
        "", description="code of the error that it ended itself with; empty where a new start may help"
    )
    culprit: Culprit | None = None
    replaced: tuple[Token, ...] = Field(
        (), description="older incarnations of this SID, fenced; kept by the registry"
    )


_OWNER = "owner:"


def owner_tag(user: str) -> str:
    """The tag of a service that a user runs; see `owner_of`."""
    return f"{_OWNER}{user}"


def owner_of(record: ServiceRecord) -> str | None:
    """The user who owns the service, by its own claim; None if it belongs to the mesh."""
    return next((tag.removeprefix(_OWNER) for tag in record.tags if tag.startswith(_OWNER)), None)


class Heartbeat(Message, wire="registry.heartbeat"):
    """A sign of life. Over core NATS, once a second; the registry's expiry is the backstop.

    `digest` is a short hash of the sender's state; a full registration repairs a difference.
    """

    sid: Token
    incarnation: Token
    state: InstanceState
    digest: str = ""


class StateChange(Message, wire="registry.state", version=(1, 1)):
    """An incarnation's state has changed; sent by itself or by the node agent that watches it.

    For `fault` and `culprit` see `ServiceRecord`.
    """

    sid: Token
    incarnation: Token
    state: InstanceState
    reason: str = ""
    fault: str = ""
    culprit: Culprit | None = None


_LABEL = "label:"


def label_tag(key: str, value: str) -> str:
    """The tag of a node agent that says this label of its node."""
    return f"{_LABEL}{key}={value}"


def is_label_tag(tag: str) -> bool:
    return tag.startswith(_LABEL)


def service_tag(service: str) -> str:
    """The tag of an entity that does this for others: a gateway's `entry`, for instance."""
    return f"service:{service}"


class Resolve(Message, wire="registry.resolve", version=(1, 2)):
    """Discovery by content: every given field must match; `prefix` matches its descendants too.

    An answer that would be too large comes in pages: repeat the request with `after` until `next_after` is 0.
    `bus.mesh.discovery.resolve` does that.
    """

    sid: Token | None = None
    prefix: str | None = None
    kind: EntityKind | None = None
    job: Token | None = None
    stage: int | None = None
    cluster: Token | None = None
    tags: tuple[str, ...] = ()
    state: InstanceState | None = None
    input_schema: tuple[TensorSchema, ...] | None = None
    output_schema: tuple[TensorSchema, ...] | None = None
    device: str | None = Field(None, description="kind of device: cpu, cuda")
    min_memory_bytes: int = Field(0, ge=0, description="what the place must have at least")
    min_flops_per_s: float = Field(0.0, ge=0.0, description="as measured; not measured counts as 0")
    precision: str | None = Field(None, description="in which it computes without emulation")
    bits_class: str | None = None
    after: int = Field(0, ge=0, description="route id behind which the page begins")

    @property
    def asks_capability(self) -> bool:
        """Whether it asks for more than the content: for what the place can do."""
        return any(
            (self.device, self.min_memory_bytes, self.min_flops_per_s, self.precision, self.bits_class)
        )

    def matches(self, record: ServiceRecord) -> bool:
        """Whether the registry would answer this query with this record, whatever the page."""
        places = record.offers or (record.capability,)
        return self.matches_content(record) and any(self.fits(place) for place in places)

    def matches_content(self, record: ServiceRecord) -> bool:
        """The same without what the place can do."""
        if self.prefix is not None:
            prefix = self.prefix.rstrip("/")
            if record.prefix != prefix and not record.prefix.startswith(prefix + "/"):
                return False
        return (
            self.sid in (None, record.sid)
            and self.kind in (None, record.kind)
            and self.job in (None, record.job)
            and self.stage in (None, record.stage)
            and self.cluster in (None, record.endpoint.cluster)
            and self.state in (None, record.state)
            and set(self.tags) <= set(record.tags)
            and _same_boundary(self.input_schema, record.input_schema)
            and _same_boundary(self.output_schema, record.output_schema)
        )

    def fits(self, place: AbleDevice) -> bool:
        """Whether a place can do what is asked for. One whose class of bits is not known is of any."""
        return (
            self.device in (None, place.device_kind)
            and place.memory_bytes >= self.min_memory_bytes
            and place.flops_per_s >= self.min_flops_per_s
            and (self.precision is None or self.precision in place.precisions)
            and (self.bits_class is None or place.bits_class in ("", self.bits_class))
        )


def _same_boundary(asked: tuple[TensorSchema, ...] | None, own: tuple[TensorSchema, ...]) -> bool:
    """Whether shapes and dtypes are those asked for; names do not matter."""
    if asked is None:
        return True
    return [(each.shape, each.dtype) for each in asked] == [(each.shape, each.dtype) for each in own]


class Resolved(Message, wire="registry.resolved", version=(1, 1)):
    """The matching records, in order of route id, as of `revision`."""

    revision: int
    records: tuple[ServiceRecord, ...]
    next_after: int = Field(0, description="the next page's `after`; 0: there is no more")


class ReleaseJob(Message, wire="registry.release"):
    """Draft §4.4(6): forget the instances of a job, release its route ids and ports."""

    job: Token
