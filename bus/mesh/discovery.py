"""Queries to the registry (draft §1, discovery by content), page by page if the answer is large."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus import subjects
from schemas.registry import Resolve, Resolved

if TYPE_CHECKING:
    from bus.connection import Bus


async def resolve(bus: Bus, query: Resolve, *, timeout_s: float = 5.0) -> Resolved:
    """All matching records, ordered by route id, as of the revision of the first page.

    Later pages may contain newer changes already. A caller that follows the advertisements applies those
    after that revision, which gives the right result. `timeout_s` is for each page.

    Raises:
        DmscError: as for `Bus.request`.
    """
    answer: Resolved = await bus.request(subjects.RESOLVE, query, timeout_s=timeout_s)
    if not answer.next_after:
        return answer
    records = list(answer.records)
    page = answer
    while page.next_after:
        next_query = query.model_copy(update={"after": page.next_after})
        page = await bus.request(subjects.RESOLVE, next_query, timeout_s=timeout_s)
        records += page.records
    return Resolved.model_construct(revision=answer.revision, records=tuple(records), next_after=0)
