"""The five control signals of draft §4.3."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from schemas.base import Message, Part, Time, Token
from schemas.marks import Secret
from schemas.quota import Quota
from schemas.registry import Capability, Endpoint, InstanceState, ServiceRecord, TensorSchema
from schemas.routing import DEFAULT_ALGORITHM, Algorithm
from schemas.telemetry import LinkFigures


# Type 1: Service Instance Registration (MI, MG, SR, MIC, module → SRD) ------------------------------
class Registration(Message, wire="signal.registration"):
    """Type 1. A service announces itself; the registry answers with its lease."""

    record: ServiceRecord


class RegistrationLease(Message, wire="signal.registration.lease"):
    """The registry's answer: the route id that it allocated, and the interval of heartbeats."""

    sid: Token
    route_id: int
    heartbeat_s: float
    expiry_s: float
    revision: int


# Type 2: Service Route Advertisement (SRD → SR, MG) -------------------------------------------------
class RouteAdvertisement(Message, wire="signal.advertisement"):
    """Type 2. Deltas are sent at once, `full` states periodically and on demand.

    `previous` is the revision that this delta builds on: a receiver with another revision has a gap and
    requests a snapshot (`Resolve` without filters).
    """

    revision: int
    previous: int
    full: bool = False
    changed: tuple[ServiceRecord, ...] = ()
    removed: tuple[Token, ...] = ()


# Type 3: Service Access Authentication (MG → AAM) ---------------------------------------------------
class Role(StrEnum):
    """What a user may do: viewer reads, researcher submits and steers jobs, operator steers the mesh."""

    VIEWER = "viewer"
    RESEARCHER = "researcher"
    OPERATOR = "operator"
    ADMIN = "admin"


class AccessRequest(Message, wire="signal.access"):
    """Type 3. Asks whether the bearer of `token` may do `action` on `resource`."""

    token: Secret
    action: str
    resource: str
    gateway: Token


class AccessDecision(Message, wire="signal.access.decision", version=(1, 2)):
    """The authorizer's answer to one request, with its reason.

    `rule` is the access file's rule that decided. `token_id`, `issued_at` and `expires_at` identify the token
    without revealing it: a gateway can tell from them that the token was revoked meanwhile. For `valid_s`
    seconds a gateway may keep it: one for who asks a service again and again, none for all else (ADR-0186).
    """

    allow: bool
    user: str = ""
    role: Role | None = None
    reason: str
    valid_s: float = 0.0
    rule: str = ""
    token_id: str = ""
    issued_at: Time = 0.0
    expires_at: Time | None = None
    quota: Quota | None = Field(
        None, description="of who may begin something that takes room; None: no limit"
    )


# Type 4: Compute-Aware Routing Notification (SR → MG, SR) -----------------------------------------------
class ComputeEntry(Part):
    """Load, heterogeneity and latency of one instance, as its router measures them."""

    sid: Token
    incarnation: Token
    job: Token
    stage: int
    state: InstanceState
    queue: int = 0
    service_ms: float = 0.0
    latency_ms: float = 0.0
    device: str = "cpu"
    weight: float = 1.0


class StageLoad(Part):
    """One stage of a job in one cluster: load, heterogeneity and latency of its active instances.

    `rate_per_s` is the number of microbatches that they can do, as far as measured; `slowest` is the longest
    service time as a multiple of the shortest; senders choose among them by `algorithm`.
    """

    job: Token
    stage: int
    algorithm: str = ""
    instances: int
    queue: int = 0
    rate_per_s: float = 0.0
    slowest: float = 1.0
    latency_p50_ms: float = 0.0
    latency_p95_ms: float = 0.0


class ComputeNotification(Message, wire="signal.compute", version=(1, 2)):
    """Type 4. One cluster's instances, for gateways to choose cluster and entry, and for other routers.

    It is sent when it could change a choice, and periodically for receivers that started later. `guests`:
    clusters without a router whose instances are among `entries`, too.
    """

    router: Token
    cluster: Token
    revision: int
    entries: tuple[ComputeEntry, ...]
    stages: tuple[StageLoad, ...] = ()
    guests: tuple[Token, ...] = ()


# Type 5: QoS Telemetry (MG, SR → SMO) and Policy Update (SMO → MG, SR) ------------------------------
class LinkReport(Part):
    """One directed tensor link, by its sender's measurements."""

    sender: Token
    receiver: Token
    figures: LinkFigures


class QosReport(Message, wire="signal.qos.report", version=(1, 2)):
    """Type 5, upward: one cluster's figures, aggregated over the last `window_s` seconds.

    `temperature_c` is that of the hottest device, `ecc_errors` the uncorrected memory errors since the job
    was first seen on each device; None if no device reports them. `links` are the slowest links over which
    the cluster's instances send. `energy_j` is what the job's devices in the cluster have used since this
    router first saw it; None if none measures that.
    """

    sid: Token
    cluster: Token
    window_s: float
    throughput_bytes_per_s: float = 0.0
    throughput_tokens_per_s: float = 0.0
    latency_ms: float = 0.0
    error_rate: float = 0.0
    loss_rate: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    instances: int = 0
    job: Token | None = None
    temperature_c: float | None = None
    ecc_errors: int | None = None
    links: tuple[LinkReport, ...] = ()
    energy_j: float | None = None


class StagePolicy(Part):
    """How microbatches are spread over one stage. Weights are relative; a missing SID has weight 1."""

    stage: int
    weights: dict[str, float] = {}
    window: int = Field(ge=1, description="microbatches one sender may have open at one receiver")
    reference_ms: float = Field(
        0.0, ge=0, description="of a microbatch at speed 1, by the plan, until it is measured; 0: not known"
    )
    admitted_per_s: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="microbatches that all senders together may send to it; 0: no limit",
    )


class CommunicationPolicy(Message, wire="signal.qos.policy", version=(1, 3)):
    """Type 5, downward: how a job's traffic is to flow. Acknowledged; a higher revision replaces a lower."""

    job: Token
    revision: int
    entry_gateway: Token
    clusters: tuple[Token, ...]
    stages: tuple[StagePolicy, ...]
    algorithm: Algorithm = DEFAULT_ALGORITHM
    distances: dict[Token, dict[Token, int]] = Field(
        {}, description="links between clusters, by the mesh's topology file; empty: there is none"
    )
    entry_schema: tuple[TensorSchema, ...] = Field(
        (),
        description="of the batches that stage 0 takes: units that make others get no microbatch",
    )
    reason: str
    ended: bool = False


# Registration of MG and SR with the orchestrator (draft §4.4(1)) ------------------------------------
class NodeRegistration(Message, wire="mesh.registration", version=(1, 1)):
    """A gateway, router or cluster agent registers with the orchestrator, with its kind and services."""

    sid: Token
    kind: str
    incarnation: Token
    endpoint: Endpoint
    services: tuple[str, ...] = ()
    capability: Capability = Capability()


class TerminationReport(Message, wire="mesh.termination"):
    """Draft §4.4(6): MG and SR report to SMO and SRD that a job's communication has ended."""

    sid: Token
    job: Token
    microbatches: int = 0
    bytes: int = 0
    note: str = ""
