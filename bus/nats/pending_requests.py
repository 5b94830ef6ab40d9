"""What is asked through a link's own inbox: each question has its own name, and fails with the connection."""

from __future__ import annotations

import asyncio

from nats.aio.msg import Msg

from bus.nats import reply_subjects as inboxes
from bus.wire import request_progress as progress
from schemas.errors import BusUnreachable, DeadlineExceeded, DmscError, NoResponders, Refused


class PendingRequest:
    """One question; `with` keeps it open. `patient` ones outlive a lost connection and a 503 (which is only
    noted: `unheard`). `so_far`: the most that its answerer has told of its progress."""

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
            self.answer.exception()  # seen; asyncio need not complain that it never was

    def fail(self, error: DmscError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def expire(self, timeout_s: float) -> None:
        self.fail(
            DeadlineExceeded(f"no answer on {self.subject} within {timeout_s:g} s", subject=self.subject)
        )


class PendingRequests:
    """The open ones of one connection's inbox, each with the subject that its answer alone has."""

    def __init__(self, inbox: str) -> None:
        self._inbox = inbox
        self._open: dict[str, PendingRequest] = {}

    def new(self, subject: str, payload: bytes, answerer: str, *, patient: bool) -> PendingRequest:
        inbox = f"{self._inbox}.{answerer}.{inboxes.question(subject, payload, answerer)}"
        return PendingRequest(self._open, inbox, subject, patient)

    async def answered(self, message: Msg) -> None:
        """Something has come to the inbox: an answer, word of progress, or that nobody listens."""
        asked = self._open.get(message.subject)
        if asked is None or asked.answer.done():
            return
        if not message.data and message.headers and message.headers.get("Status") == "503":
            if asked.patient:
                asked.unheard = True
            else:
                asked.fail(NoResponders(f"nobody listens on {asked.subject}", subject=asked.subject))
            return
        so_far = progress.told_in(message.headers, message.data)
        if so_far is None:
            asked.answer.set_result(message)
        elif asked.patient:
            asked.so_far = max(asked.so_far, so_far)

    def denied(self, subject: str, who: str) -> None:
        """The server, which says `subject` in lower case, does not let `who` publish there."""
        for asked in list(self._open.values()):
            if subject in (asked.subject.lower(), asked.inbox.lower()):  # the latter is a barrier
                asked.fail(Refused(f"{who} may not publish on {asked.subject}", subject=asked.subject))

    def lost(self) -> None:
        """The connection broke: answers that were on their way will not come. Patient ones ask again."""
        for asked in self._open.values():
            if not asked.patient:
                asked.fail(BusUnreachable("the connection to the bus broke while waiting for the answer"))

    def end(self, error: DmscError) -> None:
        """Nobody will be answered any more."""
        for asked in self._open.values():
            asked.fail(error)
