"""Jobs and the gateways' request interface; calls that brokers make."""

from __future__ import annotations

from bus.subject_row import Names, Subject
from bus.subjects.table import ALL, BROKER, CLIENT, FM, MG, MI, MIC, PROVISIONER, RECORDS_BYTES, SMO, STREAM
from schemas import (
    arrays,
    automation,
    broker,
    cluster,
    feeds,
    gateway_api,
    job,
    module_status,
    plans,
    policy,
    queue,
    recut,
)
from schemas.errors import Ack

__all__ = [
    "BROKER_REQUEST",
    "CANCEL",
    "CANCEL_RESERVATION",
    "CHANGE_STAGE",
    "CORDON_PLACE",
    "DATASET_OWNER",
    "DOOR",
    "FEED",
    "FEED_PIECE",
    "FEED_SEGMENT",
    "JOB_EVENT",
    "JOB_RECORD",
    "KEPT_ANSWER",
    "LEAVE_NODE",
    "MAKE_PLAN",
    "MESH_QUERY",
    "ORDER_ARRAY",
    "PARK",
    "PRIORITISE",
    "QUERY",
    "QUEUE_CAPACITY",
    "QUEUE_QUERY",
    "RECUT",
    "RESERVATION",
    "RESERVATIONS_QUERY",
    "RESERVE_SLOTS",
    "RESUME",
    "SCALE",
    "SUBMIT",
    "SUBMIT_ARRAY",
    "UNCORDON_PLACE",
    "UPLOADS",
]

DOOR = Subject(
    "door",
    "door.{action}",
    gateway_api.DoorRequest,
    CLIENT,
    MG,
    "a client's request at any gateway (queue group)",
    reply=gateway_api.JobList,
    other_replies=(
        *(Ack, arrays.JobArray, gateway_api.DoorKey, gateway_api.MeshStatus),
        *(plans.PlanMade, recut.RecutAnswer, automation.AutomationStatus),
        *(module_status.ModuleAnswer, policy.ModuleLifecycle, module_status.ModuleList),
    ),
    answer_bytes=RECORDS_BYTES,
)
KEPT_ANSWER = Subject(
    "kept answer",
    "{key}",
    gateway_api.KeptAnswer,
    MG,
    MG,
    "what was answered to a request with an idempotency key",
    bucket="answers",
)
DATASET_OWNER = Subject(
    "dataset owner", "{key}", gateway_api.DatasetOwner, MG, MG, "who stored which data set", bucket="datasets"
)
UPLOADS = Subject(
    "uploads", "{key}", gateway_api.UserUploads, MG, MG, "room for data sets on their way", bucket="uploads"
)
FEED = Subject(
    "feed",
    "feed.{feed}",
    feeds.FeedRecord,
    MG,
    MI | SMO | MG,
    "a feed: whose, with which fields",
    bucket="feeds",
)
FEED_SEGMENT = Subject(
    "feed segment",
    "segment.{uid}.{number}",
    feeds.FeedSegment,
    MG,
    MI | SMO | MG,
    "what one push added to a feed, or its end; created once",
    bucket="feeds",
)
FEED_PIECE = Subject(
    "feed piece",
    "{uid}.{digest}",
    feeds.FeedPieceData,
    MG,
    MI | MG,
    "some records of a feed, under the SHA-256 of their bytes",
    bucket="feed_records",
)
SUBMIT = Subject(
    "submit",
    "job.command.submit",
    gateway_api.SubmitJob,
    MG,
    SMO,
    "queue a job",
    reply=job.JobRecord,
    answer_bytes=RECORDS_BYTES,
)
SUBMIT_ARRAY = Subject(
    "submit array",
    "job.command.submit_array",
    arrays.SubmitArray,
    MG,
    SMO,
    "queue the jobs of an array, all or none",
    reply=arrays.JobArray,
    answer_bytes=RECORDS_BYTES,
)
ORDER_ARRAY = Subject(
    "order array",
    "job.command.order_array",
    arrays.OrderArray,
    MG,
    SMO,
    "cancel, park, resume or prioritise the jobs of an array",
    reply=arrays.JobArray,
    answer_bytes=RECORDS_BYTES,
)
SCALE = Subject(
    "scale", "job.command.scale", gateway_api.ScaleJob, MG, SMO, "more or fewer replicas", reply=Ack
)
CHANGE_STAGE = Subject(
    "change stage",
    "job.command.change_stage",
    gateway_api.ChangeStage,
    MG,
    SMO,
    "an instance is to change its stage",
    reply=Ack,
)
RECUT = Subject(
    "recut",
    "job.command.recut",
    recut.RecutJob,
    MG,
    SMO,
    "cut the layers of a running job anew",
    reply=recut.RecutAnswer,
)
CANCEL = Subject(
    "cancel",
    "job.command.cancel",
    gateway_api.CancelJob,
    MG,
    SMO,
    "end a job",
    reply=job.JobRecord,
    answer_bytes=RECORDS_BYTES,
)
PARK = Subject(
    "park",
    "job.command.park",
    gateway_api.ParkJob,
    MG,
    SMO,
    "a job gives its slots back and waits",
    reply=job.JobRecord,
    answer_bytes=RECORDS_BYTES,
)
RESUME = Subject(
    "resume",
    "job.command.resume",
    gateway_api.ResumeJob,
    MG,
    SMO,
    "a parked job goes on",
    reply=job.JobRecord,
    answer_bytes=RECORDS_BYTES,
)
PRIORITISE = Subject(
    "prioritise",
    "job.command.prioritise",
    gateway_api.PrioritiseJob,
    MG,
    SMO,
    "a job gets another class in the queue",
    reply=job.JobRecord,
    answer_bytes=RECORDS_BYTES,
)
QUERY = Subject(
    "query",
    "job.command.query",
    gateway_api.JobQuery,
    MG,
    SMO,
    "jobs and records",
    reply=gateway_api.JobList,
    answer_bytes=RECORDS_BYTES,
)
QUEUE_QUERY = Subject(
    "queue query",
    "job.command.queue",
    queue.QueueQuery,
    MG,
    SMO,
    "who waits for slots, and why",
    reply=queue.QueueStatus,
    answer_bytes=RECORDS_BYTES,
)
QUEUE_CAPACITY = Subject(
    "queue capacity",
    "queue.event.capacity",
    queue.QueueCapacity,
    SMO,
    CLIENT,
    "slots that the queue wants beside the free ones, by kind; on change, and every 10 s",
)
MAKE_PLAN = Subject(
    "make plan",
    "job.command.plan",
    plans.MakePlan,
    MG,
    SMO,
    "a plan of a job that is not there yet, on the mesh's slots",
    reply=plans.PlanMade,
    answer_bytes=RECORDS_BYTES,
)
RESERVATIONS_QUERY = Subject(
    "reservations query",
    "job.command.reservations",
    queue.ReservationsQuery,
    MG,
    SMO,
    "which slots are kept, and for whom",
    reply=queue.Reservations,
)
RESERVE_SLOTS = Subject(
    "reserve slots",
    "job.command.reserve",
    queue.ReserveSlots,
    MG,
    SMO,
    "slots are kept from one time until another",
    reply=queue.Reservations,
)
CANCEL_RESERVATION = Subject(
    "cancel reservation",
    "job.command.cancel_reservation",
    queue.CancelReservation,
    MG,
    SMO,
    "they are kept no more",
    reply=queue.Reservations,
)
RESERVATION = Subject(
    "reservation",
    "{reservation}",
    queue.SlotsReserved,
    SMO,
    SMO,
    "slots that are kept, and until when",
    bucket="reservations",
)
MESH_QUERY = Subject(
    "mesh query",
    "mesh.query",
    gateway_api.MeshQuery,
    MG,
    SMO,
    "the mesh at a glance",
    reply=gateway_api.MeshStatus,
    answer_bytes=RECORDS_BYTES,
)
CORDON_PLACE = Subject(
    "cordon place",
    "mesh.command.cordon",
    gateway_api.CordonPlace,
    MG,
    SMO,
    "no new instances there; drain: and none of the old",
    reply=gateway_api.Cordons,
)
LEAVE_NODE = Subject(
    "leave node",
    "mesh.command.leave",
    cluster.LeaveNotice,
    MG | PROVISIONER,
    SMO,
    "a node is to leave, or will, by a deadline: its instances move, then its agent ends",
    reply=gateway_api.Cordons,
)
UNCORDON_PLACE = Subject(
    "uncordon place",
    "mesh.command.uncordon",
    gateway_api.UncordonPlace,
    MG,
    SMO,
    "new instances may go there again",
    reply=gateway_api.Cordons,
)
JOB_RECORD = Subject("job record", "{job}", job.JobRecord, SMO, ALL, "the orchestrator's jobs", bucket="jobs")
JOB_EVENT = Subject(
    "job event",
    "job.event.{job}",
    job.JobEvent,
    SMO,
    ALL,
    "what happened to a job, in order",
    stream="JOBS",
    delivery=STREAM,
)
BROKER_REQUEST = Subject(
    "broker request",
    "broker.{kind}.{scope}.{name}",
    broker.BrokerRequest,
    MI | MIC | FM | CLIENT,
    BROKER,
    "a call of JetStream, made by a broker for who may not make it (queue group)",
    reply=broker.BrokerAnswer,
    names=Names.SENDER,
)
