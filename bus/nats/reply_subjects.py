"""Reply subjects: they say who asked, who may answer, and which request is answered.

    _INBOX.<asker's kind>.<asker's name>.<connection>.<answerer's kind>.<answerer's name>.<question>

`<connection>` is 64 random bits of the asker's connection. `<question>` is 64 random bits of the request and
a digest of its subject and payload. Each identity may listen only to its own kind and name, and may publish
only to inboxes that name it as the answerer (`bus.guard.permissions`); being asked gives no right. A row with
a queue group, or of an entity of which there is only one, names no answerer: `_` stands there for all of the
kind. JetStream, which has no identity, answers as `jetstream._`.

A service answers with its own rights on behalf of the asker, so it checks the reply subject before it reads
the message (`asker_of`, `Requester.is_sender`). It refuses a reply subject that belongs to another row,
service or request, or that is no inbox. So somebody who reads along can't redirect a service's answer: an
open request can be answered only by the answer to it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import NamedTuple

from nats.aio.msg import Msg

from bus.subject_row import Subject
from schemas.envelope import EntityKind, Sender
from schemas.errors import BadMessage

INBOX = "_INBOX"
USER = "user"
"""The kind of an asker with a user's token; the answerer does not know its actual kind."""
ANYBODY = "_"
"""In place of an answerer's name: any answerer of that kind."""
JETSTREAM = f"jetstream.{ANYBODY}"
BROKER = f"broker.{ANYBODY}"
SELF = f"self.{ANYBODY}"
"""The answerer of a message that a connection sends to itself."""
RANDOM_BYTES = 8
DIGEST_BYTES = 12

_form = re.compile(
    r"_INBOX\.([a-z-]{1,40})\.([A-Za-z0-9_-]{1,120})\.[0-9a-f]{16}"
    r"\.([a-z-]{1,40}\.[A-Za-z0-9_-]{1,120})\.[0-9a-f]{16}([0-9a-f]{24})"
)
_USERS_KINDS = (EntityKind.CLIENT, EntityKind.TAP, EntityKind.FUNCTIONAL_MODULE)
"""The kinds that a sender with a user's token may name."""


class Requester(NamedTuple):
    """The asker that a reply subject names. `digest` is the digest of the request."""

    kind: str
    name: str
    digest: str

    def is_sender(self, sender: Sender, *, guarded: bool) -> bool:
        """Whether an envelope's sender is the asker; always true on an unguarded bus."""
        if not guarded:
            return True
        if self.kind == USER:
            return sender.kind in _USERS_KINDS
        return self.kind == sender.kind and self.name == sender.name


def inbox_of(kind: str, name: str) -> str:
    """The inbox prefix of `name`; nobody else may listen there."""
    return f"{INBOX}.{kind}.{name}"


def inbox_of_token(token: str) -> str:
    """The inbox prefix of a user, who need not know the name that the authorizer uses."""
    return inbox_of(USER, hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()[:20])


def of_connection(prefix: str) -> str:
    """A new inbox for one connection."""
    return f"{prefix}.{secrets.token_hex(RANDOM_BYTES)}"


def question(subject: str, payload: bytes, answerer: str) -> str:
    """A new last token for this request.

    It has no digest for JetStream, which checks none, and for a broker, which answers only its asker
    (`bus.broker`): chunks of objects are large.
    """
    unguessable = secrets.token_hex(RANDOM_BYTES)
    return unguessable if answerer in (JETSTREAM, BROKER, SELF) else unguessable + digest(subject, payload)


def digest(subject: str, payload: bytes) -> str:
    hashed = hashlib.blake2b(subject.encode(), digest_size=DIGEST_BYTES)
    hashed.update(b"\n")  # no subject contains it
    hashed.update(payload)
    return hashed.hexdigest()


def answering(kind: str, name: str = ANYBODY) -> str:
    """The pattern of all inboxes to which an answerer publishes; `name` may be `*`."""
    return f"{INBOX}.*.*.*.{kind}.{name}.*"


def asker_of(row: Subject, message: Msg) -> Requester:
    """The asker, who gets the answer to a request of `row`.

    Raises:
        BadMessage: the reply subject is not an inbox for the answer to this very request; do not answer.
    """
    match = _form.fullmatch(message.reply)
    if match is None:
        raise _bad_reply(message, "is not an inbox")
    kind, name, answerer, request_digest = match.groups()
    if answerer != row.answerer_on(message.subject):
        raise _bad_reply(message, "is an inbox for somebody else's answers")
    if request_digest != digest(message.subject, message.data):
        raise _bad_reply(message, "is an inbox for the answer to another question")
    return Requester(kind, name, request_digest)


def another_sender(row: Subject, asker: Requester, sender: Sender) -> BadMessage:
    return BadMessage(
        f"{row.name}: {sender.kind} {sender.name} wants its answer sent to {asker.kind} {asker.name}",
        reason="reply",
    )


def _bad_reply(message: Msg, why: str) -> BadMessage:
    reply = message.reply[:200] or "(none)"
    return BadMessage(f"{message.subject}: its reply subject {reply!r} {why}", reason="reply")
