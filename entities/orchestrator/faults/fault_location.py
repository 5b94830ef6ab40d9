"""Where a fault is and how far it reaches (draft §4.4(5), §5.5): asks SRD and MIC, and makes the verdict."""

from __future__ import annotations

from collections.abc import Collection

from bus.connection import Bus
from bus.subjects import FAULT_VERDICT, JUDGE, RESOLVE
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import Judge, Judgement
from schemas.errors import NotFound, Unavailable
from schemas.fault import ClusterReport, FaultReport, FaultScope, FaultVerdict, VerdictKind
from schemas.registry import InstanceState, Resolve
from schemas.step import Member
from schemas.task_graph import TaskGraph

NO_INSTANCES = "its node can start no instance now"
ITSELF = "orchestrator"
"""The reporter of what the orchestrator concludes."""
WARNINGS = ("slow", "stalled")
"""Kinds of reports on instances that work on, or may: what is told of them is no failure."""


async def locate(
    bus: Bus,
    mesh: MeshView,
    job: str,
    member: Member,
    graph: TaskGraph,
    report: FaultReport,
    deadline_s: float = 3.0,
) -> FaultVerdict:
    """Asks the registry and the node's agent about a fault; publishes and returns the verdict.

    Where a living instance does not reach another one, the agent of each is asked: either may be at fault.

    Args:
        bus: the bus.
        mesh: the view of the mesh.
        job: the member's job.
        member: the member.
        graph: where the job's instances run.
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
    agent = _agent_of(mesh, graph, member)
    judgement = await _judged(bus, agent, job, member, deadline_s)
    other: Judgement | None = None
    if report.kind == "unreachable" and report.witness is not None:
        other = await _judged(bus, _agent_of(mesh, graph, report.witness), job, report.witness, deadline_s)
    gone = {sid for sid, found in mesh.records.items() if found.state is not InstanceState.ACTIVE}
    verdict = judge_fault(member, state, judgement, report, against_witness(judgement, other, gone))
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


def _agent_of(mesh: MeshView, graph: TaskGraph, member: Member) -> str | None:
    """The agent of the node on which an instance runs; None: there is none."""
    place = next((place for place in graph.placements if place.sid == member.sid), None)
    return None if place is None else mesh.agent_of(place.cluster, place.node)


async def _judged(
    bus: Bus, agent: str | None, job: str, member: Member, deadline_s: float
) -> Judgement | None:
    """What the agent says of an instance; None: it does not answer."""
    if agent is None:
        return None
    query = Judge(job=job, sid=member.sid, incarnation=member.incarnation)
    try:
        return await bus.command(JUDGE, query, deadline_s=deadline_s, while_heard=True, agent=agent)
    except (Unavailable, NotFound):
        return None


def against_witness(
    judged: Judgement | None, witness: Judgement | None, gone: Collection[str] = ()
) -> tuple[str, ...]:
    """The broken dependencies that show that the witness of an unreachable instance is at fault. Pure.

    Of the two ends of a link that does not work, the one is at fault of which other dependencies are broken,
    too (draft §4.4(5)). One of which only this link is broken is not. If both have others, or neither has,
    they say nothing, and none is returned.

    Args:
        judged: of the instance that is not reached.
        witness: of the instance that says so.
        gone: instances that are not active; a dependency on one of these is broken through no fault of ours.
    """
    if judged is None or witness is None or broken_beside(judged, witness.sid, gone):
        return ()
    return broken_beside(witness, judged.sid, gone)


def broken_beside(judged: Judgement, other: str, gone: Collection[str] = ()) -> tuple[str, ...]:
    """An instance's broken dependencies but for those on `other`, and on what is gone."""
    left_out = {other, *gone} - {judged.sid}
    return tuple(each for each in judged.broken if not ends_of(each) & left_out)


def ends_of(dependency: str) -> set[str]:
    """What a dependency `from -> to: what flows` lies between: SIDs, or the names of stages or layers."""
    return set(dependency.partition(":")[0].split(" -> "))


def judge_fault(
    member: Member,
    state: InstanceState,
    judgement: Judgement | None,
    report: FaultReport,
    against: tuple[str, ...] = (),
) -> FaultVerdict:
    """The verdict, scope and action, from the registry's state and the agent's judgement. Pure.

    `against`: what speaks against the witness, where the instance is not reached (`against_witness`).

    How far a fault reaches, the node's agent judges (MIC): it knows whether its node can start instances at
    all, whether this one gets on, and which dependencies of the topology are broken. Without its judgement a
    living process is taken for a healthy one.
    """
    process = judgement.process if judgement is not None else "unknown to a silent agent"
    over = state in (InstanceState.FAULTED, InstanceState.GONE)
    ended = over or (judgement is not None and judgement.process in ("gone", "unknown"))

    def verdict(
        kind: VerdictKind, scope: FaultScope, action: str, reason: str, at_fault: str = ""
    ) -> FaultVerdict:
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
            at_fault=at_fault,
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
    if report.kind == "unreachable" and process == "running" and report.witness is not None and against:
        witness = report.witness.sid
        reason = (
            f"{known}; beside its link to {witness} none is broken, but of {witness}: {'; '.join(against)}"
        )
        return verdict("transient", "none", f"{witness} is at fault", reason, at_fault=witness)
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


def turned_round(report: FaultReport, verdict: FaultVerdict) -> FaultReport | None:
    """The report of the witness that is at fault, by the instance that it did not reach; None: it is not.

    A report is turned round once.
    """
    witness = report.witness
    if not verdict.at_fault or witness is None or report.reporter == ITSELF:
        return None
    fields = {
        "reporter": ITSELF,
        "sid": witness.sid,
        "incarnation": witness.incarnation,
        "witness": Member.of(report.sid, report.incarnation),
        "evidence": verdict.reason,
        "silent": False,
    }
    return report.model_copy(update=fields)


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
