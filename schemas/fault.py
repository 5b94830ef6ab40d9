"""Faults (draft §4.4(5), §5.5): reported by MG or SR, located by the SMO with SRD and MIC, and queued."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from schemas.base import Message, Part, Time, Token
from schemas.registry import Culprit
from schemas.step import Member

FaultKind = Literal[
    "instance",
    "link",
    "unreachable",
    "request",
    "microbatch",
    "device",
    "node",
    "entity",
    "slow",
    "stalled",
]


class LinkFault(Message, wire="fault.link", version=(1, 1)):
    """MI → SR of its cluster: a neighbour's link broke. A hint: only the orchestrator decides.

    `unreachable`: repeated attempts to build new links to it failed. `silent`: nothing answers at its
    address, not even with a refusal.
    """

    job: Token
    reporter: Token
    reporter_incarnation: Token | None = None
    peer: Token
    peer_incarnation: Token
    text: str
    unreachable: bool = False
    silent: bool = False


class DeviceErrors(Part):
    """Errors that a device reports: uncorrected ECC errors, and critical errors not caused by a program."""

    device: str
    ecc_errors: int = 0
    xid_errors: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.ecc_errors} uncorrected ECC errors"] if self.ecc_errors else []
        parts += [f"XID {', '.join(map(str, self.xid_errors))}"] if self.xid_errors else []
        return f"{self.device}: {', '.join(parts) or 'no errors'}"


class FaultReport(Message, wire="fault.report", version=(1, 4)):
    """MG or SR → SMO. `evidence` says what was seen; `device` has errors of the instance's device, if any.

    The orchestrator makes one itself of what a node agent judges stalled (`ClusterReport`).
    Kinds: `link`: a link broke, and a new one may work; `unreachable`: new links failed; `slow`: the instance
    lives but takes a multiple of its former time, as `evidence` says, and gets less work; `stalled`: it has
    work and gets on with none. `witness` is the
    instance that saw the fault: a report by a fenced witness does not count. For `silent` see `LinkFault`.
    """

    reporter: Token
    job: Token | None
    sid: Token
    incarnation: Token
    kind: Literal["instance", "link", "unreachable", "node", "request", "device", "slow", "stalled"]
    evidence: str
    device: DeviceErrors | None = None
    witness: Member | None = None
    silent: bool = False


VerdictKind = Literal["transient", "structural", "unfounded"]
FaultScope = Literal["none", "instance", "node"]


class FaultVerdict(Message, wire="fault.verdict", version=(1, 5)):
    """The SMO's verdict, reached with SRD and MIC, and its action; on the stream `FAULTS`."""

    job: Token | None
    sid: Token
    incarnation: Token
    verdict: VerdictKind
    scope: FaultScope
    action: str
    reason: str
    culprit: Culprit | None = None
    log: tuple[str, ...] = Field((), description="the last lines of the instance's log")
    broken: tuple[str, ...] = Field((), description="dependencies of the topology that it broke, by the MIC")
    judged: str = Field("", description="the judgement of the MIC in words; empty: it gave none")
    ended: bool = Field(False, description="its process is known to have ended")
    at_fault: Token | Literal[""] = Field(
        "", description="the instance that reported it, where that one is at fault; it is located next"
    )


ChainCondition = Literal["well", "stalled", "underperforming"]


class Chain(Part):
    """An instance's place in its job's pipeline, as the agent of its node sees it.

    `waiting`: instances of the same node that wait for it; `waits_for`: those, on whichever node, that it
    waits for; `broken`: dependencies of the topology that stand still with it.
    """

    stage: int
    replica: int
    waiting: tuple[Token, ...] = ()
    waits_for: tuple[Token, ...] = ()
    broken: tuple[str, ...] = ()


class ClusterReport(Message, wire="fault.cluster"):
    """MIC → SMO (§5.5): the condition of an instance of its node has changed; with the chain around it.

    `stalled`: it has work, and gets on with none for many times as long as that takes; with scope `none` it
    is the one that waits, and what it waits for is elsewhere. `underperforming`: it takes `slowness` times as
    long as the plan expects of its slot. `kind` is structural if it will not go on by itself.
    """

    agent: Token
    cluster: Token
    node: Token
    job: Token
    sid: Token
    incarnation: Token
    condition: ChainCondition
    scope: FaultScope
    kind: Literal["transient", "structural"]
    chain: Chain
    slowness: float = 1.0
    evidence: str


class FaultState(StrEnum):
    """The state of a fault in the queue."""

    OPEN = "open"
    LOCATED = "located"
    RETRYING = "retrying"
    HANDLED = "handled"
    GIVEN_UP = "given_up"


_over = frozenset({FaultState.HANDLED, FaultState.GIVEN_UP})
FAULT_TRANSITIONS: dict[FaultState, frozenset[FaultState]] = {
    FaultState.OPEN: frozenset({FaultState.LOCATED, FaultState.RETRYING, *_over}),
    FaultState.LOCATED: frozenset({FaultState.OPEN, FaultState.RETRYING, *_over}),
    FaultState.RETRYING: frozenset({FaultState.OPEN, *_over}),
    FaultState.HANDLED: frozenset(),
    FaultState.GIVEN_UP: frozenset(),
}
"""Legal transitions of a fault. `… → open`: the same task failed again in the same way."""

FAULT_OVER = _over


class FaultTask(Part):
    """The failed task. Fields that have no meaning for a fault's kind are None.

    `sid` is the instance, the gateway, or (kinds `device`, `node`) the node agent.
    """

    job: Token | None = None
    step: int | None = None
    attempt: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    sid: Token | None = None
    incarnation: Token | None = None
    device: str | None = None


class FaultRecord(Message, wire="fault.record", version=(1, 2)):
    """One fault's present state; later records of the same `id` replace it. On the stream `FAULT_QUEUE`.

    `attempts` counts how often the task failed like this until now; after more than `limit` retries the
    fault is given up, and the job with it (a quarantined microbatch is a matter of the job's policy).
    """

    id: Token
    state: FaultState
    kind: FaultKind
    task: FaultTask
    reporter: str = Field(description="who saw it")
    log: tuple[str, ...] = Field((), description="evidence, then the last lines of the instance's log")
    verdict: Literal["transient", "structural", "unfounded"] | None = None
    scope: str = ""
    reason: str = Field("", description="why the verdict is what it is")
    judged: str = Field("", description="as of `FaultVerdict`")
    action: str = Field("", description="what was done")
    attempts: int = 1
    limit: int = Field(description="retries allowed")
    opened_at: Time
    changed_at: Time
