"""Model services: their records, orders about them, and what gateways and instances say about sessions."""

from __future__ import annotations

from bus.subject_row import Names, Subject
from bus.subjects.table import AAM, FM, MG, MI, RECORDS_BYTES, SMO
from schemas.errors import Ack
from schemas.services import batches, figures, generation, keeping, model_service, outcomes, prediction

__all__ = [
    "BATCH",
    "BATCH_UNIT",
    "BIND_SESSION",
    "CONSENT",
    "DEPLOY_VERSION",
    "END_SESSION",
    "GENERATION",
    "KEPT_COLLECTION",
    "KEPT_ITEM",
    "MODEL_SERVICE",
    "ORDER_SERVICE",
    "PREDICT",
    "PSEUDONYM_KEY",
    "ROWS_NEEDED",
    "SERVICES_QUERY",
    "SERVICE_FIGURES",
    "SERVICE_OUTCOMES",
    "SERVICE_SALT",
    "STORED_FILE",
    "WAVE_TOKENS",
]

MODEL_SERVICE = Subject(
    "model service",
    "{service}",
    model_service.ModelService,
    SMO,
    SMO | MG | FM | AAM,
    "a service with its versions, their state, and the traffic that each gets",
    bucket="services",
)
DEPLOY_VERSION = Subject(
    "deploy version",
    "service.command.deploy",
    model_service.DeployVersion,
    MG,
    SMO,
    "run a version of a model service",
    reply=model_service.ModelService,
    answer_bytes=RECORDS_BYTES,
)
ORDER_SERVICE = Subject(
    "order service",
    "service.command.order",
    model_service.OrderService,
    MG,
    SMO,
    "change a service: traffic, promotion, rollback, shadow, scale, stop",
    reply=model_service.ModelService,
    answer_bytes=RECORDS_BYTES,
)
SERVICES_QUERY = Subject(
    "services query",
    "service.query",
    model_service.ServiceQuery,
    MG,
    SMO,
    "which services there are",
    reply=model_service.ServiceList,
    answer_bytes=RECORDS_BYTES,
)
SERVICE_FIGURES = Subject(
    "service figures",
    "telemetry.service.{gateway}",
    figures.ServiceFigures,
    MG,
    MG | SMO,
    "what a gateway has answered for each version: counts, times and loads, no content",
)
GENERATION = Subject(
    "generation",
    "{id}",
    generation.Generation,
    MG,
    MG,
    "a request that is being answered, and by which gateway",
    bucket="generations",
)
BIND_SESSION = Subject(
    "bind session",
    "serve.bind.{job}.{sid}",
    generation.BindSession,
    MG,
    MI,
    "work for this session, on this path",
    reply=generation.SessionBound,
)
END_SESSION = Subject(
    "end session",
    "serve.end.{job}.{sid}",
    generation.EndSession,
    MG,
    MI,
    "forget this session",
    reply=Ack,
)
ROWS_NEEDED = Subject(
    "rows needed",
    "serve.need.{job}.{sid}",
    generation.RowsNeeded,
    MI,
    MI,
    "of this session I lack rows from here on",
    names=Names.RECEIVER,
)
WAVE_TOKENS = Subject(
    "wave tokens",
    "serve.tokens.{job}.{sid}",
    generation.WaveTokens,
    MI,
    MG | MI,
    "the tokens of one wave, of all its sessions",
    stream="GENERATIONS",
)
STORED_FILE = Subject(
    "stored file",
    "file.{file}",
    batches.StoredFile,
    MG,
    MG,
    "a file of a user's requests, or of their answers",
    bucket="batches",
)
BATCH = Subject(
    "batch",
    "batch.{batch}",
    batches.BatchRecord,
    MG,
    MG,
    "many requests from a file, and which gateway answers them",
    bucket="batches",
)
BATCH_UNIT = Subject(
    "batch unit",
    "unit.{batch}.{unit}",
    batches.BatchUnit,
    MG,
    MG,
    "a batch's requests that are answered; created once",
    bucket="batches",
)
PREDICT = Subject(
    "predict",
    "serve.predict.{job}.{sid}",
    prediction.Predict,
    MG,
    MI,
    "named tensors in, named tensors out",
    reply=prediction.Predicted,
)
CONSENT = Subject(
    "consent",
    "consent.{service}.{subject}",
    keeping.Consent,
    MG,
    MG,
    "whether requests of a subject may be kept, by its pseudonym",
    bucket="consents",
)
PSEUDONYM_KEY = Subject(
    "pseudonym key",
    "key.{name}",
    keeping.PseudonymKey,
    MG,
    MG,
    "by which gateways make pseudonyms; written once",
    bucket="consents",
)
KEPT_COLLECTION = Subject(
    "kept collection",
    "collection.{service}.{number}",
    keeping.KeptCollection,
    MG,
    MG,
    "a file of kept requests that jobs train on, or that it was removed",
    bucket="consents",
)
KEPT_ITEM = Subject(
    "kept item",
    "{service}.{user}.{subject}.{item}",
    keeping.KeptItem,
    MG,
    MG,
    "a request that is kept until its end date, redacted; its service and its user say so",
    bucket="kept",
)
SERVICE_OUTCOMES = Subject(
    "service outcomes",
    "telemetry.outcomes.{gateway}",
    outcomes.ServiceOutcomes,
    MG,
    SMO | FM,
    "how requests of a service ended, while there are versions to compare",
    stream="TELEMETRY",
)
SERVICE_SALT = Subject(
    "service salt",
    "{scope}",
    outcomes.ServiceSalt,
    MG,
    MG,
    "what users' buckets are keyed with, so that nobody picks a version",
    bucket="service_salt",
)
