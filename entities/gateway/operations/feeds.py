"""Operations on feeds: create, push, close, list, show, delete."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time

from bus.logs import get_logger
from entities.gateway.feeds.feed_log import FeedLog
from entities.gateway.feeds.feed_records import read_push
from entities.gateway.operations.operation import Operation
from entities.gateway.storage.usage import StoredUse
from schemas.errors import Ack, OverQuota, Refused, UnreadableRecord
from schemas.feeds import Feed, FeedRecord, FeedSpec, Pushed
from schemas.quota import QuotaUse
from schemas.signals import AccessDecision, Role

log = get_logger("door")

READ, WRITE, DELETE = "feed.read", "feed.write", "feed.delete"


class FeedOperations:
    """Operations on feeds.

    Args:
        feeds: Their rows.
        stored: What users have stored.
        use_s: For so long a user's use is taken as it was counted, with this gateway's pushes added: counting
            takes longer than a push. So gateways together may admit what they take within this time.
    """

    def __init__(self, feeds: FeedLog, stored: StoredUse, use_s: float = 10.0) -> None:
        self._feeds = feeds
        self._stored = stored
        self._use_s = use_s
        self._uses: dict[str, tuple[float, QuotaUse]] = {}

    def create(self, name: str, spec: FeedSpec) -> Operation[Feed]:
        async def act(access: AccessDecision) -> Feed:
            await self._admit(access, QuotaUse(datasets=1), name)
            record = await self._feeds.create(name, access.user, spec.fields)
            log.info("feed created", feed=name, user=access.user)
            return await self._feeds.view(record)

        return Operation(WRITE, name, act)

    def push(self, name: str, body: bytes, key: str | None) -> Operation[Pushed]:
        """Stores the records of a body, all or none. A repetition with the same key and body stores none."""

        async def act(access: AccessDecision) -> Pushed:
            record = await self._own(access, name, "pushes to it")
            pieces = await asyncio.to_thread(read_push, body, record.fields)
            size = sum(len(piece.data) for piece in pieces)
            await self._admit(access, QuotaUse(stored_bytes=size))
            stored = await self._feeds.append(record, pieces, _token(access.user, key, body))
            return Pushed(feed=name, push=stored.number, first=stored.first, records=stored.records)

        return Operation(WRITE, name, act)

    def close(self, name: str) -> Operation[Feed]:
        """Closes a feed: its jobs then know where it ends. Twice is fine."""

        async def act(access: AccessDecision) -> Feed:
            record = await self._own(access, name, "closes it")
            await self._feeds.end(record, "closed")
            log.info("feed closed", feed=name, user=access.user)
            return await self._feeds.view(record)

        return Operation(WRITE, name, act, frees=True)

    def each(self) -> Operation[list[Feed]]:
        async def act(_: AccessDecision) -> list[Feed]:
            feeds = await self._feeds.views(await self._feeds.all())
            return sorted(feeds, key=lambda feed: feed.name)

        return Operation(READ, "feeds", act)

    def show(self, name: str) -> Operation[Feed]:
        async def act(_: AccessDecision) -> Feed:
            return await self._feeds.view(await self._feeds.find(name))

        return Operation(READ, name, act)

    def delete(self, name: str) -> Operation[Ack]:
        """Deletes a feed with its records. A job that trains on it fails."""

        async def act(access: AccessDecision) -> Ack:
            try:
                record = await self._feeds.find(name)
            except UnreadableRecord:
                await self._feeds.forget(name)
            else:
                await self._feeds.remove(record)
                self._uses.pop(record.user, None)
            log.info("feed deleted", feed=name, user=access.user)
            return Ack(note=f"feed {name} deleted")

        return Operation(DELETE, name, act)

    # --- who, and how much ----------------------------------------------------------------------------------
    async def _own(self, access: AccessDecision, name: str, doing: str) -> FeedRecord:
        record = await self._feeds.find(name)
        if record.user != access.user and access.role not in (Role.OPERATOR, Role.ADMIN):
            text = f"feed {name} is {record.user}'s, who {doing}; create one of your own"
            raise Refused(text, user=access.user)
        return record

    async def _admit(self, access: AccessDecision, more: QuotaUse, name: str = "") -> None:
        """Checks that a quota has room; a feed that the user has already needs none.

        Raises:
            OverQuota: It has none.
        """
        quota, user = access.quota, access.user
        if quota is None:
            return
        until, use = self._uses.get(user, (0.0, QuotaUse()))
        if time.monotonic() > until or quota.excess(use, more):
            until, use = time.monotonic() + self._use_s, await self._stored.of(user)
        if excess := quota.excess(use, more):
            if name and any((feed.name, feed.user) == (name, user) for feed in await self._feeds.all()):
                return
            raise OverQuota(excess, user=user)
        self._uses[user] = (until, use.plus(more))


def _token(user: str, key: str | None, body: bytes) -> str:
    """What a push is recognised by: another body under a key that was used long ago is another push."""
    if key is None:
        return secrets.token_hex(24)
    return hashlib.sha256(f"{user}\0{key}\0".encode() + body).hexdigest()[:48]
