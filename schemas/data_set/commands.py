"""Requests about builds: gateway to orchestrator, orchestrator to node agent, and back."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Message, Seconds, Token
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.builds import BuildRecord, DataSetVersion, KeptBuildSpec
from schemas.data_set.units import UnitOrder, UnitResult
from schemas.job_file.data_set_use import DataSetName
from schemas.job_file.queue import Priority
from schemas.marks import Secret, Url
from schemas.quota import Quota


class SubmitBuild(Message, wire="data_set.submit", version=(1, 1)):
    """MG → SMO, after Type 3: build this."""

    spec: DataBuildSpec
    user: str
    quota: Quota | None = Field(None, description="the user's, as Type 3 told it")
    may_read: tuple[Url, ...] = Field((), description="what it names on the bus, as Type 3 let its user")
    over_others: bool = Field(False, description="the user may build a data set that is another's")


class CancelBuild(Message, wire="data_set.cancel"):
    """MG → SMO: end a build. What it has finished stays for the next one, for a while."""

    build: Token
    user: str
    reason: str = Field("", max_length=1024)


class ParkBuild(Message, wire="data_set.park"):
    """MG → SMO: begin no unit of a build until a person resumes it; one that waits is held."""

    build: Token
    user: str
    reason: str = Field("", max_length=1024)


class ResumeBuild(Message, wire="data_set.resume"):
    """MG → SMO: a build that a person parked or held goes on as soon as there are lanes."""

    build: Token
    user: str


class PrioritiseBuild(Message, wire="data_set.prioritise"):
    """MG → SMO: a build has another class of priority from now on."""

    build: Token
    user: str
    priority: Priority


class BuildQuery(Message, wire="data_set.query"):
    """MG → SMO: one build, or all."""

    build: Token | None = None


class BuildList(Message, wire="data_set.builds"):
    builds: tuple[BuildRecord, ...]


class DeleteVersion(Message, wire="data_set.delete"):
    """MG → SMO: remove a version, unless a job that has not ended reads it."""

    name: DataSetName
    version: int = Field(ge=1, lt=1 << 31)
    user: str


class DataSetList(Message, wire="data_set.list"):
    versions: tuple[DataSetVersion, ...]


class PrepareUnit(Message, wire="data_set.prepare", version=(1, 1)):
    """SMO → node agent: do this unit in a short-lived worker.

    Answered by `Ack` once accepted; the result comes as `UnitPrepared`. A repetition starts no second worker,
    and a known result is sent again.
    """

    build: Token
    unit: Token = Field(description="`UnitOrder.key`")
    repetition: int = Field(0, ge=0, description="another repetition does the work again")
    spec: KeptBuildSpec
    order: UnitOrder
    secrets: Secret = Field("", description="as of `InstanceStart`")
    user: str = Field("", description="whose build it is")


class UnitPrepared(Message, wire="data_set.prepared"):
    """MIC → SMO: what a unit gave, or why it gave nothing: `text` is one line for the user."""

    build: Token
    unit: Token
    repetition: int = Field(0, ge=0)
    result: UnitResult | None = None
    seconds: Seconds = 0.0
    code: str = Field("", max_length=64, description="of the error; empty: there is a result")
    text: str = Field("", max_length=4096)


class RemoveObjects(Message, wire="data_set.remove"):
    """SMO → node agent: remove files of a build's folder that nobody refers to."""

    folder: Url
    names: tuple[str, ...] = Field(max_length=1024)
    secrets: Secret = Field("", description="as of `InstanceStart`")
