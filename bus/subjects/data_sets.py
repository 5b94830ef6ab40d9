"""Builds of data sets: commands, records, the ledger of units, versions."""

from __future__ import annotations

from bus.subject_row import Names, Subject
from bus.subjects.table import AAM, BROKER, CLIENT, MG, MIC, RECORDS_BYTES, SMO, STREAM
from schemas.data_set import builds, commands
from schemas.errors import Ack

__all__ = [
    "BUILD_EVENT",
    "BUILD_RECORD",
    "CANCEL_BUILD",
    "DATA_SET_VERSION",
    "DELETE_VERSION",
    "PARK_BUILD",
    "PREPARE_UNIT",
    "PRIORITISE_BUILD",
    "QUERY_BUILDS",
    "REMOVE_OBJECTS",
    "RESUME_BUILD",
    "SUBMIT_BUILD",
    "UNIT_COMMIT",
    "UNIT_PREPARED",
]

SUBMIT_BUILD = Subject(
    "submit build",
    "data.command.submit",
    commands.SubmitBuild,
    MG,
    SMO,
    "build a data set's next version",
    reply=builds.BuildRecord,
    answer_bytes=RECORDS_BYTES,
)
CANCEL_BUILD = Subject(
    "cancel build",
    "data.command.cancel",
    commands.CancelBuild,
    MG,
    SMO,
    "end a build",
    reply=builds.BuildRecord,
    answer_bytes=RECORDS_BYTES,
)
PARK_BUILD = Subject(
    "park build",
    "data.command.park",
    commands.ParkBuild,
    MG,
    SMO,
    "a build gives its lanes back and waits",
    reply=builds.BuildRecord,
    answer_bytes=RECORDS_BYTES,
)
RESUME_BUILD = Subject(
    "resume build",
    "data.command.resume",
    commands.ResumeBuild,
    MG,
    SMO,
    "a parked or held build goes on",
    reply=builds.BuildRecord,
    answer_bytes=RECORDS_BYTES,
)
PRIORITISE_BUILD = Subject(
    "prioritise build",
    "data.command.prioritise",
    commands.PrioritiseBuild,
    MG,
    SMO,
    "a build gets another class in the queue",
    reply=builds.BuildRecord,
    answer_bytes=RECORDS_BYTES,
)
QUERY_BUILDS = Subject(
    "query builds",
    "data.command.query",
    commands.BuildQuery,
    MG,
    SMO,
    "builds and how far they are",
    reply=commands.BuildList,
    answer_bytes=RECORDS_BYTES,
)
DELETE_VERSION = Subject(
    "delete version",
    "data.command.delete",
    commands.DeleteVersion,
    MG,
    SMO,
    "remove a data set's version",
    reply=Ack,
)
BUILD_RECORD = Subject(
    "build record",
    "{build}",
    builds.BuildRecord,
    SMO,
    SMO | MG | AAM | BROKER | CLIENT,
    "the orchestrator's builds",
    bucket="builds",
)
BUILD_EVENT = Subject(
    "build event",
    "data.event.{build}",
    builds.BuildEvent,
    SMO,
    MG | CLIENT,
    "what happened to a build, in order",
    stream="JOBS",
    delivery=STREAM,
)
UNIT_COMMIT = Subject(
    "unit commit",
    "{scope}.{phase}.{unit}",
    builds.UnitCommit,
    SMO,
    SMO,
    "the ledger of builds: what each unit gave, written once",
    bucket="units",
)
DATA_SET_VERSION = Subject(
    "data set version",
    "{name}.{version}",
    builds.DataSetVersion,
    SMO,
    SMO | MG | AAM,
    "versions of data sets; a new one is a compare-and-set",
    bucket="data_sets",
)
PREPARE_UNIT = Subject(
    "prepare unit",
    "cluster.{agent}.prepare",
    commands.PrepareUnit,
    SMO,
    MIC,
    "do a unit of a build",
    reply=Ack,
)
UNIT_PREPARED = Subject(
    "unit prepared",
    "data.prepared.{agent}.{build}",
    commands.UnitPrepared,
    MIC,
    SMO,
    "what a unit gave",
    reply=Ack,
    names=Names.SENDER,
)
REMOVE_OBJECTS = Subject(
    "remove objects",
    "cluster.{agent}.remove_objects",
    commands.RemoveObjects,
    SMO,
    MIC,
    "files of a build that nobody refers to go",
    reply=Ack,
)
