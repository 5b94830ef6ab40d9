"""Telemetry, and functional modules (draft §4.2): suggestions, decisions, scores, orders, questions."""

from __future__ import annotations

from bus.subject_row import Names, Subject
from bus.subjects.table import CLIENT, FM, MG, MI, MIC, RECORDS_BYTES, SMO, SR
from schemas import (
    automation,
    fault_choices,
    learnt_state,
    module_status,
    observation,
    policy,
    task_graph,
    telemetry,
)
from schemas.errors import Ack

__all__ = [
    "AUTOMATION_QUERY",
    "DIRECT_LEARNT",
    "DIRECT_MODULE",
    "FAULT_ANSWER",
    "FAULT_QUESTION",
    "INSTANCE_SAMPLE",
    "JOB_TOPOLOGY",
    "KEEP_LEARNT",
    "LEARNT_QUERY",
    "LEARNT_RECORD",
    "LEARNT_STATE",
    "MESH_AUTOMATION",
    "MODULE_DRIFT",
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
    "SWITCH_AUTOMATION",
]

INSTANCE_SAMPLE = Subject(
    "instance sample",
    "telemetry.instance.{job}.{sid}",
    telemetry.InstanceSample,
    MI,
    SR | MG | FM | MIC,
    "an instance's load and speed",
    stream="TELEMETRY",
)
NODE_SAMPLE = Subject(
    "node sample",
    "telemetry.node.{agent}",
    telemetry.NodeSample,
    MIC,
    SR | MG | SMO | FM,
    "a node's load",
    stream="TELEMETRY",
)
OBSERVATION = Subject(
    "observation",
    "telemetry.observation.{source}",
    observation.Observation,
    MG | CLIENT,
    FM,
    "what a system outside the mesh has seen, as a gateway let it in",
    stream="TELEMETRY",
    names=Names.NOBODY,
)
JOB_TOPOLOGY = Subject(
    "job topology",
    "topology.graph.{job}",
    task_graph.JobTopology,
    SMO,
    FM,
    "a job's units, edges and places, whenever they are decided",
    stream="SIGNALS",
)
SUGGESTION = Subject(
    "policy suggestion",
    "policy.suggestion.{owner}.{module}",
    policy.PolicySuggestion,
    FM,
    SMO,
    "what a functional module would do",
    stream="POLICIES",
)
POLICY_DECISION = Subject(
    "policy decision",
    "policy.decision.{module}",
    policy.PolicyDecision,
    SMO,
    FM | CLIENT,
    "adopted or declined, and why",
    stream="POLICIES",
    names=Names.NOBODY,
)
FAULT_QUESTION = Subject(
    "fault question",
    "policy.fault_question.{job}",
    fault_choices.FaultQuestion,
    SMO,
    FM,
    "a fault at hand: ask again, wait, or replace?",
    stream="POLICIES",
    names=Names.NOBODY,
)
FAULT_ANSWER = Subject(
    "fault answer",
    "policy.fault_answer.{owner}.{module}",
    fault_choices.FaultAnswer,
    FM,
    SMO,
    "what a functional module would do about a fault at hand",
    stream="POLICIES",
)
POLICY_SCORE = Subject(
    "policy score",
    "policy.score.{owner}.{module}",
    policy.PolicyScore,
    FM,
    SMO | CLIENT,
    "what a suggestion was worth, by what then happened",
    stream="POLICIES",
)
MODULE_DRIFT = Subject(
    "module drift",
    "policy.drift.{owner}.{module}",
    policy.ModuleDrift,
    FM,
    SMO | CLIENT,
    "what a module learnt no longer fits what happens, or does again",
    stream="POLICIES",
)
POLICY_SWITCH = Subject(
    "policy switch",
    "policy.switch.{module}",
    policy.PolicySwitch,
    SMO,
    FM | CLIENT,
    "another version of a module is the active one",
    stream="POLICIES",
    names=Names.NOBODY,
)
PROMOTE_MODULE = Subject(
    "promote module",
    "policy.command.promote",
    policy.PromoteModule,
    MG,
    SMO,
    "make a version of a module the active one",
    reply=policy.PolicySwitch,
)
ROLL_BACK_MODULE = Subject(
    "roll back module",
    "policy.command.rollback",
    policy.RollBackModule,
    MG,
    SMO,
    "make the version before active again",
    reply=policy.PolicySwitch,
)
MODULE_RECORD = Subject(
    "module record",
    "{module}",
    policy.ModuleRecord,
    SMO,
    SMO,
    "which version of a module is active",
    bucket="modules",
)
MODULE_STANDING = Subject(
    "module standing",
    "{module}.{version}",
    policy.ModuleStanding,
    SMO,
    SMO,
    "what a module was ordered to be, and how it has fared, for the next orchestrator",
    bucket="standings",
)
LEARNT_RECORD = Subject(
    "learnt record",
    "{owner}.{module}.{version}.{place}",
    learnt_state.LearntState,
    SMO,
    SMO,
    "what a version of a module has learnt; `place`: current, or aside for one that did not fit",
    bucket="learnt",
)
LEARNT_STATE = Subject(
    "learnt state",
    "policy.learnt.state.{owner}.{module}",
    learnt_state.LearntState,
    SMO,
    FM | CLIENT,
    "what a module has learnt, each time that it is kept or replaced",
    stream="LEARNT",
    names=Names.NOBODY,
)
LEARNT_QUERY = Subject(
    "learnt query",
    "policy.learnt.query.{owner}.{module}",
    learnt_state.LearntQuery,
    FM,
    SMO,
    "what have I learnt? asked by a module that starts",
    reply=learnt_state.LearntStates,
    names=Names.SENDER,
)
KEEP_LEARNT = Subject(
    "keep learnt",
    "policy.learnt.keep.{owner}.{module}",
    learnt_state.KeepLearnt,
    FM,
    SMO,
    "keep what I have learnt, by compare-and-set",
    reply=learnt_state.LearntState,
    names=Names.SENDER,
)
DIRECT_LEARNT = Subject(
    "direct learnt",
    "policy.command.learnt",
    learnt_state.DirectLearnt,
    MG,
    SMO,
    "show, reset or replace what a module has learnt",
    reply=learnt_state.LearntStates,
    answer_bytes=RECORDS_BYTES,
)
MODULE_LIFECYCLE = Subject(
    "module lifecycle",
    "policy.lifecycle.{owner}.{module}",
    policy.ModuleLifecycle,
    FM,
    SMO,
    "a functional module's state and version",
    reply=Ack,
    names=Names.SENDER,
)
MODULE_ORDER = Subject(
    "module order",
    "policy.order.{sid}",
    policy.ModuleOrder,
    SMO,
    FM,
    "activate, shadow, drain; enable or disable for jobs",
    reply=policy.ModuleLifecycle,
)
DIRECT_MODULE = Subject(
    "direct module",
    "policy.command.direct",
    policy.DirectModule,
    MG,
    SMO,
    "give a module an order",
    reply=policy.ModuleLifecycle,
)
MODULE_QUERY = Subject(
    "module query",
    "policy.command.query",
    module_status.ModuleQuery,
    MG,
    SMO,
    "which modules run, and how they fare",
    reply=module_status.ModuleList,
    answer_bytes=RECORDS_BYTES,
)
MODULE_QUESTION = Subject(
    "module question",
    "policy.question.{module}.{version}",
    module_status.ModuleQuestion,
    CLIENT | MG | SR | SMO,
    FM,
    "what would you do now? `version` is one, or `active`",
    reply=module_status.ModuleAnswer,
)
SWITCH_AUTOMATION = Subject(
    "switch automation",
    "policy.command.automation",
    automation.SwitchAutomation,
    MG,
    SMO,
    "the mesh or a job is changed by itself so far: off, advise, act",
    reply=automation.AutomationStatus,
)
AUTOMATION_QUERY = Subject(
    "automation query",
    "policy.command.knobs",
    automation.AutomationQuery,
    MG,
    SMO,
    "how far is it automated, and who holds which knob?",
    reply=automation.AutomationStatus,
)
MESH_AUTOMATION = Subject(
    "mesh automation",
    "{scope}",
    automation.MeshAutomation,
    SMO,
    SMO,
    "how far the mesh changes jobs by itself",
    bucket="automation",
)
