"""`JobContext`: what the parts of one job's run share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bus.connection import Bus
from entities.orchestrator.job_state.decision_record import DecisionRecord
from entities.orchestrator.job_state.event_writer import EventWriter
from entities.orchestrator.job_state.guarded_tasks import GuardedTasks
from entities.orchestrator.job_state.ingress_gateway import IngressGateway
from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.job_state.job_faults import JobFaults
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.job_state.policy_distribution import PolicyDistribution
from entities.orchestrator.job_state.quarantine import Quarantine
from entities.orchestrator.job_state.retry_limits import RetryLimits
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.queue.slot_demand import SlotDemand
from schemas.job import JobSpec
from schemas.step import MicrobatchClaim

Claims = dict[str, Callable[[MicrobatchClaim], None]]
"""What takes the claims of the open step, by job; a job without a step loop has no entry."""


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """One run of one job, in one epoch. It holds references and does nothing."""

    bus: Bus
    mesh: MeshView
    name: str
    spec: JobSpec
    epoch: int
    store: JobStore
    instances: JobInstances
    policies: PolicyDistribution
    gateway: IngressGateway
    decisions: DecisionRecord
    events: EventWriter
    tasks: GuardedTasks
    """Tasks of the training; a failure of one reaches whoever waits with `unless_failed`."""
    faults: JobFaults
    quarantine: Quarantine
    retry_limits: RetryLimits
    demand: SlotDemand
    """What other jobs hold, and wait for."""
    claims: Claims
    """The term's; the job's step loop enters itself."""
