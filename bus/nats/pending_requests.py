"""Requests that wait for an answer in a connection's inbox; each has its own reply subject."""

from __future__ import annotations

import asyncio

from nats.aio.msg import Msg

from bus.nats import reply_subjects
from bus.wire import request_progress
from schemas.errors import BusUnreachable, DeadlineExceeded, DmscError, NoResponders, Refused


class PendingRequest:
    """A request that waits for its answer while its `with` block is open.

    A `patient` request survives a lost connection and a 503, which only sets `unheard`. `so_far` is the
    greatest progress that its answerer has reported.
    """

    __slots__ = ("_open", "answer", "inbox", "patient", "so_far", "subject", "unheard")

    def __init__(
        self, open_questions: dict[str, PendingRequest], inbox: str, subject: str, patient: bool
    ) -> None:
        self.subject = subject
        self.inbox = inbox
        self.patient = patient
        self.unheard = False
        self.so_far = 0
        self.answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._open = open_questions

    def __enter__(self) -> tuple[str, PendingRequest]:
        self._open[self.inbox] = self
        return self.inbox, self

    def __exit__(self, *_: object) -> None:
        del self._open[self.inbox]
        if self.answer.done() and not self.answer.cancelled():
            self.answer.exception()  # marks it as retrieved, so that asyncio does not complain

    def fail(self, error: DmscError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def expire(self, timeout_s: float) -> None:
        self.fail(
            DeadlineExceeded(f"no answer on {self.subject} within {timeout_s:g} s", subject=self.subject)
        )


class PendingRequests:
    """The pending requests of one connection's inbox, by the reply subject that only their answer has."""

    def __init__(self, inbox: str) -> None:
        self._inbox = inbox
        self._open: dict[str, PendingRequest] = {}

    def new(self, subject: str, payload: bytes, answerer: str, *, patient: bool) -> PendingRequest:
        inbox = f"{self._inbox}.{answerer}.{reply_subjects.question(subject, payload, answerer)}"
        return PendingRequest(self._open, inbox, subject, patient)

    async def answered(self, message: Msg) -> None:
        """Handles a message to the inbox: an answer, a progress report, or word that nobody listens."""
        request = self._open.get(message.subject)
        if request is None or request.answer.done():
            return
        if not message.data and message.headers and message.headers.get("Status") == "503":
            if request.patient:
                request.unheard = True
            else:
                request.fail(NoResponders(f"nobody listens on {request.subject}", subject=request.subject))
            return
        so_far = request_progress.told_in(message.headers, message.data)
        if so_far is None:
            request.answer.set_result(message)
        elif request.patient:
            request.so_far = max(request.so_far, so_far)

    def denied(self, subject: str, who: str) -> None:
        """Fails the requests on a subject (in lower case) where the server does not let `who` publish."""
        for request in list(self._open.values()):
            if subject in (request.subject.lower(), request.inbox.lower()):  # the latter is a barrier
                request.fail(Refused(f"{who} may not publish on {request.subject}", subject=request.subject))

    def lost(self) -> None:
        """Fails all but patient requests, because the connection broke and their answers will not come."""
        for request in self._open.values():
            if not request.patient:
                request.fail(BusUnreachable("the connection to the bus broke while waiting for the answer"))

    def end(self, error: DmscError) -> None:
        """Fails all requests."""
        for request in self._open.values():
            request.fail(error)
