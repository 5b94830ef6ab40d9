"""The items that are kept: a row each, which the bus's server removes by itself at its end (ADR-0164)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import KeyValueEntry
from entities.gateway.backflow.consents import Consents
from entities.gateway.backflow.pseudonyms import Pseudonym
from schemas.errors import Conflict, NotFound
from schemas.services.keeping import Feedback, KeptItem

log = get_logger("backflow")

TOGETHER = 64
"""Deletions under way at once."""


class KeptItems:
    """The bucket of items, as one gateway reads and writes it. All raise what the bus raises."""

    def __init__(self, bus: Bus, consents: Consents) -> None:
        self._bucket = bus.bucket(subjects.KEPT_ITEM)
        self._consents = consents

    async def store(self, item: KeptItem, most: int) -> bool:
        """Stores an item, unless its user has `most` already, or has withdrawn; a repetition changes nothing.

        It looks for a withdrawal once the item is there: one that was written before is seen here, and one
        that is written later erases what it finds.
        """
        if len(await self._bucket.keys(service=item.service, user=item.user)) >= most:
            log.info("not kept: its user has the most items that one may have", service=item.service)
            return False
        left_s = item.until - time.time()
        if left_s <= 0:
            return False
        with suppress(Conflict):  # another gateway has stored it, or the user has said something of it
            await self._bucket.create(item, ttl_s=left_s, **_key(item))
        if item.at <= await self._consents.withdrawn_at(item.service, Pseudonym(item.user, item.subject)):
            await self._bucket.delete(**_key(item))
            return False
        return True

    async def find(self, user: str, item: str) -> KeyValueEntry:
        """A user's item that takes feedback. Raises `NotFound`."""
        found = await self._bucket.entries(user=user, item=item)
        if not found or not found[0].message.takes_feedback:
            raise NotFound("nothing of this request is kept that feedback could be added to")
        return found[0]

    async def add_feedback(self, entry: KeyValueEntry, feedback: Feedback) -> None:
        """Adds what a user says of an answer to its item. Raises `NotFound` if it has gone meanwhile."""
        while True:
            changed: KeptItem = entry.message.model_copy(update={"feedback": feedback})
            left_s = changed.until - time.time()
            try:
                await self._bucket.update(changed, revision=entry.revision, ttl_s=left_s, **_key(changed))
            except Conflict:
                again = await self._bucket.get(leader=True, **_key(changed))
                if again is None:
                    raise NotFound("this request is not kept any more") from None
                entry = again
            else:
                return

    async def of(self, service: str) -> list[KeptItem]:
        """The items of a service that have not ended, by the time they were asked."""
        kept = [item async for item in self.each(service)]
        return sorted(kept, key=lambda item: (item.at, item.item))

    async def each(self, service: str) -> AsyncIterator[KeptItem]:
        """The items of a service that have not ended; no more than one user's are in memory at a time.

        An item whose withdrawal did not erase it (its gateway died then) is left out, and erased now.
        """
        keys = await self._bucket.keys(service=service)
        for user in sorted({_tokens(key)["user"] for key in keys}):
            now = time.time()
            entries = await self._bucket.entries(service=service, user=user)
            items = [entry.message for entry in entries if entry.message.until > now]
            void = await self.withdrawn(service, items)
            await self._delete(_key(item) for item in items if item.item in void)
            for item in items:
                if item.item not in void:
                    yield item

    async def withdrawn(self, service: str, items: Iterable[KeptItem]) -> set[str]:
        """Those of these items whose subject, or its user, has withdrawn."""
        until: dict[Pseudonym, float] = {}
        void: set[str] = set()
        for item in items:
            who = Pseudonym(item.user, item.subject)
            if who not in until:
                until[who] = await self._consents.withdrawn_at(service, who)
            if item.at <= until[who]:
                void.add(item.item)
        return void

    async def count(self, service: str, who: Pseudonym) -> int:
        """How many there are of a user, or of one subject alone."""
        return len(await self._keys_of(service, who))

    async def erase(self, service: str, who: Pseudonym) -> int:
        """Deletes the items of a user, or of one subject alone; returns how many there were."""
        return await self._delete(map(_tokens, await self._keys_of(service, who)))

    async def _keys_of(self, service: str, who: Pseudonym) -> list[str]:
        names = {"user": who.user} if who.is_own else {"user": who.user, "subject": who.subject}
        return await self._bucket.keys(service=service, **names)

    async def _delete(self, keys: Iterable[dict[str, Any]]) -> int:
        listed = list(keys)
        for start in range(0, len(listed), TOGETHER):
            together = listed[start : start + TOGETHER]
            await asyncio.gather(*(self._bucket.delete(**key) for key in together))
        return len(listed)


def _key(item: KeptItem) -> dict[str, Any]:
    return {"service": item.service, "user": item.user, "subject": item.subject, "item": item.item}


def _tokens(key: str) -> dict[str, Any]:
    """What a key of the bucket is made of: none of its names has a dot."""
    return dict(zip(("service", "user", "subject", "item"), key.split("."), strict=True))
