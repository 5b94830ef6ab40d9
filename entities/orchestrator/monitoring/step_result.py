"""The figures of a decided step, for curves and people. Pure."""

from __future__ import annotations

from entities.orchestrator.transaction.step_ledger import StepLedger
from schemas.job import JobSpec, StepPhases, StepResult
from schemas.learning_rate import learning_rate
from schemas.step import StepDecision


def step_result(
    spec: JobSpec,
    ledger: StepLedger,
    decision: StepDecision,
    step_s: float,
    phases: StepPhases | None = None,
) -> StepResult:
    """
    Args:
        spec: the job's.
        ledger: the decided step's account.
        decision: the decision.
        step_s: seconds from the decision before to this one.
        phases: what they went to.
    """
    training = spec.training
    tokens = training.microbatches * training.microbatch_samples * spec.data.sample_tokens
    return StepResult(
        step=decision.step,
        loss=ledger.mean_loss(),
        gradient_norm=decision.gradient_norm,
        learning_rate=learning_rate(decision.step, training),
        tokens=tokens,
        step_s=step_s,
        tokens_per_s=tokens / max(step_s, 1e-9),
        attempt=decision.attempt,
        shares=ledger.shares(),
        phases=phases,
    )
