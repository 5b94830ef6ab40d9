"""Answers of the HTTP API that are not on the bus: pages of lists, views of the registry, readiness."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.base import Part, Token
from schemas.checkpoint import PublishedCheckpoint
from schemas.cluster import Cordon, NodeStatus
from schemas.data_plane import RouteTable
from schemas.data_set.builds import BuildRecord, DataSetVersion
from schemas.fault import FaultRecord
from schemas.job import JobRecord
from schemas.marks import Url
from schemas.module_status import ModuleStatus
from schemas.registry import PeerLink, ServiceRecord
from schemas.services.keeping import ConsentGiven
from schemas.services.model_service import ModelService


class Page(Part):
    """A part of a list. `next` is the `cursor` of the following page; none if this is the last one."""

    next: str | None = None


class JobPage(Page):
    """Jobs in the order of submission."""

    jobs: tuple[JobRecord, ...]


class ConsentPage(Page):
    """Consents of one user, or of a subject, by service."""

    consents: tuple[ConsentGiven, ...]


class FaultPage(Page):
    """Each fault's last record, in the order in which they were opened."""

    faults: tuple[FaultRecord, ...]


class CheckpointPage(Page):
    """A job's checkpoints that exist, the newest first."""

    checkpoints: tuple[PublishedCheckpoint, ...]


class BuildPage(Page):
    """Builds of data sets in the order of submission."""

    builds: tuple[BuildRecord, ...]


class DataSetPage(Page):
    """Versions of data sets that the mesh has built, by name and number."""

    versions: tuple[DataSetVersion, ...]


class ServicePage(Page):
    """Model services by name."""

    services: tuple[ModelService, ...]


class Dataset(Part):
    """A dataset in the bus's object store. `source` is what a job names as `data.source`."""

    name: str
    bytes: int
    source: Url
    sha256: str = ""
    modified: str = Field("", description="ISO 8601, UTC")


class DatasetPage(Page):
    """Datasets in order of name."""

    datasets: tuple[Dataset, ...]


class CodeArchive(Part):
    """An archive of code in the bus's object store, by the SHA-256 of its bytes."""

    sha256: str
    bytes: int
    modified: str = Field("", description="ISO 8601, UTC")


class CodePage(Page):
    """A user's archives of code in order of their digests."""

    archives: tuple[CodeArchive, ...]


class InstancePage(Page):
    """Instances in order of SID."""

    instances: tuple[ServiceRecord, ...]


class ClusterView(Part):
    """A cluster by the registry's records: its services, its node agents and its instances by state."""

    cluster: Token
    nodes: tuple[Token, ...] = Field((), description="SIDs of its node agents")
    services: tuple[Token, ...] = Field((), description="SIDs of its gateways and routers")
    instances: dict[str, int] = Field({}, description="how many, by state")
    jobs: tuple[Token, ...] = ()


class ClusterPage(Page):
    """Clusters in order of name."""

    clusters: tuple[ClusterView, ...]


class NodeView(Part):
    """A node agent with its slots, its cordons, and its links to other nodes, as far as they are measured."""

    status: NodeStatus
    cordons: tuple[Cordon, ...] = ()
    links: tuple[PeerLink, ...] = ()


class NodePage(Page):
    """Nodes in order of the agent's SID."""

    nodes: tuple[NodeView, ...]


class RoutePage(Page):
    """Route tables in order of job, cluster and stage."""

    routes: tuple[RouteTable, ...]


class PolicyPage(Page):
    """Modules in order of name and version."""

    modules: tuple[ModuleStatus, ...]


class Health(Part):
    """The process lives."""

    status: str = "ok"


class Readiness(Part):
    """Whether requests can be answered. `waiting` names each missing part and why it is missing."""

    ready: bool
    waiting: dict[str, str] = {}


class Problem(Part):
    """An error (RFC 9457). `code` is stable; `detail` is one line that names the place and the remedy."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool = False
    problems: tuple[str, ...] = Field((), description="each wrong key of a body, in a line of its own")


class OpenaiProblem(Part):
    """What `OpenaiFailure` holds. `param`: the parameter at fault; `code`: stable."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenaiFailure(Part):
    """An error on OpenAI's paths, in its shape."""

    error: OpenaiProblem


class ScrapeTarget(Part):
    """A scrape target in the format of Prometheus' `http_sd_configs`."""

    targets: tuple[str, ...]
    labels: dict[str, str]


class StrikeBody(Part):
    """The body of `POST /v1/chaos/faults`: `kill` (SIGKILL), `freeze` (SIGSTOP), `resume` (SIGCONT)."""

    sid: Token
    fault: Literal["kill", "freeze", "resume"]
    incarnation: Token | None = Field(None, description="only this one; none: whichever runs now")


class OutsideFault(Part):
    """The body of `POST /v1/chaos/outside`: a fault that was injected without the mesh's help."""

    victim: str = Field(min_length=1, max_length=120, description="a process's or an instance's name")
    fault: Token = Field(description="as `dmsc chaos --what` calls it: instance, freeze, server, …")
