"""What is done with a suggestion that arbitration has adopted."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol

from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.policy import arbitration_state as in_force
from entities.orchestrator.policy.arbitration import Outcome
from entities.orchestrator.policy.arbitration_state import ArbitrationState
from entities.orchestrator.queue.job_queue import JobQueue
from schemas.actions import Action, RouteAction, ServiceAction, SetQueueOrder
from schemas.errors import BadInput, Conflict, NotFound
from schemas.policy import PolicySuggestion
from schemas.services.model_service import ModelService


class ChangesTraffic(Protocol):
    """The services, as far as suggestions concern them."""

    services: dict[str, ModelService]

    def change_traffic(self, action: ServiceAction, by: str, why: str) -> Awaitable[ModelService]:
        """Changes a service by compare-and-set. Raises `NotFound`, `BadInput`, `Conflict`."""


async def carried_out(
    run: JobRun,
    suggestion: PolicySuggestion,
    outcome: Outcome,
    state: ArbitrationState,
    queue: JobQueue,
    services: ChangesTraffic | None,
) -> tuple[Outcome, int | None]:
    """Carries an adopted suggestion out; the run may decline it.

    Args:
        state: With the suggestion in force.
        services: None: there are none.

    Returns:
        What came of it, and the revision of the policy that says so, if there is one.
    """
    action: Action = suggestion.action
    if isinstance(action, RouteAction):
        assert outcome.stage is not None
        assert outcome.weights is not None
        if why := run.actions.routes_objection(action, suggestion.module):
            return replace(outcome, adopted=False, reason=why), None
        reason = f"{suggestion.module}: {suggestion.reason}"
        revision = run.job.policies.revise(reason, weights=(outcome.stage, outcome.weights))
        run.training.standbys.revise(in_force.backups(state, suggestion.job))
        run.actions.routed(action, suggestion.module)
        return outcome, revision
    if isinstance(action, SetQueueOrder):
        queue.suggest_order(action.jobs)
        return outcome, None
    try:
        if isinstance(action, ServiceAction):
            assert services is not None
            await services.change_traffic(action, suggestion.module, suggestion.reason)
            return outcome, None
        by = suggestion.module
        return outcome, run.actions.carry_out(action, by, outcome.valid_s, suggestion.reason)
    except (Conflict, BadInput, NotFound) as error:
        return replace(outcome, adopted=False, reason=error.text), None
