"""Samples of instances and nodes (draft §4.4(3), §5.2). Units are in the names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Message, Part, Token
from schemas.marks import HOLDS_USER_VALUES

Trend = Literal["slower", "faster", "steady", ""]
"""The trend of a link's transfers from one window to the next; empty if there are too few."""


APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Critical errors that the driver reports for a faulty program, not for a faulty device (NVIDIA's XID
catalogue): exceptions of the graphics engine, page faults, channels stopped as a consequence."""


ThrottleReason = Literal[
    "idle",
    "setting",
    "power cap",
    "slowdown",
    "sync boost",
    "thermal software",
    "thermal hardware",
    "power brake",
    "display",
]
"""Why a device's clocks are below its best, in NVML's order of bits."""


class SessionLoad(Part):
    """How much an instance has to do, and room for how much more."""

    sessions: int = 0
    most_sessions: int = 0
    free_rows: int = Field(0, description="tokens that its cache has room for")
    rows: int = Field(0, description="tokens that its cache has room for in all")
    wave_ms: float = Field(0.0, description="milliseconds of a wave, smoothed")
    busy_s: float = Field(0.0, ge=0, description="seconds that it computed what was new, since it serves")
    recomputed_s: float = Field(0.0, ge=0, description="likewise, of rows that another one had computed")
    recomputed_rows: int = Field(0, ge=0, description="how many rows those were, since it serves")


class DeviceDetail(Part):
    """Figures that only some devices report; None if this device or its driver does not.

    `ecc_corrected` counts since the driver was loaded. Bytes are counters of the whole device, which may
    wrap. `mig` means that the device is a slice of a card (Multi-Instance GPU): its memory is its own;
    temperature, clocks, throttling, errors and bytes are the card's; utilization, power and energy of a slice
    are not measured.
    """

    clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle: tuple[ThrottleReason, ...] | None = None
    power_limit_w: float | None = None
    ecc_corrected: int | None = None
    pcie_sent_bytes: int | None = None
    pcie_received_bytes: int | None = None
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    mig: bool = False


class DeviceSample(Part):
    """One device at one moment; None for figures that the device or driver does not report.

    `ecc_errors` counts uncorrected errors since the driver was loaded. `xid_errors` has the codes of the
    critical errors that the driver reported to this process, in order.
    """

    device: str
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    ecc_errors: int | None = None
    xid_errors: tuple[int, ...] | None = None
    detail: DeviceDetail | None = None


class LinkFigures(Part):
    """The quality of a link in the sender's direction, by the sender's own transfers.

    A transfer takes `latency_ms` plus its size at `bandwidth_bytes_per_s` (None: unknown, because latency is
    nearly all of it). `loss` is the share of transfers that had to be repeated. `transfer_ms` is the time of
    a transfer of the usual size, `bytes`, including losses. `evidence` explains the trend.
    """

    latency_ms: float | None = None
    bandwidth_bytes_per_s: float | None = None
    loss: float = 0.0
    bytes: int = 0
    transfer_ms: float | None = None
    trend: Trend = ""
    evidence: str = ""


class LinkSample(Part):
    """One tensor link since the last sample. `figures` are sent when they change, and every 5 seconds.

    `refused` counts how often the other end could not prove to be a member of the job.
    """

    peer: Token
    sent_bytes: int = 0
    received_bytes: int = 0
    transfers: int = 0
    transfer_ms: float = 0.0
    errors: int = 0
    refused: int = 0
    figures: LinkFigures | None = None


Tier = Literal["memory", "disk", "neighbour", "store"]
"""Where bytes of a store come from: blocks in this process's memory, the node's cache, another node's, or
the store itself."""


class DataFigures(Part):
    """How an instance before the first stage gets its data; counted since its incarnation began.

    `stalled_s` is the time in which a microbatch that a gateway had dispatched to it was not made yet. Of
    memory and disk, `read_bytes` counts the ranges that were asked for; of neighbours and stores, what came,
    which is whole blocks mostly. Files on this machine are mapped, and not counted.
    """

    stalled_s: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="None: microbatches are not dispatched to it"
    )
    read_bytes: dict[Tier, Annotated[int, Field(ge=0)]] = Field(
        {}, description="bytes by tier; empty: it reads from no store"
    )


class InstanceSample(Message, wire="telemetry.instance", version=(1, 6)):
    """An instance's load and speed; sent once a second and after each step.

    `service_ms` is a moving average of compute per microbatch, forward plus backward, without pauses.
    `stage_cost_ms` is the same by the analysis, which measured all stages on one machine; `state_bytes` is
    the size of the state that a newcomer of its stage would receive. `computed` counts what its compute
    thread has done, passes and orders alike; `computing_ms` is how long that thread is at its present task, 0
    if it has none; `obeys`: that task is an order of the orchestrator, which has its own deadline.
    """

    job: Token
    sid: Token
    incarnation: Token
    cluster: Token
    node: Token
    stage: int
    step: int
    queue: int = 0
    in_flight: int = 0
    microbatches: int = 0
    replaced: int = Field(0, description="unreadable samples in whose place a data instance put another")
    service_ms: float = 0.0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    busy: float = 0.0
    tokens_per_s: float = 0.0
    reduce_ms: float = 0.0
    retained_bytes: int = 0
    resident_bytes: int = 0
    stage_cost_ms: float = 0.0
    state_bytes: int = 0
    computed: int = 0
    computing_ms: float = 0.0
    obeys: bool = False
    waits_for: tuple[Token, ...] = Field(
        (), description="instances that have microbatches of this one, or that it was promised some by"
    )
    links: tuple[LinkSample, ...] = ()
    device: DeviceSample | None = None
    data: DataFigures | None = Field(None, description="of instances before the first stage")
    serving: SessionLoad | None = Field(None, description="of instances that serve")


class NodeSample(Message, wire="telemetry.node", version=(1, 1)):
    """A node's load, from its agent."""

    cluster: Token
    node: Token
    cpu: float = 0.0
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    devices: tuple[DeviceSample, ...] = ()
    instances: int = 0


class LogLine(Message, wire="telemetry.log", version=(1, 2)):
    """One structured log line, kept on a bounded stream for `dmsc logs`.

    `correlation` is that of the request at the beginning; `cause` is the id of the message that was being
    handled. `dmsc tap --follow` shows the other consequences of either.
    """

    level: str
    event: str
    fields: Annotated[dict[str, str], HOLDS_USER_VALUES] = {}
    job: Token | None = None
    step: int | None = None
    correlation: str | None = None
    cause: str | None = None


class DeadLetter(Message, wire="telemetry.dead_letter"):
    """A message that a service could not use: counted, logged once, kept here (first 1,024 bytes)."""

    service: Token
    subject: str
    reason: str
    size: int
    head: bytes
