"""What a tap shows of what arrives: decoded, answers beside their requests, sampled, filtered.

The same for messages as they travel and for those of a file. No I/O in here.
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
"""Requests whose answers are recognised: seen last, whatever their subject."""


class TapDecoder:
    """Put arrivals in, get what is to be shown out.

    Args:
        patterns: as typed by a person, see `tap_pattern.complete`.
        filters: `field=value` expressions that must all be met, see `tap_filter.Filter`.
        replies: also the answers to requests on these subjects.
        sample: share of the messages that is shown, see `tap_sample.Sampler`.
        may: whether whoever looks may see a subject; an answer counts as its request.

    Raises:
        BadInput: a pattern that matches nothing of ours, a filter on a field that nothing has, a bad share.
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
        self._asked: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def subscriptions(self) -> tuple[str, ...]:
        """What to listen to, or to take from a file."""
        return tuple(dict.fromkeys((*self.patterns, *((INBOXES,) if self.replies else ()))))

    def covers(self, subject: str) -> bool:
        """Whether a concrete subject is among the subscriptions."""
        return any(tap_pattern.matches(pattern, subject) for pattern in self.subscriptions())

    def allows(self, subject: str) -> bool:
        """Whether this may be looked at. Of an inbox that shows only when its request is known."""
        return self._may is None or (self.replies and subject.startswith(INBOX)) or self._may(subject)

    def look(self, arrived: RawMessage) -> TappedMessage | None:
        """What it is; None where it is not to be shown."""
        tapped: TappedMessage | None = decode(
            arrived.subject, arrived.data, at=arrived.at, operation=arrived.operation
        )
        assert tapped is not None
        if arrived.subject.startswith(INBOX):
            tapped = self._as_reply(tapped)
            if tapped is None:
                return None
        elif self.replies and tapped.envelope is not None and tapped.row is not None and tapped.row.reply:
            self._asked.setdefault(tapped.envelope.id, (tapped.subject, tapped.at))  # repeats keep the first
            while len(self._asked) > REQUESTS_REMEMBERED:
                self._asked.popitem(last=False)
        sampled = self._sampler is None or self._sampler.keeps(tapped)
        if self._may is not None and not self._may(tapped.answers or tapped.subject):
            return None
        return tapped if sampled and self._wanted(tapped) else None

    def _as_reply(self, tapped: TappedMessage) -> TappedMessage | None:
        """An answer to a request that was seen; other inbox traffic only if that was asked for."""
        cause = tapped.envelope.causation if tapped.envelope is not None else None
        asked = self._asked.get(cause) if cause is not None else None
        if asked is None:
            return tapped if any(pattern.startswith("_INBOX") for pattern in self.patterns) else None
        subject, at = asked
        row, tokens = subjects.lookup(subject) or (None, {})
        return replace(tapped, row=row, tokens=tokens, answers=subject, latency_ms=1e3 * (tapped.at - at))

    def _wanted(self, tapped: TappedMessage) -> bool:
        if not self.filters:
            return True
        tree = tapped.tree()
        return all(condition.meets(tree) for condition in self.filters)


REMEMBERED = 100_000
"""Messages whose root is known, so that what follows from them is kept or left out with them."""


class Sampler:
    """Keeps about `share` of the messages, by a hash of the id at the root of each one's causes.

    A message that names no cause is its own root. Of one whose cause was not seen here, the cause is taken
    for the root: so a request and its answers always stay together, and longer trees do as far as this tap
    has seen their messages in order. No clock, no chance: two taps that see the same keep the same.
    """

    def __init__(self, share: float) -> None:
        """Raises `BadInput` unless 0 < share ≤ 1."""
        if not 0 < share <= 1:
            raise BadInput(f"a sample of {share:g}: give a share above 0 and up to 1, as in 0.1")
        self._limit = int(share * 2**64)
        self._roots: OrderedDict[str, str] = OrderedDict()

    def keeps(self, tapped: TappedMessage) -> bool:
        """Whether it belongs to the sample. To be asked of all messages: those left out have effects too."""
        envelope = tapped.envelope
        if envelope is None:
            return self._chosen(tapped.raw or tapped.subject.encode())
        cause = envelope.causation
        root = envelope.id if cause is None else self._roots.get(cause, cause)
        self._roots[envelope.id] = root
        while len(self._roots) > REMEMBERED:
            self._roots.popitem(last=False)
        return self._chosen(root.encode())

    def _chosen(self, key: bytes) -> bool:
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) < self._limit
