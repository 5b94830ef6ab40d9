"""Jobs and the gateways' request interface; calls that brokers make."""

from __future__ import annotations

from bus.subject import Names
from bus.subjects.table import (
    ALL,
    BROKER,
    CLIENT,
    FM,
    KV,
    MG,
    MI,
    MIC,
    RECORDS_BYTES,
    REQUEST,
    SMO,
    STREAM,
    row,
)
from schemas import broker, door, job, module_status, policy
from schemas.errors import Ack

__all__ = [
    "BROKER_REQUEST",
    "CANCEL",
    "CHANGE_STAGE",
    "CORDON_PLACE",
    "DATASET_OWNER",
    "DOOR",
    "JOB_EVENT",
    "JOB_RECORD",
    "KEPT_ANSWER",
    "MESH_QUERY",
    "PARK",
    "QUERY",
    "RESUME",
    "SCALE",
    "SUBMIT",
    "UNCORDON_PLACE",
    "UPLOADS",
]

DOOR = row(
    "door",
    "door.{action}",
    door.DoorRequest,
    CLIENT,
    MG,
    REQUEST,
    "a client's request at any gateway (queue group)",
    reply=door.JobList,
    other_replies=(
        *(Ack, door.DoorKey, door.MeshStatus),
        *(module_status.ModuleAnswer, policy.ModuleLifecycle, module_status.ModuleList),
    ),
    answer_bytes=RECORDS_BYTES,
)
KEPT_ANSWER = row(
    "kept answer",
    "{key}",
    door.KeptAnswer,
    MG,
    MG,
    KV,
    "what was answered to a request with an idempotency key",
    bucket="answers",
)
DATASET_OWNER = row(
    "dataset owner", "{key}", door.DatasetOwner, MG, MG, KV, "who stored which data set", bucket="datasets"
)
UPLOADS = row(
    "uploads", "{key}", door.UserUploads, MG, MG, KV, "room for data sets on their way", bucket="uploads"
)
SUBMIT = row(
    "submit",
    "job.command.submit",
    door.SubmitJob,
    MG,
    SMO,
    REQUEST,
    "queue a job",
    reply=job.JobRecord,
    answer_bytes=RECORDS_BYTES,
)
SCALE = row(
    "scale", "job.command.scale", door.ScaleJob, MG, SMO, REQUEST, "more or fewer replicas", reply=Ack
)
CHANGE_STAGE = row(
    "change stage",
    "job.command.change_stage",
    door.ChangeStage,
    MG,
    SMO,
    REQUEST,
    "an instance is to change its stage",
    reply=Ack,
)
CANCEL = row(
    "cancel",
    "job.command.cancel",
    door.CancelJob,
    MG,
    SMO,
    REQUEST,
    "end a job",
    reply=job.JobRecord,
    answer_bytes=RECORDS_BYTES,
)
PARK = row(
    "park",
    "job.command.park",
    door.ParkJob,
    MG,
    SMO,
    REQUEST,
    "a job gives its slots back and waits",
    reply=job.JobRecord,
    answer_bytes=RECORDS_BYTES,
)
RESUME = row(
    "resume",
    "job.command.resume",
    door.ResumeJob,
    MG,
    SMO,
    REQUEST,
    "a parked job goes on",
    reply=job.JobRecord,
    answer_bytes=RECORDS_BYTES,
)
QUERY = row(
    "query",
    "job.command.query",
    door.JobQuery,
    MG,
    SMO,
    REQUEST,
    "jobs and records",
    reply=door.JobList,
    answer_bytes=RECORDS_BYTES,
)
MESH_QUERY = row(
    "mesh query",
    "mesh.query",
    door.MeshQuery,
    MG,
    SMO,
    REQUEST,
    "the mesh at a glance",
    reply=door.MeshStatus,
    answer_bytes=RECORDS_BYTES,
)
CORDON_PLACE = row(
    "cordon place",
    "mesh.command.cordon",
    door.CordonPlace,
    MG,
    SMO,
    REQUEST,
    "no new instances there; drain: and none of the old",
    reply=door.Cordons,
)
UNCORDON_PLACE = row(
    "uncordon place",
    "mesh.command.uncordon",
    door.UncordonPlace,
    MG,
    SMO,
    REQUEST,
    "new instances may go there again",
    reply=door.Cordons,
)
JOB_RECORD = row("job record", "{job}", job.JobRecord, SMO, ALL, KV, "the orchestrator's jobs", bucket="jobs")
JOB_EVENT = row(
    "job event",
    "job.event.{job}",
    job.JobEvent,
    SMO,
    ALL,
    STREAM,
    "what happened to a job, in order",
    stream="JOBS",
)
BROKER_REQUEST = row(
    "broker request",
    "broker.{kind}.{scope}.{name}",
    broker.BrokerRequest,
    MI + MIC + FM + CLIENT,
    BROKER,
    REQUEST,
    "a call of JetStream, made by a broker for who may not make it (queue group)",
    reply=broker.BrokerAnswer,
    names=Names.SENDER,
)
