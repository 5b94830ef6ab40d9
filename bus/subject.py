"""What a subject is: one row of the table in `bus.subjects`, and the concrete subjects that are of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic

from typing_extensions import TypeVar

from schemas.base import Message, is_token
from schemas.envelope import EntityKind
from schemas.errors import BadMessage

ROOT = "dmsc.v1"
PARTIES = ("sid", "agent", "gateway", "cluster", "module")
"""Tokens that name somebody."""
ANSWER_BYTES = 1 << 20
"""Most bytes of an answer, unless its row says otherwise: reading that many keeps a loop for less than 50 ms,
whatever they are."""
SPEAKERS = ("agent", "gateway", "sid")
"""Tokens that say a party's own name, the first that a row has: what stands behind it is about others."""
ANY_KIND = "any"
"""The answerer's kind of a row that several kinds serve, each in its own name."""


class Delivery(StrEnum):
    """How a subject's messages travel (DESIGN §3)."""

    CORE = "core"  # published, at most once; kept by a stream where `stream` says so
    REQUEST = "request"  # one answer; repeated by the asker where it must arrive
    STREAM = "stream"  # appended with a message id and acknowledged by JetStream
    KEY_VALUE = "key-value"  # the bucket is the truth, a change is only a hint to read it


class Names(StrEnum):
    """Whom the SID, agent, gateway, cluster or module in a subject names: what permissions fill in."""

    SENDER = "sender"
    RECEIVER = "receiver"
    BOTH = "both"  # senders and receivers of one cluster
    NOBODY = "nobody"  # what it is about


Request = TypeVar("Request", bound=Message, default=Any)
"""What a row's senders say."""
Reply = TypeVar("Reply", bound=Message, default=Any)
"""What a row's receivers answer."""


@dataclass(frozen=True, slots=True)
class Subject(Generic[Request, Reply]):
    """One row. `pattern` has `{tokens}`; calling the row with them gives a concrete subject.

    Without `names`, a request names who serves it, what is published who says it, and a key nobody.
    What has more than `answer_bytes` is not read as an answer, and not sent as one.
    """

    name: str
    pattern: str
    schema: type[Request]
    senders: frozenset[EntityKind]
    receivers: frozenset[EntityKind]
    delivery: Delivery
    about: str
    reply: type[Reply] | None = None
    stream: str | None = None
    bucket: str | None = None
    names: Names | None = None
    answer_bytes: int = ANSWER_BYTES
    other_replies: tuple[type[Message], ...] = ()  # besides `reply`, to who knows of them
    tokens: tuple[str, ...] = field(init=False)
    answered_by: str = field(init=False)  # the kind of who answers; `any` where there are several
    answerer_token: str | None = field(init=False)  # the token that names who answers
    _answerer_at: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(re.findall(r"\{(\w+)\}", self.pattern)))
        if self.names is None:
            usual = {Delivery.REQUEST: Names.RECEIVER, Delivery.KEY_VALUE: Names.NOBODY}
            object.__setattr__(self, "names", usual.get(self.delivery, Names.SENDER))
        kinds = [str(kind) for kind in self.receivers]
        object.__setattr__(self, "answered_by", kinds[0] if len(kinds) == 1 else ANY_KIND)
        named = [token for token in self.tokens if token in PARTIES] if self.names is Names.RECEIVER else []
        object.__setattr__(self, "answerer_token", named[0] if named else None)
        place = self.prefix.count(".") + 1 + self.tokens_at(named[0]) if named else 0
        object.__setattr__(self, "_answerer_at", place)

    @property
    def speaker(self) -> str | None:
        """The token with the name of the party that `names` is about."""
        return next((token for token in SPEAKERS if token in self.tokens), None)

    def tokens_at(self, token: str) -> int:
        """Where in the pattern a token stands, from 0."""
        return self.pattern.split(".").index(f"{{{token}}}")

    def answerer(self, tokens: Mapping[str, object]) -> str:
        """Kind and name of who answers a request with these tokens, as reply subjects say it."""
        name = tokens[self.answerer_token] if self.answerer_token else "_"
        return f"{self.answered_by}.{name}"

    def answerer_on(self, subject: str) -> str:
        """The same for a concrete subject of this row."""
        name = subject.split(".")[self._answerer_at] if self._answerer_at else "_"
        return f"{self.answered_by}.{name}"

    @property
    def prefix(self) -> str:
        return f"$KV.{self.bucket}" if self.bucket else ROOT

    def __call__(self, **tokens: str | int) -> str:
        """The concrete subject; each of the row's tokens must be given and be one token."""
        for key in self.tokens:
            if not is_token(str(tokens.get(key, ""))):
                raise BadMessage(
                    f"subject {self.name}: {key}={tokens.get(key)!r} is not one token (letters, digits, _, -)"
                )
        return f"{self.prefix}.{self.pattern.format(**tokens)}"

    def key(self, **tokens: str | int) -> str:
        """The key in this row's bucket (the concrete subject without the bucket's prefix)."""
        return self(**tokens)[len(self.prefix) + 1 :]

    def wildcard(self, **tokens: str | int) -> str:
        """A subscription for this row; tokens not given match anything."""
        filled = {key: tokens.get(key, "*") for key in self.tokens}
        return f"{self.prefix}.{self.pattern.format(**filled)}"

    def matches(self, subject: str) -> dict[str, str] | None:
        """The tokens of a concrete subject of this row, or None if it is of another row."""
        mine = f"{self.prefix}.{self.pattern}".split(".")
        theirs = subject.split(".")
        if len(mine) != len(theirs):
            return None
        found: dict[str, str] = {}
        for pattern, token in zip(mine, theirs, strict=True):
            if pattern.startswith("{"):
                found[pattern[1:-1]] = token
            elif pattern != token:
                return None
        return found
