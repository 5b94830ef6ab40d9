"""Follows one microbatch through its hops: dispatch, notices, answers and claims, with latencies."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass

from bus import subjects
from bus.connection import Bus
from bus.tap.message import TappedMessage
from schemas.base import Message, is_token
from schemas.data_plane import MicrobatchNotice, NoticeAnswer
from schemas.errors import BadInput
from schemas.step import MicrobatchClaim, MicrobatchDispatch, StepBegin

ROWS = (
    subjects.STEP_BEGIN,
    subjects.STEP_DISPATCH,
    subjects.NOTICE,
    subjects.NOTICE_ANSWER,
    subjects.STEP_CLAIM,
)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Names a microbatch: `job/step/microbatch`."""

    job: str
    step: int
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> Microbatch:
        """The microbatch that a text names.

        Raises:
            BadInput: the text is not of that form.
        """
        parts = text.split("/")
        if len(parts) == 3 and is_token(parts[0]) and parts[1].isdigit() and parts[2].isdigit():
            return cls(parts[0], int(parts[1]), int(parts[2]))
        raise BadInput(f"{text!r} is not a microbatch: write job/step/microbatch, as in my-job/3/0")

    def patterns(self) -> list[str]:
        """The patterns to tap for it."""
        return [row.wildcard(job=self.job) for row in ROWS]

    def concerns(self, message: Message | None) -> bool:
        match message:
            case StepBegin() | MicrobatchDispatch():
                return message.step == self.step and self.microbatch in message.microbatches
            case MicrobatchNotice() | NoticeAnswer() | MicrobatchClaim():
                return message.step == self.step and message.microbatch == self.microbatch
        return False


@dataclass(frozen=True, slots=True)
class TraceHop:
    """One message about the microbatch. Times are in milliseconds by the tap's own clock, or by the sender's
    clock for recorded messages."""

    at: float
    since_first_ms: float
    since_previous_ms: float
    what: str
    text: str
    latency_ms: float | None = None

    def __str__(self) -> str:
        took = f"  after {self.latency_ms:.1f} ms" if self.latency_ms is not None else ""
        times = f"{self.since_first_ms:>10.1f} ms  +{self.since_previous_ms:<8.1f}"
        return f"{times} {self.what:<10} {self.text}{took}"


class MicrobatchTrace:
    """Takes tapped messages and returns the hops of one microbatch; repeated notices are marked as such."""

    def __init__(self, microbatch: Microbatch) -> None:
        self.microbatch = microbatch
        self.hops: list[TraceHop] = []
        self.claimed: set[int] = set()
        """The stages whose claim was seen; the claim of stage 0 comes last, except in an evaluation."""
        self._noticed: dict[tuple[object, ...], float] = {}

    @property
    def complete(self) -> bool:
        return 0 in self.claimed

    def add(self, tapped: TappedMessage) -> TraceHop | None:
        """Adds a message; returns its hop, or None if it is not about the microbatch."""
        message = tapped.message
        if message is None or not self.microbatch.concerns(message):
            return None
        sender = tapped.envelope.sender.name if tapped.envelope is not None else "?"
        latency: float | None = None
        match message:
            case StepBegin():
                what, text = "begin", f"{sender} asks {tapped.tokens['gateway']}, attempt {message.attempt}"
            case MicrobatchDispatch():
                what, text = "dispatch", f"{sender} → {tapped.tokens['sid']}, attempt {message.attempt}"
            case MicrobatchNotice():
                key = (message.direction, message.link, message.tag, message.receiver)
                what = "notice" if key not in self._noticed else "repeated"
                self._noticed.setdefault(key, tapped.at)
                hop = f"{message.sender.sid} → {message.receiver.sid} {message.direction}"
                text = f"{hop}, {_tensors(message)}, attempt {message.attempt}"
            case NoticeAnswer():
                key = (message.direction, message.link, message.tag, message.receiver)
                noticed_at = self._noticed.get(key)
                latency = None if noticed_at is None else 1e3 * (tapped.at - noticed_at)
                what, text = message.answer, f"{message.receiver.sid} answers the {message.direction} notice"
            case MicrobatchClaim():
                self.claimed.add(message.stage)
                loss = "" if message.loss is None else f", loss {message.loss:.4f}"
                what = "claim"
                text = (
                    f"{message.owner.sid} has stage {message.stage} from {message.upstream}: forward "
                    f"{message.forward_ms:.1f} ms, backward {message.backward_ms:.1f} ms{loss}"
                )
            case _:
                return None
        first = self.hops[0].at if self.hops else tapped.at
        previous = self.hops[-1].at if self.hops else tapped.at
        trace_hop = TraceHop(
            tapped.at, 1e3 * (tapped.at - first), 1e3 * (tapped.at - previous), what, text, latency
        )
        self.hops.append(trace_hop)
        return trace_hop

    def add_all(self, many: Iterable[TappedMessage]) -> list[TraceHop]:
        return [
            hop
            for tapped in sorted(many, key=lambda message: message.at)
            if (hop := self.add(tapped)) is not None
        ]


async def recorded(bus: Bus, microbatch: Microbatch) -> list[TappedMessage]:
    """The messages about a past microbatch in the stream STEPS: notices and claims, at their senders' times.

    Answers and dispatches are not kept in a stream.
    """
    messages: list[TappedMessage] = []
    for row in (subjects.NOTICE, subjects.STEP_CLAIM):
        async with aclosing(bus.history(row, job=microbatch.job)) as items:
            async for item in items:
                if microbatch.concerns(item.message):
                    tokens = row.matches(item.subject) or {}
                    messages.append(
                        TappedMessage(
                            item.envelope.sent_at, item.subject, row, tokens, item.envelope, item.message, b""
                        )
                    )
    return sorted(messages, key=lambda tapped: tapped.at)


def _tensors(notice: MicrobatchNotice) -> str:
    shapes = ", ".join(f"{tensor.dtype}[{'×'.join(map(str, tensor.shape))}]" for tensor in notice.tensors)
    return shapes or "no tensors"
