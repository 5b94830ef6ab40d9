"""Decides what a tap shows: decodes messages, matches answers with requests, samples and filters.

It works on live messages and on those of a file. Pure: no I/O.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from bus import subjects
from bus.tap import pattern as tap_pattern
from bus.tap.filter import Filter
from bus.tap.message import RawMessage, TappedMessage, decode
from schemas.errors import BadInput

INBOX = "_INBOX."
INBOXES = f"{INBOX}>"
REQUESTS_REMEMBERED = 10_000
"""How many requests, the latest ones, are remembered so that their answers are recognised."""
ANSWERS_HELD = 1_000
"""How many answers, the latest ones, are held until their request is seen: it comes by another subscription
and, where a tap is slow to read or servers are clustered, may come later."""


class TapDecoder:
    """Takes raw messages and returns those that are shown, decoded.

    Args:
        patterns: As typed by a person, see `bus.tap.pattern.complete`.
        filters: `field=value` expressions that must all be met, see `bus.tap.filter.Filter`.
        replies: Show also the answers to requests on these subjects.
        sample: Share of the messages that is shown, see `Sampler`.
        may: Whether the viewer may see a subject; an answer counts as its request's subject.

    Raises:
        BadInput: a pattern matches none of our subjects, a filter names a field that no message has, or the
            share is not above 0 and up to 1.
    """

    def __init__(
        self,
        patterns: Sequence[str] = (">",),
        *,
        filters: Sequence[str] = (),
        replies: bool = False,
        sample: float | None = None,
        may: Callable[[str], bool] | None = None,
    ) -> None:
        self.patterns = tuple(dict.fromkeys(tap_pattern.complete(pattern) for pattern in patterns))
        rows = [
            row
            for row in subjects.SUBJECTS
            if any(tap_pattern.overlap(p, row.wildcard()) for p in self.patterns)
        ]
        self.filters = [Filter.parse(text) for text in filters]
        for condition in self.filters:
            condition.check(rows)
        self.replies = replies
        self._sampler = None if sample is None else Sampler(sample)
        self._may = may
        self._requests: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._early: OrderedDict[str, TappedMessage] = OrderedDict()

    def subscriptions(self) -> tuple[str, ...]:
        """The patterns to subscribe to, or to read from a file."""
        return tuple(dict.fromkeys((*self.patterns, *((INBOXES,) if self.replies else ()))))

    def covers(self, subject: str) -> bool:
        """Whether a concrete subject is among the subscriptions."""
        return any(tap_pattern.matches(pattern, subject) for pattern in self.subscriptions())

    def allows(self, subject: str) -> bool:
        """Whether the viewer may see this subject; for an inbox, that is known only with its request."""
        return self._may is None or (self.replies and subject.startswith(INBOX)) or self._may(subject)

    def look(self, raw: RawMessage) -> list[TappedMessage]:
        """What is shown now: the message or nothing; after a request its answer, if that came before."""
        tapped = decode(raw.subject, raw.data, at=raw.at, operation=raw.operation)
        found: list[TappedMessage | None] = [tapped]
        if raw.subject.startswith(INBOX):
            found = [self._as_reply(tapped)]
        elif self.replies and tapped.envelope is not None and tapped.row is not None and tapped.row.reply:
            found.append(self._asked(tapped.envelope.id, tapped))
        return [each for each in found if each is not None and self._shows(each)]

    def _shows(self, tapped: TappedMessage) -> bool:
        sampled = self._sampler is None or self._sampler.keeps(tapped)
        if self._may is not None and not self._may(tapped.answers or tapped.subject):
            return False
        return sampled and self._passes_filters(tapped)

    def _asked(self, id: str, request: TappedMessage) -> TappedMessage | None:
        """Remembers a request; its answer, if that overtook it."""
        self._requests.setdefault(id, (request.subject, request.at))  # repeats keep the first
        while len(self._requests) > REQUESTS_REMEMBERED:
            self._requests.popitem(last=False)
        early = self._early.pop(id, None)
        return None if early is None else self._as_reply(early)

    def _as_reply(self, tapped: TappedMessage) -> TappedMessage | None:
        """The answer with its request; None for other inbox traffic, unless a pattern names inboxes."""
        cause = tapped.envelope.causation if tapped.envelope is not None else None
        request = self._requests.get(cause) if cause is not None else None
        if request is None:
            if any(pattern.startswith("_INBOX") for pattern in self.patterns):
                return tapped
            if cause is not None:
                self._early.setdefault(cause, tapped)
            while len(self._early) > ANSWERS_HELD:
                self._early.popitem(last=False)
            return None
        subject, at = request
        row, tokens = subjects.lookup(subject) or (None, {})
        latency_ms = max(0.0, 1e3 * (tapped.at - at))
        return replace(tapped, row=row, tokens=tokens, answers=subject, latency_ms=latency_ms)

    def _passes_filters(self, tapped: TappedMessage) -> bool:
        if not self.filters:
            return True
        tree = tapped.tree()
        return all(condition.meets(tree) for condition in self.filters)


REMEMBERED = 100_000
"""Messages whose root is known, so that what follows from them is kept or left out with them."""


class Sampler:
    """Keeps about `share` of the messages, by a hash of the id at the root of each message's causes.

    A message that names no cause is its own root. If a message's cause was not seen, the cause counts as the
    root. So a request and its answers always stay together, and longer trees do as far as this tap has seen
    their messages in order. There is no clock and no chance: two taps that see the same messages keep the
    same.
    """

    def __init__(self, share: float) -> None:
        """
        Raises:
            BadInput: unless 0 < share ≤ 1.
        """
        if not 0 < share <= 1:
            raise BadInput(f"a sample of {share:g}: give a share above 0 and up to 1, as in 0.1")
        self._limit = int(share * 2**64)
        self._roots: OrderedDict[str, str] = OrderedDict()

    def keeps(self, tapped: TappedMessage) -> bool:
        """Whether a message belongs to the sample.

        Call it for every message, because one outside the sample may be the cause of others.
        """
        envelope = tapped.envelope
        if envelope is None:
            return self._is_sampled(tapped.raw or tapped.subject.encode())
        cause = envelope.causation
        root = envelope.id if cause is None else self._roots.get(cause, cause)
        self._roots[envelope.id] = root
        while len(self._roots) > REMEMBERED:
            self._roots.popitem(last=False)
        return self._is_sampled(root.encode())

    def _is_sampled(self, key: bytes) -> bool:
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) < self._limit
