"""The type of a row in the table of subjects (`bus.subjects`), and the concrete subjects of a row."""

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
"""Tokens that name a party."""
ANSWER_BYTES = 1 << 20
"""Most bytes of an answer, unless its row says otherwise. Reading that many blocks the event loop for less
than 50 ms, whatever they contain."""
SPEAKERS = ("agent", "gateway", "sid")
"""Tokens that name the party itself; the first one that a row has counts, and further tokens name others."""
ANY_KIND = "any"
"""The answerer's kind of a row that several kinds serve, each under its own name."""


class Delivery(StrEnum):
    """How a subject's messages travel (DESIGN §3)."""

    CORE = "core"  # published at most once; kept by the row's `stream`, if it has one
    REQUEST = "request"  # one answer; the asker repeats requests that must arrive
    STREAM = "stream"  # appended with a message id and acknowledged by JetStream
    KEY_VALUE = "key-value"  # the bucket is the truth; a change is only a hint to read it


class Names(StrEnum):
    """Whom the SID, agent, gateway, cluster or module in a subject names; permissions fill it in."""

    SENDER = "sender"
    RECEIVER = "receiver"
    BOTH = "both"  # senders and receivers of one cluster
    NOBODY = "nobody"  # the token names what the message is about


Request = TypeVar("Request", bound=Message, default=Any)
"""The type of a row's messages."""
Reply = TypeVar("Reply", bound=Message, default=Any)
"""The type of a row's answers."""


@dataclass(frozen=True, slots=True)
class Subject(Generic[Request, Reply]):
    """One row of the table. `pattern` has `{tokens}`; calling the row with them gives a concrete subject.

    A row with a bucket is delivered as key-value, one with a reply as a request; of all others `delivery`
    says how. By default (`names` is None), a request names its receiver, a published message its
    sender, and a key nobody. An answer with more than `answer_bytes` is neither sent nor read.
    """

    name: str
    pattern: str
    schema: type[Request]
    senders: frozenset[EntityKind]
    receivers: frozenset[EntityKind]
    about: str
    reply: type[Reply] | None = None
    stream: str | None = None
    bucket: str | None = None
    names: Names | None = None
    answer_bytes: int = ANSWER_BYTES
    other_replies: tuple[type[Reply], ...] = ()  # further types of answers, for askers that know them
    delivery: Delivery = Delivery.CORE
    tokens: tuple[str, ...] = field(init=False)
    answered_by: str = field(init=False)  # the answerer's kind; `any` if there are several
    answerer_token: str | None = field(init=False)  # the token that names the answerer
    _answerer_at: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(re.findall(r"\{(\w+)\}", self.pattern)))
        if self.bucket is not None or self.reply is not None:
            derived = Delivery.REQUEST if self.bucket is None else Delivery.KEY_VALUE
            object.__setattr__(self, "delivery", derived)
        if self.names is None:
            defaults = {Delivery.REQUEST: Names.RECEIVER, Delivery.KEY_VALUE: Names.NOBODY}
            object.__setattr__(self, "names", defaults.get(self.delivery, Names.SENDER))
        kinds = [str(kind) for kind in self.receivers]
        object.__setattr__(self, "answered_by", kinds[0] if len(kinds) == 1 else ANY_KIND)
        party_tokens = (
            [token for token in self.tokens if token in PARTIES] if self.names is Names.RECEIVER else []
        )
        object.__setattr__(self, "answerer_token", party_tokens[0] if party_tokens else None)
        place = self.prefix.count(".") + 1 + self.tokens_at(party_tokens[0]) if party_tokens else 0
        object.__setattr__(self, "_answerer_at", place)

    @property
    def speaker(self) -> str | None:
        """The token that holds the name of the party that `names` is about."""
        return next((token for token in SPEAKERS if token in self.tokens), None)

    def tokens_at(self, token: str) -> int:
        """The position of a token in the pattern, from 0."""
        return self.pattern.split(".").index(f"{{{token}}}")

    def answerer(self, tokens: Mapping[str, object]) -> str:
        """The answerer of a request with these tokens, in the form of reply subjects: kind and name."""
        name = tokens[self.answerer_token] if self.answerer_token else "_"
        return f"{self.answered_by}.{name}"

    def answerer_on(self, subject: str) -> str:
        """The answerer of a request on a concrete subject of this row, in the form of reply subjects."""
        name = subject.split(".")[self._answerer_at] if self._answerer_at else "_"
        return f"{self.answered_by}.{name}"

    @property
    def prefix(self) -> str:
        return f"$KV.{self.bucket}" if self.bucket else ROOT

    def __call__(self, **tokens: str | int) -> str:
        """The concrete subject for these tokens.

        Raises:
            BadMessage: a value is missing, or is not one token.
        """
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
        """The pattern of a subscription to this row; tokens that are not given match anything."""
        filled = {key: tokens.get(key, "*") for key in self.tokens}
        return f"{self.prefix}.{self.pattern.format(**filled)}"

    def matches(self, subject: str) -> dict[str, str] | None:
        """The tokens of a concrete subject of this row, or None if it is of another row."""
        pattern_tokens = f"{self.prefix}.{self.pattern}".split(".")
        subject_tokens = subject.split(".")
        if len(pattern_tokens) != len(subject_tokens):
            return None
        values: dict[str, str] = {}
        for pattern, token in zip(pattern_tokens, subject_tokens, strict=True):
            if pattern.startswith("{"):
                values[pattern[1:-1]] = token
            elif pattern != token:
                return None
        return values
