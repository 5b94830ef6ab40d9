"""Versions in shadow answer copies of requests; nobody sees their answers, which are compared (ADR-0150)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from bus.logs import get_logger
from bus.tasks import TaskSet
from entities.gateway.generation.service_book import ANSWERING
from entities.gateway.generation.session import GenerationSession
from entities.gateway.generation.session_keeper import SessionKeeper
from entities.gateway.outcomes.outcome_reports import OutcomeReports
from entities.gateway.outcomes.request_outcome import AnswerTrace, RequestDraw, outcome_of
from schemas.errors import DmscError
from schemas.services.model_service import ServedVersion
from schemas.services.outcomes import MirroredRequest

log = get_logger("generation")


class Shadows:
    """Copies of requests. `most`: at a time; beyond it requests are not copied."""

    def __init__(self, keeper: SessionKeeper, reports: OutcomeReports, most: int) -> None:
        self._keeper = keeper
        self._reports = reports
        self._most = most
        self._tasks = TaskSet()

    def mirror(self, draw: RequestDraw, sessions: Sequence[GenerationSession]) -> None:
        """Has each version in shadow answer what these sessions were asked. Nobody waits for it.

        Copies count neither against the user's rate nor as anybody's answer.
        """
        for name in draw.service.shadow:
            version = draw.service.version(name)
            if version is None or name == draw.version.version or version.state not in ANSWERING:
                continue
            for session in sessions:
                if len(self._tasks) >= self._most:
                    return  # they are a sample, and must not take the place of answers
                if _fits(version, draw.version, session):
                    self._tasks.create(self._answer(draw, version, session))

    async def _answer(self, draw: RequestDraw, version: ServedVersion, original: GenerationSession) -> None:
        names = {"id": secrets.token_hex(16), "session": secrets.randbits(62)}
        of_it = {"version": version.version, "job": version.job}
        copied = {**of_it, "stop": (), "mirrored": True, "keep": None, **names}
        began = time.monotonic()
        try:
            shadow = await self._keeper.begin(original.generation.model_copy(update=copied))
        except DmscError as error:
            log.info("no answer in shadow", version=version.version, code=error.code)
            return
        theirs: list[AnswerTrace] = []
        own: list[AnswerTrace] = []
        original.on_over(theirs.append)
        shadow.on_over(own.append)
        try:
            await original.ended.wait()
            if theirs[0].ended in ("stop", "length", "failed"):
                # a text that ended the answer ends no copy: so many tokens are enough
                most = theirs[0].tokens if theirs[0].ended != "failed" else original.generation.most_tokens
                await shadow.until(most)
        finally:
            shadow.cancel()
        if theirs[0].ended in ("cancelled", "fenced"):
            return
        mirrored = RequestDraw(service=draw.service, version=version, is_drawn=False, key=None, at=began)
        answered, copy = outcome_of(draw, theirs[0]), outcome_of(mirrored, own[0])
        if answered is not None and copy is not None:
            same = _same_tokens(original, shadow)
            self._reports.mirrored(
                draw.service, MirroredRequest(answered=answered, shadow=copy, same_tokens=same)
            )


def _fits(version: ServedVersion, answering: ServedVersion, session: GenerationSession) -> bool:
    """Whether the copy means the same: tokens of another vocabulary would be another text."""
    generation = session.generation
    tokens = len(generation.prompt) + generation.most_tokens
    return version.vocabulary == answering.vocabulary and not 0 < version.context < tokens


def _same_tokens(one: GenerationSession, other: GenerationSession) -> int:
    """How many tokens, from the first on, are equal."""
    same = 0
    for mine, theirs in zip(one.tokens, other.tokens, strict=False):
        if mine.token != theirs.token:
            break
        same += 1
    return same
