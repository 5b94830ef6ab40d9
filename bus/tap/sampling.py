"""A sample of the messages: the same ones each time, and what one message caused together with it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from bus.tap.message import Tapped
from schemas.errors import BadInput

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

    def keeps(self, tapped: Tapped) -> bool:
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
