"""The one table of subjects: each bound to its schema, its direction, and its delivery.

No string literal of a subject stands anywhere else. The tap's decoding, the documentation
(`docs/protocol.md`), and the permissions of each identity (`bus.guard.permissions`) are derived from this
table.
"""

from __future__ import annotations

from dataclasses import replace

from bus.subject import ANSWER_BYTES, Delivery, Names, Subject
from schemas import (
    access,
    audit,
    broker,
    checkpoint,
    cluster,
    data_plane,
    door,
    fault,
    files,
    job,
    leadership,
    module_status,
    observation,
    peer_copy,
    policy,
    registry,
    secrets,
    signals,
    step,
    store,
    task_graph,
    unreadable,
)
from schemas import telemetry as tm
from schemas.base import Message
from schemas.envelope import EntityKind as K
from schemas.errors import Ack

DISCONNECTED = "dmsc.server.disconnect"
"""Where the server itself tells of closed connections, in JSON of its own: see
`bus.messaging.disconnects`."""

RECORDS_BYTES = 8 << 20
"""Of an answer by which the control plane gives whole records: as much as a message may have."""
STEP_BYTES = 2 << 20
"""Of an account of a step: 4,096 microbatches fit, with long names."""


SUBJECTS: list[Subject] = []
"""All rows, in the order of the draft's flow."""


def _row(
    name: str,
    pattern: str,
    schema: type[Message],
    senders: tuple[K, ...],
    receivers: tuple[K, ...],
    delivery: Delivery,
    about: str,
    *,
    reply: type[Message] | None = None,
    stream: str | None = None,
    bucket: str | None = None,
    names: Names | None = None,
    answer_bytes: int = ANSWER_BYTES,
) -> Subject:
    row = Subject(
        name,
        pattern,
        schema,
        frozenset(senders),
        frozenset(receivers),
        delivery,
        about,
        reply,
        stream,
        bucket,
        names,
        answer_bytes,
    )
    SUBJECTS.append(row)
    return row


SRD, MG, AAM, SR, SMO, MIC, MI, FM, CLIENT, BROKER = (
    (K.SERVICE_REGISTRY,),
    (K.GATEWAY,),
    (K.AUTHORIZER,),
    (K.ROUTER,),
    (K.ORCHESTRATOR,),
    (K.CLUSTER,),
    (K.INSTANCE,),
    (K.FUNCTIONAL_MODULE,),
    (K.CLIENT,),
    (K.BROKER,),
)
ALL = tuple(K)
CORE, REQUEST, STREAM, KV = Delivery.CORE, Delivery.REQUEST, Delivery.STREAM, Delivery.KEY_VALUE

# --- the five signals (draft §4.3) ---------------------------------------------------------------------
REGISTRATION = _row(
    "registration",
    "signal.registration.{sid}",
    signals.Registration,
    MI + MG + SR + MIC + AAM + SMO + FM + BROKER + SRD,
    SRD,
    REQUEST,
    "Type 1: a service registers or updates its record",
    reply=signals.RegistrationLease,
    names=Names.SENDER,
)
ADVERTISEMENT = _row(
    "advertisement",
    "signal.advertisement",
    signals.RouteAdvertisement,
    SRD,
    SR + MG + SMO + FM,
    CORE,
    "Type 2: reachable instances; deltas at once, full state periodically",
    stream="SIGNALS",
)
ACCESS = _row(
    "access",
    "signal.access.{gateway}",
    signals.AccessRequest,
    MG,
    AAM,
    REQUEST,
    "Type 3: may this bearer do that?",
    reply=signals.AccessDecision,
    names=Names.SENDER,
)
USER_COMMAND = _row(
    "user command",
    "access.users.{gateway}",
    access.UserCommand,
    MG,
    AAM,
    REQUEST,
    "users and their tokens: add, list, token, revoke, remove",
    reply=access.UserAnswer,
    answer_bytes=RECORDS_BYTES,
    names=Names.SENDER,
)
EXPLAIN_ACCESS = _row(
    "explain access",
    "access.explain.{gateway}",
    access.ExplainAccess,
    MG,
    AAM,
    REQUEST,
    "which rule lets whom do what",
    reply=access.AccessExplanation,
    names=Names.SENDER,
)
USER_RECORD = _row(
    "user record",
    "{name}",
    access.StoredUser,
    AAM,
    AAM,
    KV,
    "the users that have tokens which expire",
    bucket="users",
)
SECRET = _row(
    "secret",
    "{user}.{name}",
    secrets.StoredSecret,
    MG + SMO,
    MG + SMO,
    KV,
    "URLs with credentials that jobs name, sealed to the orchestrators",
    bucket="secrets",
)
REVOCATION = _row(
    "revocation",
    "{kind}.{id}",
    access.Revocation,
    AAM,
    AAM + MG,
    KV,
    "tokens, and users, that open nothing any more",
    bucket="revocations",
)
AUDIT = _row(
    "audit",
    "audit.{authorizer}",
    audit.AuditRecord,
    AAM,
    AAM + MG,
    STREAM,
    "refusals and privileged acts, each record with the hash of the one before",
    stream="AUDIT",
)
COMPUTE = _row(
    "compute",
    "signal.compute.{cluster}",
    signals.ComputeNotification,
    SR,
    MG + SR + FM,
    CORE,
    "Type 4: load, heterogeneity and latency of a cluster's instances",
    stream="SIGNALS",
)
QOS_REPORT = _row(
    "qos report",
    "signal.qos.report.{sid}",
    signals.QosReport,
    MG + SR,
    SMO + FM,
    CORE,
    "Type 5 up: a cluster's throughput, latency, errors",
    stream="SIGNALS",
)
QOS_POLICY = _row(
    "qos policy",
    "signal.qos.policy.{sid}",
    signals.CommunicationPolicy,
    SMO,
    MG + SR,
    REQUEST,
    "Type 5 down: how a job's traffic is to flow",
    reply=Ack,
)

# --- registry ------------------------------------------------------------------------------------------
INSTANCE_RECORD = _row(
    "instance record",
    "registry.instance_record.{agent}.{sid}",
    signals.Registration,
    MIC,
    SRD,
    REQUEST,
    "Type 1 of an instance that died before it could register, by its node agent",
    reply=signals.RegistrationLease,
    names=Names.SENDER,
)
INSTANCE_STATE = _row(
    "instance state",
    "registry.instance_state.{agent}.{sid}",
    registry.StateChange,
    MIC,
    SRD,
    REQUEST,
    "how an instance ended, or that it stands still, by its node agent",
    reply=Ack,
    names=Names.SENDER,
)
HEARTBEAT = _row(
    "heartbeat", "registry.heartbeat.{sid}", registry.Heartbeat, ALL, SRD, CORE, "alive, once a second"
)
STATE_CHANGE = _row(
    "state change",
    "registry.state.{sid}",
    registry.StateChange,
    MI + MG + SR + MIC + AAM + SMO + FM + BROKER + SRD,
    SRD,
    REQUEST,
    "an incarnation's state moved",
    reply=Ack,
    names=Names.SENDER,
)
RESOLVE = _row(
    "resolve",
    "registry.resolve",
    registry.Resolve,
    ALL,
    SRD,
    REQUEST,
    "discovery by content, in pages; without filters: a snapshot",
    reply=registry.Resolved,
)
RELEASE_JOB = _row(
    "release job",
    "registry.release",
    registry.ReleaseJob,
    SMO,
    SRD,
    REQUEST,
    "§4.4(6): forget a job's records, routes and ports",
    reply=Ack,
)
REGISTRY_RECORD = _row(
    "registry record",
    "{sid}",
    registry.ServiceRecord,
    SRD,
    ALL,
    KV,
    "the registry's records",
    bucket="registry",
)

# --- mesh: MG, SR and MIC with the SMO -----------------------------------------------------------------
MESH_REGISTRATION = _row(
    "mesh registration",
    "mesh.registration.{sid}",
    signals.NodeRegistration,
    MG + SR,
    SMO,
    REQUEST,
    "§4.4(1): MG and SR register with the orchestrator",
    reply=Ack,
    names=Names.SENDER,
)
NODE_STATUS = _row(
    "node status",
    "mesh.node.{sid}",
    cluster.NodeStatus,
    MIC,
    SMO,
    REQUEST,
    "a node agent registers its slots, and repeats it when they change",
    reply=Ack,
    names=Names.SENDER,
)
TERMINATION = _row(
    "termination",
    "mesh.termination.{job}.{sid}",
    signals.TerminationReport,
    MG + SR,
    SMO + SRD,
    CORE,
    "§4.4(6): a job's communication has ended here",
    stream="SIGNALS",
)
ROUTE_TABLE = _row(
    "route table",
    "{job}.{cluster}.{stage}",
    data_plane.RouteTable,
    SR,
    MI + MG,
    KV,
    "weighted next hops of one stage for the senders of one cluster",
    bucket="routes",
    names=Names.SENDER,
)

LEADERSHIP = _row(
    "leadership",
    "{role}",
    leadership.Leadership,
    SMO + SRD,
    SMO + SRD,
    KV,
    "which of several orchestrators, or registries, leads, and its term; by compare-and-set",
    bucket="leadership",
)
LEADER = _row(
    "leader",
    "mesh.leader",
    leadership.Leadership,
    SMO,
    MG + SR + MIC + FM,
    CORE,
    "a new orchestrator leads: register with it, it knows only what it overheard",
    stream="SIGNALS",
)

# --- node agents (MIC) ---------------------------------------------------------------------------------
START_INSTANCE = _row(
    "start instance",
    "cluster.{agent}.start",
    cluster.InstanceStart,
    SMO,
    MIC,
    REQUEST,
    "start a unit in a slot",
    reply=cluster.InstanceStarted,
)
LINK_SECRET = _row(
    "link secret",
    "{job}",
    cluster.LinkSecret,
    SMO,
    SMO,
    KV,
    "by which a job's instances know each other on tensor links",
    bucket="link_secrets",
)
STOP_INSTANCE = _row(
    "stop instance",
    "cluster.{agent}.stop",
    cluster.InstanceStop,
    SMO,
    MIC,
    REQUEST,
    "end an incarnation",
    reply=Ack,
)
JUDGE = _row(
    "judge",
    "cluster.{agent}.judge",
    cluster.Judge,
    SMO,
    MIC,
    REQUEST,
    "§5.5: how is this instance, how far does the fault reach?",
    reply=cluster.Judgement,
)
ANALYSE = _row(
    "analyse",
    "cluster.{agent}.analyse",
    cluster.Analyse,
    SMO,
    MIC,
    REQUEST,
    "§5.3: analyse a job's model in a short-lived worker",
    reply=Ack,
)
STRIKE = _row(
    "strike",
    "cluster.{agent}.strike",
    cluster.Strike,
    MG,
    MIC,
    REQUEST,
    "an operator's fault: kill, freeze or resume an instance",
    reply=cluster.Struck,
)
CORDON = _row(
    "cordon",
    "{agent}.{slot}",
    cluster.Cordon,
    SMO,
    SMO,
    KV,
    "where no new instances go; `slot` is a number, or `node` for all of them",
    bucket="cordons",
)
FORGET_TOPOLOGY = _row(
    "forget topology",
    "cluster.{agent}.forget",
    cluster.ForgetTopology,
    SMO,
    MIC,
    REQUEST,
    "§4.4(6): drop a job's topology",
    reply=task_graph.TopologyReleased,
)
WRITE_SAMPLE = _row(
    "write sample",
    "cluster.{agent}.sample",
    cluster.WriteSample,
    SMO,
    MIC,
    REQUEST,
    "let the trained model write a short text",
    reply=Ack,
)
READ_FILES = _row(
    "read files",
    "cluster.{agent}.read",
    files.ReadFiles,
    MG + SMO,
    MIC,
    REQUEST,
    "weights and checkpoints below a job's URL, which a node opens",
    reply=files.FilesRead,
)
REMOVE_CHECKPOINTS = _row(
    "remove checkpoints",
    "cluster.{agent}.remove",
    files.RemoveCheckpoints,
    SMO,
    MIC,
    REQUEST,
    "what is unfinished or too old of a job's checkpoints goes",
    reply=Ack,
)
TOPOLOGY = _row(
    "topology",
    "topology.model.{agent}.{job}",
    task_graph.ModelTopology,
    MIC,
    SMO,
    REQUEST,
    "§5.3: the analysed layer graph",
    reply=Ack,
    names=Names.SENDER,
)
ANALYSIS_FAILED = _row(
    "analysis failed",
    "topology.failed.{agent}.{job}",
    cluster.AnalysisFailed,
    MIC,
    SMO,
    REQUEST,
    "the job can't be trained as written",
    reply=Ack,
    names=Names.SENDER,
)
SAMPLE_WRITTEN = _row(
    "sample written",
    "topology.sample.{agent}.{job}",
    cluster.SampleWritten,
    MIC,
    SMO,
    REQUEST,
    "what the trained model wrote",
    reply=Ack,
    names=Names.SENDER,
)

# --- the step transaction ------------------------------------------------------------------------------
STEP_BEGIN = _row(
    "step begin",
    "step.begin.{job}.{gateway}",
    step.StepBegin,
    SMO,
    MG,
    REQUEST,
    "dispatch these microbatches",
    reply=Ack,
)
STEP_DISPATCH = _row(
    "step dispatch",
    "step.dispatch.{job}.{sid}",
    step.MicrobatchDispatch,
    MG,
    MI,
    REQUEST,
    "produce these microbatches and send them on",
    reply=Ack,
)
STEP_CLAIM = _row(
    "step claim",
    "step.claim.{job}.{sid}",
    step.MicrobatchClaim,
    MI,
    SMO + MG + FM,
    CORE,
    "this microbatch is in my sum",
    stream="STEPS",
)
STEP_STATUS = _row(
    "step status",
    "step.status.{job}.{sid}",
    step.StepStatus,
    SMO,
    MI,
    REQUEST,
    "what do you hold of this step?",
    reply=step.StepStatusReply,
    answer_bytes=STEP_BYTES,
)
GROUP_FORM = _row(
    "group form",
    "step.group.{job}.{sid}",
    step.GroupForm,
    SMO,
    MI,
    REQUEST,
    "build the reduction group of this generation",
    reply=step.GroupFormed,
)
STEP_PREPARE = _row(
    "step prepare",
    "step.prepare.{job}.{sid}",
    step.StepPrepare,
    SMO,
    MI,
    REQUEST,
    "all-reduce and vote",
    reply=step.StepVote,
)
STEP_DECISION = _row(
    "step decision", "{job}", step.StepDecision, SMO, SMO, KV, "the commit point", bucket="steps"
)
STEP_COMMIT = _row(
    "step commit",
    "step.commit.{job}.{sid}",
    step.StepCommit,
    SMO,
    MI,
    REQUEST,
    "apply the decision",
    reply=step.StepApplied,
)
STEP_ABORT = _row(
    "step abort",
    "step.abort.{job}.{sid}",
    step.StepAbort,
    SMO,
    MI,
    REQUEST,
    "forget this step below this attempt",
    reply=step.StepAborted,
)
STEP_FENCE = _row(
    "step fence",
    "step.fence.{job}.{sid}",
    step.StepFence,
    SMO,
    MI,
    REQUEST,
    "these incarnations count for nothing; what do you hold?",
    reply=step.StepFenced,
    answer_bytes=STEP_BYTES,
)
STEP_ASSIGN = _row(
    "step assign",
    "step.assign.{job}.{sid}",
    step.StepAssign,
    SMO,
    MI,
    REQUEST,
    "mended paths of a lost owner's microbatches",
    reply=Ack,
)
ADOPT = _row(
    "adopt",
    "step.adopt.{job}.{sid}",
    step.Adopt,
    SMO,
    MI,
    REQUEST,
    "a new orchestrator leads; where are you?",
    reply=step.Adopted,
)
STATE_SEND = _row(
    "state send",
    "state.send.{job}.{sid}",
    step.StateSend,
    SMO,
    MI,
    REQUEST,
    "stream your state to a newcomer",
    reply=step.StateReady,
)
STATE_WAIT = _row(
    "state wait",
    "state.wait.{job}.{sid}",
    step.StateWait,
    SMO,
    MI,
    REQUEST,
    "answer once you hold this version",
    reply=step.StateReady,
)
STATE_RESTORE = _row(
    "state restore",
    "state.restore.{job}.{sid}",
    step.StateRestore,
    SMO,
    MI,
    REQUEST,
    "take this version from a checkpoint or the seed",
    reply=step.StateReady,
)
COPY_TO = _row(
    "copy to",
    "state.keep.{job}.{sid}",
    peer_copy.CopyTo,
    SMO,
    MI,
    REQUEST,
    "keep a copy of your state at this peer",
    reply=Ack,
)
COPY_STATUS = _row(
    "copy status",
    "state.held.{job}.{sid}",
    peer_copy.CopyStatus,
    SMO,
    MI,
    REQUEST,
    "which version does the copy that you hold reach?",
    reply=peer_copy.CopyHeld,
)
COPY_SEND = _row(
    "copy send",
    "state.copy.{job}.{sid}",
    peer_copy.CopySend,
    SMO,
    MI,
    REQUEST,
    "send a newcomer the copy of its stage",
    reply=step.StateReady,
)
CHECKPOINT = _row(
    "checkpoint",
    "state.checkpoint.{job}.{sid}",
    checkpoint.CheckpointOrder,
    SMO,
    MI,
    REQUEST,
    "copy your state, then write it",
    reply=checkpoint.CheckpointTaken,
)
CHECKPOINT_WAIT = _row(
    "checkpoint wait",
    "state.written.{job}.{sid}",
    checkpoint.CheckpointWait,
    SMO,
    MI,
    REQUEST,
    "answer once your part of the checkpoint is stored",
    reply=checkpoint.CheckpointWritten,
)
PUBLISH_FILE = _row(
    "publish file",
    "state.publish.{job}.{sid}",
    files.PublishFile,
    SMO,
    MI,
    REQUEST,
    "write a checkpoint's manifest, or the weights' list, below your job's artifacts",
    reply=Ack,
)
EXPORT = _row(
    "export",
    "state.export.{job}.{sid}",
    step.ExportOrder,
    SMO,
    MI,
    REQUEST,
    "write your weights",
    reply=step.Exported,
)
STORE_QUERY = _row(
    "store query",
    "store.query.{job}.{sid}",
    store.StoreQuery,
    SMO + MG + FM + CLIENT + BROKER,
    MI,
    REQUEST,
    "§6.3: rows of an instance's local store, read only",
    reply=store.StoreRows,
)

# --- data plane ----------------------------------------------------------------------------------------
NOTICE = _row(
    "notice",
    "data.notice.{job}.{sid}",
    data_plane.MicrobatchNotice,
    MI,
    MI + FM,
    CORE,
    "a hop: these tensors wait for you; repeated until answered",
    stream="STEPS",
    names=Names.RECEIVER,
)
NOTICE_ANSWER = _row(
    "notice answer",
    "data.answer.{job}.{sid}",
    data_plane.NoticeAnswer,
    MI,
    MI,
    CORE,
    "accepted, held, stale, later",
    names=Names.RECEIVER,
)

# --- telemetry, policies, faults ----------------------------------------------------------------------
INSTANCE_SAMPLE = _row(
    "instance sample",
    "telemetry.instance.{job}.{sid}",
    tm.InstanceSample,
    MI,
    SR + MG + FM,
    CORE,
    "an instance's load and speed",
    stream="TELEMETRY",
)
NODE_SAMPLE = _row(
    "node sample",
    "telemetry.node.{agent}",
    tm.NodeSample,
    MIC,
    SR + MG + SMO + FM,
    CORE,
    "a node's load",
    stream="TELEMETRY",
)
OBSERVATION = _row(
    "observation",
    "telemetry.observation.{source}",
    observation.Observation,
    MG + CLIENT,
    FM,
    CORE,
    "what a system outside the mesh has seen, as a gateway let it in",
    stream="TELEMETRY",
    names=Names.NOBODY,
)
JOB_TOPOLOGY = _row(
    "job topology",
    "topology.graph.{job}",
    task_graph.JobTopology,
    SMO,
    FM,
    CORE,
    "a job's units, edges and places, whenever they are decided",
    stream="SIGNALS",
)
SUGGESTION = _row(
    "policy suggestion",
    "policy.suggestion.{owner}.{module}",
    policy.PolicySuggestion,
    FM,
    SMO,
    CORE,
    "what a functional module would do",
    stream="POLICIES",
)
POLICY_DECISION = _row(
    "policy decision",
    "policy.decision.{module}",
    policy.PolicyDecision,
    SMO,
    FM + CLIENT,
    CORE,
    "adopted or declined, and why",
    stream="POLICIES",
    names=Names.NOBODY,
)
POLICY_SCORE = _row(
    "policy score",
    "policy.score.{owner}.{module}",
    policy.PolicyScore,
    FM,
    SMO + CLIENT,
    CORE,
    "what a suggestion was worth, by what then happened",
    stream="POLICIES",
)
POLICY_SWITCH = _row(
    "policy switch",
    "policy.switch.{module}",
    policy.PolicySwitch,
    SMO,
    FM + CLIENT,
    CORE,
    "another version of a module is the active one",
    stream="POLICIES",
    names=Names.NOBODY,
)
PROMOTE_MODULE = _row(
    "promote module",
    "policy.command.promote",
    policy.PromoteModule,
    MG,
    SMO,
    REQUEST,
    "make a version of a module the active one",
    reply=policy.PolicySwitch,
)
ROLL_BACK_MODULE = _row(
    "roll back module",
    "policy.command.rollback",
    policy.RollBackModule,
    MG,
    SMO,
    REQUEST,
    "make the version before active again",
    reply=policy.PolicySwitch,
)
MODULE_RECORD = _row(
    "module record",
    "{module}",
    policy.ModuleRecord,
    SMO,
    SMO,
    KV,
    "which version of a module is active",
    bucket="modules",
)
MODULE_STANDING = _row(
    "module standing",
    "{module}.{version}",
    policy.ModuleStanding,
    SMO,
    SMO,
    KV,
    "what a module was ordered to be, and how it has fared, for the next orchestrator",
    bucket="standings",
)
MODULE_LIFECYCLE = _row(
    "module lifecycle",
    "policy.lifecycle.{owner}.{module}",
    policy.ModuleLifecycle,
    FM,
    SMO,
    REQUEST,
    "a functional module's state and version",
    reply=Ack,
    names=Names.SENDER,
)
MODULE_ORDER = _row(
    "module order",
    "policy.order.{sid}",
    policy.ModuleOrder,
    SMO,
    FM,
    REQUEST,
    "activate, shadow, drain; enable or disable for jobs",
    reply=policy.ModuleLifecycle,
)
DIRECT_MODULE = _row(
    "direct module",
    "policy.command.direct",
    policy.DirectModule,
    MG,
    SMO,
    REQUEST,
    "give a module an order",
    reply=policy.ModuleLifecycle,
)
MODULE_QUERY = _row(
    "module query",
    "policy.command.query",
    module_status.ModuleQuery,
    MG,
    SMO,
    REQUEST,
    "which modules run, and how they fare",
    reply=module_status.ModuleList,
    answer_bytes=RECORDS_BYTES,
)
MODULE_QUESTION = _row(
    "module question",
    "policy.question.{module}.{version}",
    module_status.ModuleQuestion,
    CLIENT + MG + SR + SMO,
    FM,
    REQUEST,
    "what would you do now? `version` is one, or `active`",
    reply=module_status.ModuleAnswer,
)
LINK_FAULT = _row(
    "link fault",
    "fault.link.{cluster}.{job}",
    fault.LinkFault,
    MI,
    SR,
    CORE,
    "a neighbour's link broke",
    stream="FAULTS",
    names=Names.BOTH,
)
FAULT_REPORT = _row(
    "fault report",
    "fault.report.{sid}",
    fault.FaultReport,
    MG + SR,
    SMO,
    REQUEST,
    "§4.4(5): an abnormal state",
    reply=Ack,
    names=Names.SENDER,
)
FAULT_VERDICT = _row(
    "fault verdict",
    "fault.verdict.{sid}",
    fault.FaultVerdict,
    SMO,
    ALL,
    CORE,
    "what it was and what is done",
    stream="FAULTS",
    names=Names.NOBODY,
)
FAULT_RECORD = _row(
    "fault record",
    "fault.record.{job}.{sid}",
    fault.FaultRecord,
    SMO,
    MG + CLIENT,
    STREAM,
    "the fault queue: each fault from report to end; `mesh` where there is no job",
    stream="FAULT_QUEUE",
    names=Names.NOBODY,
)
LOG = _row("log", "log.{sid}", tm.LogLine, ALL, CLIENT, CORE, "structured log lines", stream="LOGS")
DEAD_LETTER = _row(
    "dead letter",
    "dead_letter.{sid}",
    tm.DeadLetter,
    ALL,
    SRD + CLIENT,
    CORE,
    "unusable messages",
    stream="DEAD_LETTERS",
)

UNREADABLE = _row(
    "unreadable record",
    "unreadable.{sid}",
    unreadable.UnreadableValue,
    SMO + SRD + SR + AAM + MG,
    SMO + CLIENT,
    STREAM,
    "values in buckets that nobody can read, with their bytes",
    stream="UNREADABLE",
)

# --- jobs and the outer door ---------------------------------------------------------------------------
DOOR = _row(
    "door",
    "door.{action}",
    door.DoorRequest,
    CLIENT,
    MG,
    REQUEST,
    "a client's request at any gateway (queue group)",
    reply=door.JobList,
    answer_bytes=RECORDS_BYTES,
)
KEPT_ANSWER = _row(
    "kept answer",
    "{key}",
    door.KeptAnswer,
    MG,
    MG,
    KV,
    "what was answered to a request with an idempotency key",
    bucket="answers",
)
DATASET_OWNER = _row(
    "dataset owner", "{key}", door.DatasetOwner, MG, MG, KV, "who stored which data set", bucket="datasets"
)
UPLOADS = _row(
    "uploads", "{key}", door.UserUploads, MG, MG, KV, "room for data sets on their way", bucket="uploads"
)
SUBMIT = _row(
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
SCALE = _row(
    "scale", "job.command.scale", door.ScaleJob, MG, SMO, REQUEST, "more or fewer replicas", reply=Ack
)
CHANGE_STAGE = _row(
    "change stage",
    "job.command.change_stage",
    door.ChangeStage,
    MG,
    SMO,
    REQUEST,
    "an instance is to change its stage",
    reply=Ack,
)
CANCEL = _row(
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
PARK = _row(
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
RESUME = _row(
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
QUERY = _row(
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
MESH_QUERY = _row(
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
CORDON_PLACE = _row(
    "cordon place",
    "mesh.command.cordon",
    door.CordonPlace,
    MG,
    SMO,
    REQUEST,
    "no new instances there; drain: and none of the old",
    reply=door.Cordons,
)
UNCORDON_PLACE = _row(
    "uncordon place",
    "mesh.command.uncordon",
    door.UncordonPlace,
    MG,
    SMO,
    REQUEST,
    "new instances may go there again",
    reply=door.Cordons,
)
JOB_RECORD = _row(
    "job record", "{job}", job.JobRecord, SMO, ALL, KV, "the orchestrator's jobs", bucket="jobs"
)
JOB_EVENT = _row(
    "job event",
    "job.event.{job}",
    job.JobEvent,
    SMO,
    ALL,
    STREAM,
    "what happened to a job, in order",
    stream="JOBS",
)
BROKER_REQUEST = _row(
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


_EARLIER = tuple(
    (replace(row, pattern=pattern), row)
    for row, pattern in (
        (TOPOLOGY, "topology.model.{job}"),
        (ANALYSIS_FAILED, "topology.failed.{job}"),
        (SAMPLE_WRITTEN, "topology.sample.{job}"),
        (SUGGESTION, "policy.suggestion.{module}"),
        (POLICY_SCORE, "policy.score.{module}"),
        (MODULE_LIFECYCLE, "policy.lifecycle.{module}"),
        (LINK_FAULT, "fault.link.{cluster}"),
    )
)
"""How subjects of rows were before they said who speaks, as in runs that were recorded then."""


def lookup(subject: str) -> tuple[Subject, dict[str, str]] | None:
    """The row of a concrete subject and its tokens; None for subjects that are not ours."""
    for row in _candidates(subject):
        tokens = row.matches(subject)
        if tokens is not None:
            return row, tokens
    for earlier, row in _EARLIER:
        tokens = earlier.matches(subject)
        if tokens is not None:
            return row, tokens
    return None


def _candidates(subject: str) -> list[Subject]:
    if subject.startswith("$KV."):
        bucket = subject.split(".", 2)[1]
        return [row for row in SUBJECTS if row.bucket == bucket]
    return [row for row in SUBJECTS if row.bucket is None]
