"""Questions to instances' local stores, by who may ask them directly and by who has a broker ask."""

from __future__ import annotations

from bus.connection import Bus
from bus.subjects import STORE_QUERY
from bus.wire import codec
from schemas.store import StoreQuery, StoreRows


async def query_store(bus: Bus, query: StoreQuery, *, sid: str, owner: str, timeout_s: float) -> StoreRows:
    """What an instance of the query's job answers.

    Args:
        owner: the user for whom a broker is to ask, about a job of theirs; empty: we ask ourselves. Without a
            guard nobody needs a broker.

    Raises:
        Refused: it is another's job.
        NoResponders, DeadlineExceeded, Unavailable, BadInput: the instance is not there, or can't answer.
    """
    if not owner or bus.link.broker is None:
        rows: StoreRows = await bus.request(STORE_QUERY, query, timeout_s=timeout_s, job=query.job, sid=sid)
        return rows
    body = codec.encode(query, bus.sender_map, bus.next_id())
    call = STORE_QUERY(job=query.job, sid=sid)
    reply = await bus.link.broker.ask(call, body, timeout_s=timeout_s, owner=owner)
    return await bus.answer_of(STORE_QUERY, call, reply.data)
