"""One tree of errors. Each has a stable `code`, says whether a retry can help, and carries fields.

    DmscError
    ├── BadInput              the user's input is wrong: place and remedy in the text
    │   ├── BadJob            a job file's key, type, or shape
    │   ├── BadModel          user code: factory fails, layers do not fit, digest differs
    │   ├── BadData           dataset missing, empty, too short
    │   ├── DamagedCheckpoint a file of it is missing or not as written
    │   ├── DamagedRun        a run's or a tap's file is cut off, or not as written
    │   ├── BadMessage        malformed, unknown or wrongly versioned message
    │   └── NewerRecord       a record of the mesh that only another version of this software can read
    ├── Refused               a valid request that is not permitted
    │   └── OverQuota         … because it would exceed the user's quota
    ├── NotFound              no such job, instance, artifact
    ├── Conflict              a compare-and-set lost; the record moved on
    │   ├── InProgress        the same request is being answered at this moment
    │   └── LastingConflict   no retry changes it: a closed feed, a name that is taken
    ├── Fenced                the sender is of an older epoch or incarnation
    ├── UnreadableRecord      the value at a key is no record
    ├── Unavailable           nobody answers: retry later
    │   ├── BusUnreachable
    │   ├── NoResponders
    │   ├── DeadlineExceeded
    │   └── Overloaded        refused before it was begun: too many requests, here or downstream
    │       └── RateLimited   … from this identity
    ├── GradientRefused       a microbatch's gradient is not finite, or too large to be summed
    ├── BadModelOutput        a served model's logits are not finite: that request alone fails
    ├── MicrobatchFailed      user code raised while it computed a microbatch
    ├── PeerUnreachable       a tensor link could not be built or broke
    └── IllegalTransition     a lifecycle was asked to do what its table does not allow

The wire carries `ErrorReply` (code, safe text, retryable, fields), never a repr or a traceback.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from schemas.base import Message
from schemas.marks import HOLDS_USER_VALUES


class DmscError(Exception):
    """Base of all errors that DMSC raises on purpose."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    answered: bool = False
    """Whether it came as the receiver's answer: then the receiver itself is reachable."""

    def __init__(self, text: str, **fields: Any) -> None:
        super().__init__(text)
        self.text = text
        self.fields = fields

    def to_reply(self) -> ErrorReply:
        safe = {key: str(value) for key, value in self.fields.items()}
        return ErrorReply(code=self.code, text=self.text, retryable=self.retryable, fields=safe)


class BadInput(DmscError):
    code = "bad_input"


class BadJob(BadInput):
    code = "bad_job"


class BadModel(BadInput):
    code = "bad_model"


class BadData(BadInput):
    code = "bad_data"


class DamagedCheckpoint(BadInput):
    code = "damaged_checkpoint"


class DamagedRun(BadInput):
    code = "damaged_run"


class BadMessage(BadInput):
    code = "bad_message"


class NewerRecord(BadInput):
    """Its field `record` is the bucket and key, `version` the version of the record."""

    code = "newer_record"


class UnreadableRecord(DmscError):
    """Its field `record` is the bucket and key, `revision` the revision that an update must name."""

    code = "unreadable_record"


class Refused(DmscError):
    code = "refused"


class OverQuota(Refused):
    """The user has as much as the quota allows; the text names the limit, the use and the remedy."""

    code = "over_quota"


class NotFound(DmscError):
    code = "not_found"


class Conflict(DmscError):
    code = "conflict"
    retryable = True


class InProgress(Conflict):
    code = "in_progress"


class LastingConflict(Conflict):
    code = "lasting_conflict"
    retryable = False


class Fenced(DmscError):
    code = "fenced"


class Unavailable(DmscError):
    code = "unavailable"
    retryable = True


class BusUnreachable(Unavailable):
    code = "bus_unreachable"


class NoResponders(Unavailable):
    code = "no_responders"


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"


class Overloaded(Unavailable):
    """Its field `retry_after_s` says when to try again."""

    code = "overloaded"


class RateLimited(Overloaded):
    code = "rate_limited"


class GradientRefused(DmscError):
    code = "gradient_refused"


class BadModelOutput(DmscError):
    code = "bad_model_output"


class MicrobatchFailed(DmscError):
    code = "microbatch_failed"


class PeerUnreachable(DmscError):
    code = "peer_unreachable"
    retryable = True


class IllegalTransition(DmscError):
    code = "illegal_transition"


class ErrorReply(Message, wire="error", version=(1, 0)):
    """The answer to a request that failed."""

    code: str
    text: str
    retryable: bool = False
    fields: Annotated[dict[str, str], HOLDS_USER_VALUES] = {}

    def to_exception(self) -> DmscError:
        """The exception that this reply stands for, so that callers catch the same classes."""
        return _by_code().get(self.code, DmscError)(self.text, **self.fields)


def _by_code() -> dict[str, type[DmscError]]:
    found: dict[str, type[DmscError]] = {}
    pending: list[type[DmscError]] = [DmscError]
    while pending:
        cls = pending.pop()
        found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found


class Ack(Message, wire="ack", version=(1, 0)):
    """The empty answer: received and done (or already done before)."""

    note: str = ""


def errors_below(kind: type[DmscError]) -> tuple[type[DmscError], ...]:
    """This class of errors, and all below it in the tree."""
    return (kind, *(below for child in kind.__subclasses__() for below in errors_below(child)))
