"""A model service with its versions, and the orders that change it."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from schemas.base import CallerSpan, Message, Part, Time, Token
from schemas.job import KeptSpec
from schemas.marks import Url
from schemas.quota import Quota

WHOLE = 10_000
"""The sum of a service's weights: traffic is shared by ten-thousandths."""
MOST_WHY = 500
"""Characters of a reason that a record keeps; a longer one is cut where nobody waits to shorten it."""


class ServiceState(StrEnum):
    DEPLOYING = "deploying"
    """No version is ready yet."""
    SERVING = "serving"
    STOPPED = "stopped"


class VersionState(StrEnum):
    DEPLOYING = "deploying"
    """Its job waits for room, or its instances start."""
    READY = "ready"
    """At least one replica of each stage was probed, and answers."""
    IMPAIRED = "impaired"
    """It was ready, and a stage of it has nobody now."""
    IDLE = "idle"
    """It gave its slots back because nobody asked it; the next request starts it."""
    REFUSED = "refused"
    """Its weights, its tokenizer or its arithmetic are not what was asked for; `reason` says which."""
    RETIRED = "retired"
    """Stopped by a person, or by a newer version's promotion."""


DEPLOYED = frozenset({VersionState.READY, VersionState.IDLE})
"""States of a version that answers whoever asks; an idle one starts for that."""
_ENDS = (VersionState.REFUSED, VersionState.RETIRED)
VERSION_TRANSITIONS: dict[VersionState, frozenset[VersionState]] = {
    VersionState.DEPLOYING: frozenset({VersionState.READY, VersionState.IDLE, *_ENDS}),
    VersionState.READY: frozenset({VersionState.IMPAIRED, VersionState.IDLE, *_ENDS}),
    VersionState.IMPAIRED: frozenset({VersionState.READY, VersionState.IDLE, *_ENDS}),
    VersionState.IDLE: frozenset({VersionState.READY, VersionState.IMPAIRED, *_ENDS}),
    VersionState.REFUSED: frozenset(),
    VersionState.RETIRED: frozenset(),
}


class ServedVersion(Part):
    """One version: the job that runs its instances, and what it computes."""

    version: Token
    job: Token = Field(description="id of the job whose instances serve it")
    weights: Url
    sha256: str = Field("", description="digest of the weights; empty: not known yet")
    kind: Literal["generate", "predict"] | None = Field(None, description="None: not known yet")
    stages: int = 1
    replicas: tuple[int, ...] = Field((), description="of each stage")
    state: VersionState = VersionState.DEPLOYING
    reason: str = ""
    exact: bool | None = Field(None, description="whether bits are independent of company; None: not probed")
    inexact_because: str = ""
    cached: bool | None = Field(
        None, description="whether all stages keep keys and values; None: not known, or it predicts"
    )
    uncached_because: str = ""
    context: int = Field(0, description="most tokens of prompt and answer; 0: not known yet")
    vocabulary: int = 0
    fingerprint: str = Field("", description="of the arithmetic that all replicas share")
    worse_nll: float | None = Field(
        None, description="nats per token of prompts that it may be worse by than the stable version"
    )
    since: Time = 0.0


class BucketRun(Part):
    """Neighbouring buckets of one version: from `first` up to, not including, `end` (ADR-0135)."""

    version: Token
    first: int = Field(ge=0)
    end: int = Field(le=WHOLE)


TrafficAction = Literal["", "deploy", "traffic", "promote", "rollback", "shadow", "unshadow", "stop"]
"""What changed a service's traffic; `deploy`: its first version was ready; empty: of an earlier record."""


class TrafficChange(Part):
    """One change of the weights, or of who is in shadow."""

    at: Time
    by: str = Field(description="a user, a functional module, or `orchestrator`")
    why: str = ""
    weights: dict[Token, int]
    shadow: tuple[Token, ...] = ()
    action: TrafficAction = ""
    revision: int = Field(0, ge=0, description="of the record that it made; 0: of an earlier one")


class ModelService(Message, wire="service.record"):
    """A service. In the bucket `services`, written by the leading orchestrator by compare-and-set."""

    service: Token
    user: str
    tenant: str = ""
    state: ServiceState = ServiceState.DEPLOYING
    versions: tuple[ServedVersion, ...] = ()
    weights: dict[Token, int] = Field(
        {}, description="version → its ten-thousandths; the sum is 10,000, or the map is empty"
    )
    runs: tuple[BucketRun, ...] = Field((), description="which of the 10,000 buckets each version has")
    shadow: tuple[Token, ...] = Field((), description="versions that answer copies, which are thrown away")
    stable: Token | None = Field(None, description="the version that a rollback goes back to")
    history: tuple[TrafficChange, ...] = Field((), description="the last changes of traffic, newest last")
    revision: int = Field(0, ge=0, description="grows with each change of the record")
    created_at: Time = 0.0

    @property
    def shared_since(self) -> int:
        """Revision of the record since which traffic is shared as it is; 0: not known."""
        return self.history[-1].revision if self.history else 0

    def granted_since(self, version: str) -> int:
        """Revision of the record since which a version has traffic without a break; 0: it has none."""
        since = 0
        for change in self.history:
            since = (since or change.revision) if change.weights.get(version) else 0
        return since

    def version(self, name: str) -> ServedVersion | None:
        """The version of this name; None: there is none."""
        return next((each for each in self.versions if each.version == name), None)


class DeployVersion(Message, wire="service.deploy"):
    """MG → SMO: run the version that `spec.serve` describes; the service comes to be with its first one."""

    user: str
    tenant: str = ""
    gateway: Token
    spec: KeptSpec
    caller_span: CallerSpan = ""
    quota: Quota | None = Field(None, description="the user's, as Type 3 told it")
    may_read: tuple[Url, ...] = Field((), description="what it names on the bus, as Type 3 let its user")
    over_others: bool = Field(False, description="its user may deploy to others' services, too")


class OrderService(Message, wire="service.order"):
    """MG → SMO: change a service. `wake`: a request waits for an idle version, which is to start.

    `weights` are for `traffic`. All others name a `version`, but `rollback`, and `stop` of the whole service.
    """

    user: str
    service: Token
    action: Literal["traffic", "promote", "rollback", "shadow", "unshadow", "scale", "wake", "stop"]
    version: Token | None = None
    weights: dict[Token, int] = {}
    replicas: int | None = Field(None, ge=0, description="of `scale`")
    expected: int | None = Field(None, description="revision of the record that the asker has seen")
    why: str = Field("", max_length=MOST_WHY)
    quota: Quota | None = Field(None, description="the user's, as Type 3 told it")


class TrafficBody(Part):
    """Body of a request about a service's traffic: version → its ten-thousandths, 10,000 in all."""

    weights: dict[Token, int] = Field(max_length=64)
    expected: int | None = Field(None, description="revision of the record that the asker has seen")
    why: str = Field("", max_length=MOST_WHY)


class ServiceQuery(Message, wire="service.query"):
    """MG → SMO: this service, or all of them."""

    service: Token | None = None


class ServiceList(Message, wire="service.list"):
    services: tuple[ModelService, ...]
