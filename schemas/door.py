"""The outer door: what clients ask a gateway, over NATS and (as JSON) over HTTP; MG → SMO commands."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Message, Part, Token
from schemas.cluster import NodeStatus
from schemas.job import JobRecord, JobSpec
from schemas.registry import ServiceRecord
from schemas.signals import QosReport


class DoorRequest(Message, wire="door.request"):
    """A client's request at the NATS door. `action` as in `AccessRequest`; `spec` only for submit."""

    token: str = Field(repr=False)
    action: str = Field(description="job.submit | job.list | job.read | job.cancel | mesh.read")
    job: Token | None = None
    spec: JobSpec | None = None


class SubmitJob(Message, wire="job.submit"):
    """MG → SMO, after Type 3: queue this job."""

    spec: JobSpec
    user: str
    gateway: Token


class CancelJob(Message, wire="job.cancel"):
    job: Token
    user: str
    reason: str = ""


class JobQuery(Message, wire="job.query"):
    """MG → SMO: one job, or all."""

    job: Token | None = None


class JobList(Message, wire="job.list"):
    jobs: tuple[JobRecord, ...]


class MeshQuery(Message, wire="mesh.query"):
    """MG → SMO: the mesh at a glance."""


class JobSummary(Part):
    job: Token
    name: str
    state: str
    step: int
    steps: int
    reason: str = ""


class MeshStatus(Message, wire="mesh.status"):
    """What `dmsc status` shows."""

    services: tuple[ServiceRecord, ...]
    nodes: tuple[NodeStatus, ...]
    jobs: tuple[JobSummary, ...]
    quality: tuple[QosReport, ...] = ()
    """The last Type 5 report of each gateway and router about each running job."""
