"""Where a fault is and how far it reaches (draft §4.4(5), §5.5): asks SRD and MIC, and makes the verdict."""

from __future__ import annotations

from bus.connection import Bus
from bus.subjects import FAULT_VERDICT, JUDGE, RESOLVE
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import Judge, Judgement
from schemas.errors import NotFound, Unavailable
from schemas.fault import ClusterReport, FaultReport, FaultScope, FaultVerdict, VerdictKind
from schemas.registry import InstanceState, Resolve
from schemas.step import Member
from schemas.task_graph import Placement

NO_INSTANCES = "its node can start no instance now"
WARNINGS = ("slow", "stalled")
"""Kinds of reports on instances that work on, or may: what is told of them is no failure."""


async def locate(
    bus: Bus,
    mesh: MeshView,
    job: str,
    member: Member,
    place: Placement,
    report: FaultReport,
    deadline_s: float = 3.0,
) -> FaultVerdict:
    """Asks the registry and the node's agent about a fault; publishes and returns the verdict.

    Args:
        bus: the bus.
        mesh: the view of the mesh.
        job: the member's job.
        member: the member.
        place: where it runs.
        report: what was reported about it.
        deadline_s: both answer in milliseconds; one that is being restarted gets this long.
    """
    record = mesh.last_of(member)
    try:
        resolved = await bus.command(
            RESOLVE, Resolve(sid=member.sid), deadline_s=deadline_s, while_heard=True
        )
        present = next((one for one in resolved.records if one.incarnation == member.incarnation), None)
        state = present.state if present is not None else InstanceState.GONE
        record = present or record
    except Unavailable:
        state = mesh.state_of(member) or InstanceState.PENDING  # the registry is away: its last word counts
    judgement: Judgement | None = None
    agent = mesh.agent_of(place.cluster, place.node)
    if agent is not None:
        try:
            query = Judge(job=job, sid=member.sid, incarnation=member.incarnation)
            judgement = await bus.command(JUDGE, query, deadline_s=deadline_s, while_heard=True, agent=agent)
        except (Unavailable, NotFound):
            pass
    verdict = judge_fault(member, state, judgement, report)
    if (witnesses := mesh.waiting_for(member)) and verdict.verdict != "unfounded":
        verdict = verdict.model_copy(update={"reason": f"{verdict.reason}; {'; '.join(witnesses)}"})
    fields = {
        "job": job,
        "judged": in_words(agent or "", judgement),
        "culprit": record.culprit if record is not None else None,
        "log": judgement.log if judgement is not None else (),
    }
    verdict = verdict.model_copy(update=fields)
    if verdict.scope == "node" and agent is not None:
        mesh.judged_lost(agent)
    await bus.publish(FAULT_VERDICT, verdict, sid=member.sid)
    return verdict


def judge_fault(
    member: Member, state: InstanceState, judgement: Judgement | None, report: FaultReport
) -> FaultVerdict:
    """The verdict, scope and action, from the registry's state and the agent's judgement. Pure.

    How far a fault reaches, the node's agent judges (MIC): it knows whether its node can start instances at
    all, whether this one gets on, and which dependencies of the topology are broken. Without its judgement a
    living process is taken for a healthy one.
    """
    process = judgement.process if judgement is not None else "unknown to a silent agent"
    over = state in (InstanceState.FAULTED, InstanceState.GONE)
    ended = over or (judgement is not None and judgement.process in ("gone", "unknown"))

    def verdict(kind: VerdictKind, scope: FaultScope, action: str, reason: str) -> FaultVerdict:
        return FaultVerdict(
            job=report.job,
            sid=member.sid,
            incarnation=member.incarnation,
            verdict=kind,
            scope=scope,
            action=action,
            reason=reason,
            broken=judgement.broken if judgement is not None else (),
            ended=ended,
        )

    known = f"process {process}, registry {state}"
    if judgement is not None and judgement.condition == "stalled":
        reason = f"{known}, and stalled: {judgement.evidence}"
        if judgement.process == "stopped" or judgement.kind == "structural":
            return verdict("structural", judgement.scope, "fence and replace", reason)
        if report.kind == "stalled" and not over:
            return verdict("transient", "none", "it is waited for", reason)
    if report.kind == "slow" and process != "gone" and state is InstanceState.ACTIVE:
        action = "it gets the share that it can do"
        return verdict("transient", "none", action, f"{known}: {report.evidence}")
    if judgement is None:
        reason = f"its node agent does not answer; {report.evidence}"
        return verdict("structural", "node", "replace on another node", reason)
    if judgement.process in ("gone", "unknown"):
        reason = f"process {process}: {_evidence(judgement, report)}"
        if judgement.scope == "node":
            return verdict("structural", "node", "replace on another node", f"{reason}; {NO_INSTANCES}")
        return verdict("structural", "instance", "replace", reason)
    if over:
        reason = f"registry says {state}, process {process}: {report.evidence}"
        return verdict("structural", "instance", "fence and replace", reason)
    if report.kind == "link" and judgement.process == "running":
        return verdict("transient", "none", "the link is built anew", f"{known}: {report.evidence}")
    if report.kind in ("link", "unreachable"):
        reason = f"{known}, but not reachable: {report.evidence}"
        return verdict("structural", "instance", "fence and replace", reason)
    return verdict("unfounded", "none", "none", known)


def stall_of(judged: ClusterReport) -> FaultReport:
    """The report of an instance that its node's agent found stalled."""
    return FaultReport(
        reporter=judged.agent,
        job=judged.job,
        sid=judged.sid,
        incarnation=judged.incarnation,
        kind="stalled",
        evidence=judged.evidence,
    )


def in_words(agent: str, judgement: Judgement | None) -> str:
    """What the MIC judged, for people; empty: nothing."""
    if judgement is None:
        return ""
    condition = f"{judgement.condition}, " if judgement.condition else ""
    waiting = f"; {', '.join(judgement.waiting)} wait for it" if judgement.waiting else ""
    return (
        f"{agent}: {condition}process {judgement.process}, scope {judgement.scope}, {judgement.kind}{waiting}"
    )


def _evidence(judgement: Judgement, report: FaultReport) -> str:
    """The evidence for the reason: the instance's own, else the agent's, else the reporter's."""
    return (report.kind == "instance" and report.evidence) or judgement.evidence or report.evidence
