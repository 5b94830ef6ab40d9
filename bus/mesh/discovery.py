"""Asking the registry (draft §1, discovery by content), page by page where the answer is large."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus import subjects
from schemas.registry import Resolve, Resolved

if TYPE_CHECKING:
    from bus.connection import Bus


async def resolve(bus: Bus, query: Resolve, *, timeout_s: float = 5.0) -> Resolved:
    """All records that match, in order of route id, as of the revision of the first page.

    What changed while further pages came may be in them already: whoever follows the advertisements
    applies those behind that revision, and ends up right. `timeout_s` is for each page.

    Raises:
        DmscError: as `Bus.request`.
    """
    answer: Resolved = await bus.request(subjects.RESOLVE, query, timeout_s=timeout_s)
    if not answer.next_after:
        return answer
    records = list(answer.records)
    page = answer
    while page.next_after:
        wanted = query.model_copy(update={"after": page.next_after})
        page = await bus.request(subjects.RESOLVE, wanted, timeout_s=timeout_s)
        records += page.records
    return Resolved.model_construct(revision=answer.revision, records=tuple(records), next_after=0)
