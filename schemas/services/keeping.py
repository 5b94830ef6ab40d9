"""What is kept of requests whose service and whose user both say so, and on which terms (docs/backflow.md).

A person is never named in it: `user` and `subject` are pseudonyms, made with a key that gateways alone read.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Message, Part, Time, Token
from schemas.marks import HOLDS_USER_VALUES, PRIVATE, SECRET, Url
from schemas.serve_spec import KeepSpec, KeptPart
from schemas.services.generation import KeptMessage

MOST_ITEM_BYTES = 64 << 10
"""Most bytes of an item's texts: longer requests are not kept."""
SubjectName = Annotated[str, Field(min_length=1, max_length=200)]
"""Whose request it is, as `user` of the request names them: a person that the token's user serves."""


class Consent(Message, wire="service.consent"):
    """What a subject has said about a service; kept for ever, because a withdrawal holds for ever.

    Nothing that was asked up to `withdrawn_at` is kept or trained on. What is asked from `given_at` on may
    be, without a word in each request, if that is the later of the two.
    """

    service: Token
    subject: Token
    given_at: Time = 0.0
    withdrawn_at: Time = 0.0
    days: int = Field(0, ge=0, description="for which it was given; a service that keeps longer asks anew")
    parts: tuple[KeptPart, ...] = Field((), description="for which it was given; more of them ask anew")
    own: bool = Field(True, description="said by the subject's user, not by who runs the service")

    @property
    def is_given(self) -> bool:
        return self.given_at > self.withdrawn_at

    def covers(self, rules: KeepSpec) -> bool:
        """Whether it was given for at least what these rules keep."""
        return self.is_given and rules.days <= self.days and set(rules.parts) <= set(self.parts)


class Feedback(Part):
    """What a user says of an answer."""

    rating: float = Field(ge=-1, le=1, description="from bad (-1) to good (1)")
    correction: Annotated[str, PRIVATE] = Field("", max_length=65_536, description="a better answer")
    at: Time = 0.0


class KeptItem(Message, wire="service.kept_item"):
    """A request with its answer, without what the redaction takes out. Its row expires at `until`."""

    service: Token
    version: Token
    item: Token = Field(description="id of its generation")
    user: Token = Field(description="pseudonym of the token's user")
    subject: Token = Field(description="pseudonym of whose request it is")
    standing: bool = Field(description="kept by a consent that was given before; else by the request's own")
    tenant: str = ""
    shape: Literal["completion", "chat"]
    messages: tuple[KeptMessage, ...]
    feedback: Feedback | None = None
    takes_feedback: bool = False
    redacted: Annotated[dict[str, int], HOLDS_USER_VALUES] = Field(
        {}, description="kind of what was taken out → how often"
    )
    at: Time = Field(description="when it was asked")
    until: Time


class KeptCollection(Message, wire="service.kept_collection"):
    """A file of items that a job trains on. Removed at `until`, or once one of its subjects is erased."""

    service: Token
    number: int = Field(ge=1)
    source: Url = Field(description="what a job names as data.source")
    sha256: str
    bytes: int
    items: int
    users: int
    subjects: int
    dropped: Annotated[dict[str, int], HOLDS_USER_VALUES] = Field(
        {}, description="reason → items that are left out"
    )
    share: float = Field(description="largest part that comes of one user")
    made_at: Time
    until: Time
    marks: str = Field(
        "", repr=False, description="the first 8 digits of each pseudonym in it; empty: too many to list"
    )
    removed_at: Time | None = None
    why: str = Field("", description="why it was removed")


MARK_DIGITS = 8
MOST_MARKS = 40_000
"""Most pseudonyms that a collection's record lists: its row has less than half of a message."""


class PseudonymKey(Message, wire="service.pseudonym_key"):
    """The key of pseudonyms, sealed to gateways. Who deletes it severs all items from their subjects."""

    key: Annotated[str, Field(repr=False), SECRET]


# --- what clients send and get ------------------------------------------------------------------------------
class ConsentBody(Part):
    """`POST /v1/consents/{service}/give` and `/withdraw`: for yourself, or for one whom you serve."""

    subject: SubjectName | None = None


class ConsentGiven(Part):
    """A consent of yours, or of a subject that you serve."""

    service: Token
    state: Literal["given", "withdrawn"]
    at: Time = Field(description="what is asked later falls under it")
    days: int = Field(0, description="for which it is given")
    parts: tuple[KeptPart, ...] = Field((), description="for which it is given")
    erased: int = Field(0, description="items that the withdrawal has deleted")
    jobs: tuple[str, ...] = Field((), description="jobs that had read one of them: weights can't forget")


class FeedbackBody(Part):
    """`POST /v1/feedback`: about an answer that was kept; `generation` is its header `dmsc-generation`."""

    generation: Token
    rating: float = Field(ge=-1, le=1, description="from bad (-1) to good (1)")
    correction: str = Field("", max_length=65_536, description="a better answer")


class EraseBody(Part):
    """`POST /v1/services/{service}/kept/erase`: a user of the mesh, or one subject of that user."""

    user: Annotated[str, Field(min_length=1, max_length=120)]
    subject: SubjectName | None = Field(None, description="only whose requests named this `user`")


class KeptErased(Part):
    """What was erased, and what was trained on it before: weights can't forget."""

    service: Token
    items: int
    collections: tuple[int, ...] = Field((), description="numbers of the files that held some of them")
    jobs: tuple[str, ...] = Field((), description="jobs that have read one, and that went on from these")
    models: tuple[str, ...] = Field((), description="NAME@VERSION that learnt from one, or whose parent did")
    versions: tuple[str, ...] = Field((), description="SERVICE@VERSION, of any service, with such weights")


class CollectBody(Part):
    """`POST /v1/services/{service}/kept/collections`: make a file of the items to train on."""

    min_rating: float | None = Field(None, ge=-1, le=1, description="only items with at least this rating")
    lasts_days: float = Field(1.0, ge=0, le=3650, description="leave out items that end sooner")
    share: float | None = Field(
        None, gt=0, le=1, description="largest part that comes of one user; default: the service's"
    )


class KeptSummary(Part):
    """What a service has kept, as numbers."""

    service: Token
    items: int
    users: int
    subjects: int
    with_feedback: int
    redacted: dict[str, int] = {}
    first_ends: Time | None = None
    collections: tuple[KeptCollection, ...] = ()
