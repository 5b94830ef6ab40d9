"""The reply subject says who may answer, and what: where an answer goes, and whether it may go there.

    _INBOX.<asker's kind>.<asker's name>.<connection>.<answerer's kind>.<answerer's name>.<question>

`<connection>` is 64 random bits of the asker's connection; `<question>` is 64 random bits of the question
and a digest of its subject and payload. Each identity listens to its own kind and name alone, and publishes
to inboxes only where it is the answerer (`bus.guard.permissions`): nobody has a right by having been asked. A
row with a queue group, or of an entity of which there is one, names no answerer: `_` stands there, for all of
the kind. JetStream, which asks nobody, answers as `jetstream._`.

A service answers for others with rights of its own, so it looks at a reply before it looks at the message
(`asker_of`, `Requester.is_sender`). A reply that belongs to another row, service or question, or to anything
but an inbox, is refused: who reads along can have an open question answered by nothing but the answer to it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import NamedTuple

from nats.aio.msg import Msg

from bus.subject import Subject
from schemas.envelope import EntityKind, Sender
from schemas.errors import BadMessage

INBOX = "_INBOX"
USER = "user"
"""The kind of those who come with a user's token: what they are is not known to who answers."""
ANYBODY = "_"
"""In place of an answerer's name: whoever is of that kind."""
JETSTREAM = f"jetstream.{ANYBODY}"
BROKER = f"broker.{ANYBODY}"
SELF = f"self.{ANYBODY}"
"""The answerer of a message to oneself."""
RANDOM_BYTES = 8
DIGEST_BYTES = 12

_form = re.compile(
    r"_INBOX\.([a-z-]{1,40})\.([A-Za-z0-9_-]{1,120})\.[0-9a-f]{16}"
    r"\.([a-z-]{1,40}\.[A-Za-z0-9_-]{1,120})\.[0-9a-f]{16}([0-9a-f]{24})"
)
_USERS_KINDS = (EntityKind.CLIENT, EntityKind.TAP, EntityKind.FUNCTIONAL_MODULE)
"""What somebody with a user's token may call itself."""


class Requester(NamedTuple):
    """Who asks, as the reply subject says. `digest` is of the question."""

    kind: str
    name: str
    digest: str

    def is_sender(self, sender: Sender, *, guarded: bool) -> bool:
        """Whether an envelope's sender asks for an answer to itself. Without a guard nobody has a name."""
        if not guarded:
            return True
        if self.kind == USER:
            return sender.kind in _USERS_KINDS
        return self.kind == sender.kind and self.name == sender.name


def inbox_of(kind: str, name: str) -> str:
    """Where the answers to `name` arrive; nobody else may listen there."""
    return f"{INBOX}.{kind}.{name}"


def inbox_of_token(token: str) -> str:
    """Where the answers to a user arrive, who need not know what the authorizer calls them."""
    return inbox_of(USER, hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()[:20])


def of_connection(prefix: str) -> str:
    """An inbox of its own for one connection."""
    return f"{prefix}.{secrets.token_hex(RANDOM_BYTES)}"


def question(subject: str, payload: bytes, answerer: str) -> str:
    """A new name for this question. JetStream looks at none, a broker answers nobody but who asks it
    (`bus.broker`), and chunks of objects are large."""
    unguessable = secrets.token_hex(RANDOM_BYTES)
    return unguessable if answerer in (JETSTREAM, BROKER, SELF) else unguessable + digest(subject, payload)


def digest(subject: str, payload: bytes) -> str:
    hashed = hashlib.blake2b(subject.encode(), digest_size=DIGEST_BYTES)
    hashed.update(b"\n")  # which no subject has
    hashed.update(payload)
    return hashed.hexdigest()


def answering(kind: str, name: str = ANYBODY) -> str:
    """What an answerer publishes to: the inboxes of all who ask it; `name` may be `*`."""
    return f"{INBOX}.*.*.*.{kind}.{name}.*"


def asker_of(row: Subject, message: Msg) -> Requester:
    """Who gets the answer to a request of `row`.

    Raises:
        BadMessage: the reply is not an inbox for the answer to this very question: nobody may be answered.
    """
    found = _form.fullmatch(message.reply)
    if found is None:
        raise _astray(message, "is not an inbox")
    kind, name, answerer, asked = found.groups()
    if answerer != row.answerer_on(message.subject):
        raise _astray(message, "is an inbox for somebody else's answers")
    if asked != digest(message.subject, message.data):
        raise _astray(message, "is an inbox for the answer to another question")
    return Requester(kind, name, asked)


def another_sender(row: Subject, asker: Requester, sender: Sender) -> BadMessage:
    return BadMessage(
        f"{row.name}: {sender.kind} {sender.name} wants its answer sent to {asker.kind} {asker.name}",
        reason="reply",
    )


def _astray(message: Msg, why: str) -> BadMessage:
    reply = message.reply[:200] or "(none)"
    return BadMessage(f"{message.subject}: its reply subject {reply!r} {why}", reason="reply")
