"""What a job's run tells the fault queue, and where the queue says that it is enough."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from entities.orchestrator.faults.fault_queue import RETRIES, FaultQueue
from entities.orchestrator.job_state.job_faults import JobFaults
from entities.orchestrator.job_state.retry_limits import StepBroken
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.fault import FaultKind, FaultState
from schemas.registry import Culprit, InstanceState, ServiceRecord
from schemas.step import Member
from tests.builders.faults import fault_report, fault_verdict
from tests.builders.records import instance
from tests.builders.steps import member

SID = "j-s0-r0"


@pytest.fixture
def queue() -> FaultQueue:
    bus: Any = None  # nobody writes here
    return FaultQueue(bus, clock=lambda: 1.0)


@pytest.fixture
def faults(queue: FaultQueue) -> JobFaults:
    return JobFaults(queue, MeshView(), "j", "orchestrator")


def ended(incarnation: str, culprit: Culprit | None = None) -> ServiceRecord:
    faulted = InstanceState.FAULTED
    return instance(SID, incarnation=incarnation, state=faulted, reason="killed by SIGKILL", culprit=culprit)


def test_a_reported_fault_is_over_when_its_step_is_committed(queue: FaultQueue, faults: JobFaults) -> None:
    id = faults.reported(fault_report(), step=3, attempt=0)
    faults.located(id, fault_verdict("structural"))
    lost = [member()]
    faults.broke("no answer", lost, [ended("i1")], step=3, attempt=0)
    (fault,) = queue.of_job("j")
    assert (fault.id, fault.state, fault.attempts) == (id, FaultState.RETRYING, 1)
    faults.recovered("back at step 3")
    faults.committed(2)
    assert queue.of_job("j"), "an earlier step, run again after a roll-back, says nothing"
    faults.committed(3)
    assert queue.of_job("j") == []


def test_an_unfounded_report_is_over_at_once(queue: FaultQueue, faults: JobFaults) -> None:
    faults.located(faults.reported(fault_report("link"), step=3, attempt=0), fault_verdict("unfounded"))
    assert queue.of_job("j") == []


def test_a_broken_link_between_two_that_live_is_over_with_its_step(
    queue: FaultQueue, faults: JobFaults
) -> None:
    faults.located(faults.reported(fault_report("link"), step=3, attempt=0), fault_verdict("transient"))
    faults.committed(3)
    assert queue.of_job("j") == []


def test_one_that_nobody_reaches_is_a_fault_of_the_instance(queue: FaultQueue, faults: JobFaults) -> None:
    faults.located(
        faults.reported(fault_report("unreachable"), step=3, attempt=0), fault_verdict("structural")
    )
    faults.broke("no answer", [member()], [], step=3, attempt=0)
    (fault,) = queue.of_job("j")
    assert (fault.kind, fault.state) == ("instance", FaultState.RETRYING)


def test_every_kind_has_its_limit() -> None:
    assert set(RETRIES) == set(get_args(FaultKind))


def test_whatever_nobody_reported_is_in_the_queue_too(queue: FaultQueue, faults: JobFaults) -> None:
    faults.broke("no progress for 30 s", [], [], step=3, attempt=0)
    faults.broke("gateway-a did not begin", [], [], step=3, attempt=1, entity="gateway-a")
    faults.broke("no answer", [member()], [ended("i1")], step=3, attempt=2)
    found = {fault.kind: fault for fault in queue.of_job("j")}
    assert set(found) == {"request", "entity", "instance"}
    assert found["entity"].task.sid == "gateway-a"
    assert found["instance"].verdict == "structural"
    assert found["instance"].log[0] == "killed by SIGKILL"
    faults.ended(False, "step 3 failed 7 times")
    assert queue.of_job("j") == []


def test_one_task_fails_in_one_way_no_more_often_than_its_limit(faults: JobFaults) -> None:
    for attempt in range(RETRIES["instance"] + 1):
        member = Member(sid=SID, incarnation=f"i{attempt}")
        if attempt == RETRIES["instance"]:
            with pytest.raises(StepBroken, match=r"^step 3: j-s0-r0 failed 7 times \(instance\), 6 retries"):
                faults.broke("no answer", [member], [], step=3, attempt=attempt)
        else:
            faults.broke("no answer", [member], [], step=3, attempt=attempt)


def test_a_named_microbatch_is_one_fault_over_all_incarnations(queue: FaultQueue, faults: JobFaults) -> None:
    for attempt, incarnation in enumerate("ab"):
        lost = [Member(sid=SID, incarnation=incarnation)]
        record = ended(incarnation, Culprit(step=3, microbatch=1))
        faults.broke("no answer", lost, [record], step=3, attempt=attempt)
    (fault,) = queue.of_job("j")
    assert (fault.kind, fault.task.microbatch, fault.attempts, fault.limit) == ("microbatch", 1, 2, 1)
