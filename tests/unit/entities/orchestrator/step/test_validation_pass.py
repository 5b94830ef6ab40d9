"""Which claims a validation counts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from entities.orchestrator.step.validation_pass import ValidationPass
from schemas.step import Member
from tests.builders import steps

LAST = Member(sid="j-s1-r0", incarnation="i1")


async def test_a_late_claim_of_an_earlier_validation_is_not_counted() -> None:
    """Attempts are the same at both boundaries, and the weights are not."""

    async def begin(*_: Any, **__: Any) -> None:
        pass

    parts: tuple[Any, ...] = (
        SimpleNamespace(attempt=0, stages=((LAST,),)),
        SimpleNamespace(begin=begin),
        SimpleNamespace(now=lambda: 0.0, quiet_s=60.0),
    )
    validation = ValidationPass(*parts, version=4, microbatches=2)
    running = asyncio.create_task(validation.run())
    await asyncio.sleep(0)
    for number in range(2):
        validation.claimed(steps.claim(number, LAST, step=4, evaluate=True, loss=1.0))
    validation.claimed(steps.claim(1, LAST, step=2, evaluate=True, loss=9.0))
    scored = await running
    assert [scored[number].loss for number in range(2)] == [1.0, 1.0]
