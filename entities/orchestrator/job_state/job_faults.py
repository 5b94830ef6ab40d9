"""One job's part of the fault queue: translates the failures of its run into faults.

The job's run calls this beside its own handling; only `broke` influences it, by the limits.
"""

from __future__ import annotations

from collections.abc import Iterable

from entities.orchestrator.faults.fault_queue import FaultQueue
from entities.orchestrator.job_state.quarantine import BadMicrobatch
from entities.orchestrator.job_state.retry_limits import StepBroken
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.fault import FaultKind, FaultReport, FaultState, FaultTask, FaultVerdict
from schemas.registry import ServiceRecord
from schemas.step import Member


class JobFaults:
    """Opens faults, and ends them when their step is committed. `step`, `attempt`: those that are open."""

    def __init__(self, queue: FaultQueue, mesh: MeshView, job: str, orchestrator: str) -> None:
        self._queue = queue
        self._mesh = mesh
        self._job = job
        self._orchestrator = orchestrator

    def reported(self, report: FaultReport, *, step: int, attempt: int) -> str:
        """Opens a fault for a report of MG or SR; returns its id."""
        member = Member(sid=report.sid, incarnation=report.incarnation)
        record = self._mesh.last_of(member)
        kind: FaultKind = report.kind
        if kind == "instance" and record is not None and record.culprit is not None:
            return self._microbatch(record, report.reporter, attempt)
        task = self._task(member, record, step, attempt)
        return self._queue.opened(kind, task, reporter=report.reporter, log=(report.evidence,))

    def located(self, fault: str, verdict: FaultVerdict) -> None:
        """Notes the verdict of SRD and MIC; an unfounded report ends now, a transient fault with the step."""
        self._queue.located(fault, verdict)
        if verdict.verdict == "transient":
            self._queue.retrying(fault, verdict.action)
        if verdict.verdict == "unfounded":
            self._queue.handled(fault, "none: unfounded")

    def partitioned(self, agent: str, text: str, *, step: int, attempt: int) -> None:
        """Opens a fault for a node that was given up: the nodes that are kept can't reach it."""
        record = self._mesh.records.get(agent)
        incarnation = record.incarnation if record is not None else None
        task = FaultTask(job=self._job, step=step, attempt=attempt, sid=agent, incarnation=incarnation)
        id = self._queue.opened("node", task, reporter=self._orchestrator, log=(text,))
        verdict = FaultVerdict(
            job=self._job,
            sid=agent,
            incarnation=incarnation or "unknown",
            verdict="structural",
            scope="node",
            action="its instances of the job are replaced on nodes that can be reached",
            reason=text,
        )
        self._queue.located(id, verdict)
        self._queue.retrying(id, verdict.action)

    def broke(
        self,
        why: str,
        lost: Iterable[Member],
        records: Iterable[ServiceRecord],
        *,
        step: int,
        attempt: int,
        entity: str | None = None,
    ) -> None:
        """An attempt failed and will be repeated: opens faults for what nobody has reported.

        Args:
            why: the reason that the run knows itself.
            lost: members that no longer count.
            records: the registry's last records of those members, as far as it has them.
            step: the step that broke.
            attempt: the attempt that broke.
            entity: the SID of an entity that did not do its part.

        Raises:
            StepBroken: one task failed in one way more often than its limit allows.
        """
        lost = list(lost)
        last_records = {Member(sid=record.sid, incarnation=record.incarnation): record for record in records}
        reported = {
            (fault.task.sid, fault.task.incarnation)
            for fault in self._queue.of_job(self._job)
            if fault.kind not in ("link", "unreachable", "request", "slow", "stalled")
        }
        for member in lost:
            record = last_records.get(member) or self._mesh.last_of(member)
            if record is not None and record.culprit is not None:
                self._microbatch(record, self._orchestrator, attempt)
            elif (member.sid, member.incarnation) not in reported:
                task = self._task(member, record, step, attempt)
                log = (record.reason if record is not None else "", why)
                id = self._queue.opened("instance", task, reporter=self._orchestrator, log=log)
                self._queue.located(id, _by_itself(self._job, member, log))
        if entity is not None:
            task = FaultTask(job=self._job, step=step, attempt=attempt, sid=entity)
            self._queue.opened("entity", task, reporter=self._orchestrator, log=(why,))
        elif not lost and not any(fault.task.attempt == attempt for fault in self._queue.of_job(self._job)):
            task = FaultTask(job=self._job, step=step, attempt=attempt)
            self._queue.opened("request", task, reporter=self._orchestrator, log=(why,))
        broken = ""
        for fault in self._queue.of_job(self._job):
            if fault.kind != "microbatch" and self._queue.exhausted(fault.id):
                broken = (
                    f"step {step}: {fault.task.sid or 'the step'} failed {fault.attempts} times "
                    f"({fault.kind}), {fault.limit} retries are allowed; the last: {why}"
                )
                self._queue.given_up(fault.id, "all go back to the checkpoint")  # the count begins again
                continue
            if fault.state is not FaultState.RETRYING:
                self._queue.retrying(fault.id, fault.action or "repeat the step")
        if broken:
            raise StepBroken(broken)

    def recovered(self, text: str) -> None:
        """The job's members are at one version again; the step is tried again."""
        for fault in self._queue.of_job(self._job):
            self._queue.retrying(fault.id, text)

    def committed(self, step: int) -> None:
        """Ends the faults of a committed step, and of steps before it."""
        for fault in self._queue.of_job(self._job):
            if fault.state is FaultState.RETRYING and (fault.task.step or 0) <= step:
                self._queue.handled(fault.id, f"{fault.action}; step {step} committed")

    def skipped(self, bad: BadMicrobatch) -> None:
        """Ends the fault of a quarantined microbatch, whose step was left out."""
        for fault in self._queue.of_job(self._job):
            if (fault.kind, fault.task.step) == ("microbatch", bad.step):
                self._queue.handled(fault.id, f"quarantined: step {bad.step} left out ({bad})")

    def ended(self, done: bool, reason: str) -> None:
        """Ends all faults of a job that has ended."""
        for fault in self._queue.of_job(self._job):
            if done:
                self._queue.handled(fault.id, "the job is done")
            else:
                self._queue.given_up(fault.id, f"the job ended: {reason}")

    def _microbatch(self, record: ServiceRecord, reporter: str, attempt: int) -> str:
        assert record.culprit is not None
        task = FaultTask(
            job=self._job,
            step=record.culprit.step,
            attempt=attempt,
            stage=record.stage,
            microbatch=record.culprit.microbatch,
            sid=record.sid,
            incarnation=record.incarnation,
        )
        return self._queue.opened("microbatch", task, reporter=reporter, log=(record.reason,))

    def _task(self, member: Member, record: ServiceRecord | None, step: int, attempt: int) -> FaultTask:
        return FaultTask(
            job=self._job,
            step=step,
            attempt=attempt,
            stage=record.stage if record is not None else None,
            sid=member.sid,
            incarnation=member.incarnation,
        )


def _by_itself(job: str, member: Member, log: Iterable[str]) -> FaultVerdict:
    """The verdict on a member that was lost before registry and agent could be asked."""
    return FaultVerdict(
        job=job,
        sid=member.sid,
        incarnation=member.incarnation,
        verdict="structural",
        scope="instance",
        action="replace",
        reason=next((line for line in log if line), "it does not answer"),
    )
