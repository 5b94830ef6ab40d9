"""Attribution of a failed computation to its microbatch, so that the orchestrator can judge the cause.

An instance that ends itself reports (step, microbatch) with its reason. If two incarnations end at the same
microbatch, the orchestrator concludes that the microbatch is bad, and not the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bus.logs import get_logger
from schemas.errors import DmscError, GradientRefused, MicrobatchFailed
from schemas.registry import Culprit
from workers.transaction.microbatch import Hop
from workers.user_code import describe

log = get_logger("stage")


@contextmanager
def attributing(hop: Hop) -> Iterator[None]:
    """Attributes errors inside to this hop's microbatch, except in a validation, which has no step to repeat.

    Raises:
        MicrobatchFailed: User code raised.
        GradientRefused: As raised inside, with the step added to the microbatch.
    """
    try:
        yield
    except GradientRefused as error:
        if "microbatch" in error.fields:
            error.fields["step"] = hop.step
        raise
    except DmscError:
        raise
    except Exception as error:  # user code may raise anything
        if hop.evaluate:
            raise
        log.error("microbatch failed", step=hop.step, microbatch=hop.microbatch, exc_info=error)
        raise MicrobatchFailed(
            f"microbatch {hop.microbatch}: {describe(error)}", step=hop.step, microbatch=hop.microbatch
        ) from error


def failing_microbatch(error: DmscError) -> Culprit | None:
    """The microbatch that `attributing` found for an error; None if it found none."""
    step, microbatch = error.fields.get("step"), error.fields.get("microbatch")
    if not isinstance(step, int) or not isinstance(microbatch, int):
        return None
    return Culprit(step=step, microbatch=microbatch)
