"""Queries to instances' local stores, directly or through a broker."""

from __future__ import annotations

from bus.connection import Bus
from bus.subjects import STORE_QUERY
from bus.wire import codec
from schemas.store import StoreQuery, StoreRows


async def query_store(bus: Bus, query: StoreQuery, *, sid: str, owner: str, timeout_s: float) -> StoreRows:
    """The answer of an instance of the query's job.

    Args:
        bus: The connection.
        query: The query; it names the job.
        sid: The instance.
        owner: The user, an owner of the job, for whom a broker queries; empty to query directly. On an
            unguarded bus nobody needs a broker.
        timeout_s: How long to wait for the answer.

    Raises:
        Refused: the job belongs to somebody else.
        NoResponders, DeadlineExceeded, Unavailable, BadInput: the instance is not there, or can't answer.
    """
    if not owner or bus.connection.broker is None:
        rows: StoreRows = await bus.request(STORE_QUERY, query, timeout_s=timeout_s, job=query.job, sid=sid)
        return rows
    body = codec.encode(query, bus.sender_map, bus.next_id())
    call = STORE_QUERY(job=query.job, sid=sid)
    reply = await bus.connection.broker.ask(call, body, timeout_s=timeout_s, owner=owner)
    return await bus.answer_of(STORE_QUERY, call, reply.data)
