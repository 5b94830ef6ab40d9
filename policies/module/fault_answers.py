"""A module's say in a fault at hand: it answers each question within the time that the question gives.

An answer that would come too late is not sent. A module that has nothing to say says so, so that nobody waits
for it. Questions and answers are on the stream of policies: a replay asks the policy again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from policies.kit.policy import Policy
from schemas.envelope import Envelope
from schemas.errors import DmscError
from schemas.fault_choices import FaultAnswer, FaultQuestion

log = get_logger("module")

CONCURRENCY = 8
"""Most questions that are being answered or wait; the policy answers one after the other."""


class FaultAnswers:
    """Answers one module's questions about faults with `ask`; `follow` gets each answer that was sent."""

    def __init__(
        self,
        bus: Bus,
        policy: Policy,
        owner: str,
        ask: Callable[[FaultQuestion], Awaitable[FaultAnswer | None]],
        follow: Callable[[FaultAnswer, str], None],
    ) -> None:
        self._bus = bus
        self._policy = policy
        self._owner = owner
        self._ask = ask
        self._follow = follow
        self._late = False

    async def subscribe(self) -> list[Subscription]:
        """Hears questions, if the policy answers any."""
        if not self._policy.answers_faults:
            return []
        row = subjects.FAULT_QUESTION
        return [await self._bus.subscribe(row, self._answer, concurrency=CONCURRENCY)]

    async def _answer(self, question: FaultQuestion, envelope: Envelope) -> None:
        try:
            async with asyncio.timeout(question.answer_ms / 1e3):
                said = await self._ask(question)
        except TimeoutError:
            if not self._late:
                log.warning(
                    "no answer about a fault in time, it is left to the orchestrator",
                    module=self._policy.name,
                    sid=question.sid,
                    within_ms=question.answer_ms,
                )
            self._late = True
            return
        self._late = False
        answer = said or FaultAnswer(
            module=self._policy.name, version=self._policy.version, job=question.job, question=question.id
        )
        answer = answer.model_copy(update={"owner": self._owner})
        try:
            id = await self._bus.publish(
                subjects.FAULT_ANSWER, answer, cause=envelope, owner=self._owner, module=self._policy.name
            )
        except DmscError as error:
            log.warning("answer about a fault not sent", module=self._policy.name, reason=error.text)
            return
        if answer.action is not None:
            self._follow(answer, id)
