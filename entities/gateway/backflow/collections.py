"""Files of kept items that jobs train on: made, and removed at their end or with one of their subjects.

A file is never changed, so that a job has the same data from its first to its last step. Whoever has to go is
gone with the whole file; the next one is made without them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.gateway.backflow.collection_rules import choose, lines_of
from entities.gateway.backflow.kept_items import KeptItems
from entities.gateway.backflow.pseudonyms import Pseudonym
from schemas.errors import Conflict, DmscError, NotFound
from schemas.services.keeping import (
    MARK_DIGITS,
    MOST_MARKS,
    CollectBody,
    KeptCollection,
    KeptItem,
)
from schemas.urls import BUS, KEPT_FOLDER

log = get_logger("backflow")

DAY_SECONDS = 86_400.0


class KeptCollections:
    """The files of all services, as one gateway makes and removes them. All raise what the bus raises."""

    def __init__(self, bus: Bus, items: KeptItems) -> None:
        self._bucket = bus.bucket(subjects.KEPT_COLLECTION)
        self._objects = bus.objects
        self._items = items

    async def make(self, service: str, body: CollectBody, share: float) -> KeptCollection:
        """Makes the service's next file.

        Raises:
            BadInput: Nothing is kept that fits, or too few users have something in it.
        """
        now = time.time()
        items = await self._items.of(service)
        lasts_until = now + body.lasts_days * DAY_SECONDS
        chosen = choose(items, share=share, min_rating=body.min_rating, lasts_until=lasts_until)
        data = lines_of(chosen.items)
        counted = {
            "items": len(chosen.items),
            "users": len({item.user for item in chosen.items}),
            "subjects": len({item.subject for item in chosen.items}),
            "marks": marks_of(chosen.items),
        }
        while True:
            numbers = [each.number for each in await self.of(service, removed=True)]
            number = max(numbers, default=0) + 1
            collection = KeptCollection(
                service=service,
                number=number,
                source=f"{BUS}{_object(service, number)}",
                sha256=hashlib.sha256(data).hexdigest(),
                bytes=len(data),
                dropped=chosen.dropped,
                share=share,
                made_at=now,
                until=min(item.until for item in chosen.items),
                **counted,
            )
            try:  # the row comes first: a file without one would stay for ever
                await self._bucket.update(collection, revision=0, service=service, number=number)
            except Conflict:
                continue
            break
        # Whoever is erased from here on finds the row. Who was erased before it was there has withdrawn.
        if await self._items.withdrawn(service, chosen.items):
            await self.remove(collection, "a subject was erased while it was made")
            return await self.make(service, body, share)
        try:
            await self._objects.put(_object(service, number), data)
        except DmscError:
            await self.remove(collection, "it could not be stored")
            raise
        entry = await self._bucket.get(leader=True, service=service, number=number)
        if entry is None or entry.message.removed_at is not None:  # perhaps before the file was there
            await self._objects.delete(_object(service, number))
            return await self.make(service, body, share)
        return collection

    async def of(self, service: str, *, removed: bool = False) -> list[KeptCollection]:
        """A service's files by number; with `removed`, also those that are gone."""
        entries = await self._bucket.entries(service=service)
        found: list[KeptCollection] = [entry.message for entry in entries]
        return sorted(
            (each for each in found if removed or each.removed_at is None), key=lambda each: each.number
        )

    async def find(self, service: str, number: int) -> KeptCollection:
        """Raises `NotFound`; the text says when and why it was removed."""
        entry = await self._bucket.get(leader=True, service=service, number=number)
        if entry is None:
            raise NotFound(f"service {service} has no collection {number}")
        found: KeptCollection = entry.message
        if found.removed_at is not None:
            raise NotFound(f"collection {number} of {service} was removed: {found.why}; make a new one")
        if found.until <= time.time():  # the sweep comes within minutes
            raise NotFound(f"collection {number} of {service} has come to its end date; make a new one")
        return found

    async def remove(self, collection: KeptCollection, why: str) -> None:
        """Removes a file; that somebody else has done so is no error.

        First the row says so: a gateway that is just storing the file looks at it afterwards.
        """
        names: dict[str, Any] = {"service": collection.service, "number": collection.number}
        gone = collection.model_copy(update={"removed_at": time.time(), "why": why})
        await self._bucket.put(gone, **names)
        await self._objects.delete(_object(collection.service, collection.number))
        log.info("collection removed", **names, why=why)

    async def remove_ended(self) -> int:
        """Removes the files with an item that has ended; returns how many.

        Of those that were removed within a day it looks again: their gateway may have died meanwhile.
        """
        now, count = time.time(), 0
        for entry in await self._bucket.entries():
            collection: KeptCollection = entry.message
            if collection.removed_at is None and collection.until <= now:
                await self.remove(collection, "an item of it has come to its end date")
                count += 1
            elif collection.removed_at is not None and collection.removed_at > now - DAY_SECONDS:
                await self._objects.delete(_object(collection.service, collection.number))
        return count


def marks_of(items: Iterable[KeptItem]) -> str:
    """The marks of all whose items these are; empty if there are too many to list. Pure."""
    found = {name[:MARK_DIGITS] for item in items for name in (item.user, item.subject)}
    return " ".join(sorted(found)) if len(found) <= MOST_MARKS else ""


def may_hold(collection: KeptCollection, who: Pseudonym) -> bool:
    """Whether something of this subject is in the file; in 100,000 files it is wrong about one. Pure."""
    return not collection.marks or who.subject[:MARK_DIGITS] in collection.marks.split(" ")


def _object(service: str, number: int) -> str:
    return f"{KEPT_FOLDER}/{service}/{number}.jsonl"
