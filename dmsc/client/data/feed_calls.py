"""Requests about feeds: records that are pushed while, or before, jobs train on them (ADR-0064)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dmsc.client.calls.access_calls import segment
from dmsc.client.gateway_requests import Gateways
from schemas.feeds import Feed, FeedPage, Pushed


class FeedCalls:
    """A part of `AsyncClient`."""

    _gateways: Gateways

    async def create_feed(self, name: str, fields: Mapping[str, str]) -> Feed:
        """Create a feed; one of yours with the same fields stays as it is.

        Args:
            name: Letters, digits, _ and -.
            fields: Name → `text`, or a type with a shape: `int64`, `float32[3,32,32]`.
        """
        return await self._gateways.ask_for(Feed, "PUT", f"/v1/feeds/{segment(name)}", {"fields": {**fields}})

    async def feeds(self) -> list[Feed]:
        """All feeds, by name."""
        return [feed async for page in self._gateways.pages("/v1/feeds", FeedPage) for feed in page.feeds]

    async def feed(self, name: str) -> Feed:
        """A feed as it is now. Raises `NotFound`."""
        return await self._gateways.ask_for(Feed, "GET", f"/v1/feeds/{segment(name)}")

    async def push(
        self,
        feed: str,
        records: Iterable[Mapping[str, Any]] | bytes,
        *,
        idempotency_key: str | None = None,
    ) -> Pushed:
        """Push records: all are stored, in this order, or none.

        Args:
            feed: The feed's name.
            records: Mappings whose values JSON has; or bytes with a JSON object in each line.
            idempotency_key: A push that is repeated with its key is stored once; by default each call has its
                own, under which it is sent until a gateway answers.
        """
        if not isinstance(records, bytes):
            records = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records).encode()
        path = f"/v1/feeds/{segment(feed)}/records"
        return Pushed.model_validate(await self._gateways.post_bytes(path, records, idempotency_key))

    async def close_feed(self, name: str) -> Feed:
        """Close a feed: it takes no more records, and jobs that train on it know its end."""
        return await self._gateways.ask_for(Feed, "POST", f"/v1/feeds/{segment(name)}/close")

    async def delete_feed(self, name: str) -> None:
        """Delete a feed with its records, as an operator; a job on it fails. Raises `NotFound`."""
        await self._gateways.ask("DELETE", f"/v1/feeds/{segment(name)}")
