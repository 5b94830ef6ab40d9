"""Which microbatch a failed computation was about, for whoever has to judge whose fault it was.

An instance that ends itself tells (step, microbatch) beside its reason; the orchestrator sees from two
incarnations that end at the same one that the microbatch is bad, and not the machine.
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
    """What fails inside is about this hop's microbatch. Validation is left out: it has no step to repeat.

    Raises:
        MicrobatchFailed: user code raised.
        GradientRefused: as raised inside, with the step beside the microbatch.
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
    """The microbatch that an error was about, if `attributing` saw it."""
    step, microbatch = error.fields.get("step"), error.fields.get("microbatch")
    if not isinstance(step, int) or not isinstance(microbatch, int):
        return None
    return Culprit(step=step, microbatch=microbatch)
