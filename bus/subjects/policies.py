"""Telemetry, and functional modules (draft §4.2): suggestions, decisions, scores, orders, questions."""

from __future__ import annotations

from bus.subject import Names
from bus.subjects.table import CLIENT, CORE, FM, KV, MG, MI, MIC, RECORDS_BYTES, REQUEST, SMO, SR, row
from schemas import module_status, observation, policy, task_graph, telemetry
from schemas.errors import Ack

__all__ = [
    "DIRECT_MODULE",
    "INSTANCE_SAMPLE",
    "JOB_TOPOLOGY",
    "MODULE_LIFECYCLE",
    "MODULE_ORDER",
    "MODULE_QUERY",
    "MODULE_QUESTION",
    "MODULE_RECORD",
    "MODULE_STANDING",
    "NODE_SAMPLE",
    "OBSERVATION",
    "POLICY_DECISION",
    "POLICY_SCORE",
    "POLICY_SWITCH",
    "PROMOTE_MODULE",
    "ROLL_BACK_MODULE",
    "SUGGESTION",
]

INSTANCE_SAMPLE = row(
    "instance sample",
    "telemetry.instance.{job}.{sid}",
    telemetry.InstanceSample,
    MI,
    SR + MG + FM,
    CORE,
    "an instance's load and speed",
    stream="TELEMETRY",
)
NODE_SAMPLE = row(
    "node sample",
    "telemetry.node.{agent}",
    telemetry.NodeSample,
    MIC,
    SR + MG + SMO + FM,
    CORE,
    "a node's load",
    stream="TELEMETRY",
)
OBSERVATION = row(
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
JOB_TOPOLOGY = row(
    "job topology",
    "topology.graph.{job}",
    task_graph.JobTopology,
    SMO,
    FM,
    CORE,
    "a job's units, edges and places, whenever they are decided",
    stream="SIGNALS",
)
SUGGESTION = row(
    "policy suggestion",
    "policy.suggestion.{owner}.{module}",
    policy.PolicySuggestion,
    FM,
    SMO,
    CORE,
    "what a functional module would do",
    stream="POLICIES",
)
POLICY_DECISION = row(
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
POLICY_SCORE = row(
    "policy score",
    "policy.score.{owner}.{module}",
    policy.PolicyScore,
    FM,
    SMO + CLIENT,
    CORE,
    "what a suggestion was worth, by what then happened",
    stream="POLICIES",
)
POLICY_SWITCH = row(
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
PROMOTE_MODULE = row(
    "promote module",
    "policy.command.promote",
    policy.PromoteModule,
    MG,
    SMO,
    REQUEST,
    "make a version of a module the active one",
    reply=policy.PolicySwitch,
)
ROLL_BACK_MODULE = row(
    "roll back module",
    "policy.command.rollback",
    policy.RollBackModule,
    MG,
    SMO,
    REQUEST,
    "make the version before active again",
    reply=policy.PolicySwitch,
)
MODULE_RECORD = row(
    "module record",
    "{module}",
    policy.ModuleRecord,
    SMO,
    SMO,
    KV,
    "which version of a module is active",
    bucket="modules",
)
MODULE_STANDING = row(
    "module standing",
    "{module}.{version}",
    policy.ModuleStanding,
    SMO,
    SMO,
    KV,
    "what a module was ordered to be, and how it has fared, for the next orchestrator",
    bucket="standings",
)
MODULE_LIFECYCLE = row(
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
MODULE_ORDER = row(
    "module order",
    "policy.order.{sid}",
    policy.ModuleOrder,
    SMO,
    FM,
    REQUEST,
    "activate, shadow, drain; enable or disable for jobs",
    reply=policy.ModuleLifecycle,
)
DIRECT_MODULE = row(
    "direct module",
    "policy.command.direct",
    policy.DirectModule,
    MG,
    SMO,
    REQUEST,
    "give a module an order",
    reply=policy.ModuleLifecycle,
)
MODULE_QUERY = row(
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
MODULE_QUESTION = row(
    "module question",
    "policy.question.{module}.{version}",
    module_status.ModuleQuestion,
    CLIENT + MG + SR + SMO,
    FM,
    REQUEST,
    "what would you do now? `version` is one, or `active`",
    reply=module_status.ModuleAnswer,
)
