"""Requests about what services keep of requests: consents, feedback, files to train on, erasure."""

from __future__ import annotations

from typing import Any

from dmsc.client.calls.access_calls import segment
from dmsc.client.gateway_requests import Gateways
from schemas.pages import ConsentPage
from schemas.services.keeping import (
    ConsentGiven,
    Feedback,
    KeptCollection,
    KeptErased,
    KeptSummary,
)


class BackflowCalls:
    """A part of `AsyncClient`."""

    _gateways: Gateways

    async def consents(self, *, subject: str | None = None) -> list[ConsentGiven]:
        """What you have said of keeping your requests, or those of a subject that you serve, by service."""
        params = {} if subject is None else {"subject": subject}
        pages = self._gateways.pages("/v1/consents", ConsentPage, params)
        return [consent async for page in pages for consent in page.consents]

    async def give_consent(self, service: str, *, subject: str | None = None) -> ConsentGiven:
        """Have your later requests to a service kept, as long as it says now, and trained on.

        `subject`: for one whom you serve and name as `user` in requests.

        Raises:
            BadInput: the service keeps nothing.
        """
        return await self._consent(service, "give", subject)

    async def withdraw_consent(self, service: str, *, subject: str | None = None) -> ConsentGiven:
        """Have nothing kept any more, and erase what is. Your own counts for all whom you serve."""
        return await self._consent(service, "withdraw", subject)

    async def _consent(self, service: str, how: str, subject: str | None) -> ConsentGiven:
        path = f"/v1/consents/{segment(service)}/{how}"
        return await self._gateways.ask_for(ConsentGiven, "POST", path, {"subject": subject})

    async def send_feedback(self, generation: str, rating: float, *, correction: str = "") -> Feedback:
        """Say how good an answer was, from -1 to 1, and what a better one is, if the request was kept.

        `generation`: `dmsc.generation` of the answer.

        Raises:
            NotFound: nothing of that request is kept.
        """
        body = {"generation": generation, "rating": rating, "correction": correction}
        return await self._gateways.ask_for(Feedback, "POST", "/v1/feedback", body)

    async def kept(self, service: str) -> KeptSummary:
        """How much a service of yours has kept, and the files that were made of it."""
        return await self._gateways.ask_for(KeptSummary, "GET", f"/v1/services/{segment(service)}/kept")

    async def collect_kept(
        self,
        service: str,
        *,
        min_rating: float | None = None,
        lasts_days: float = 1.0,
        share: float | None = None,
    ) -> KeptCollection:
        """Make a file of what is kept, which a job names as `data.source`.

        Args:
            service: A service of yours.
            min_rating: Only requests that were rated, and at least so.
            lasts_days: Leave out what ends sooner; the file is removed when its first item ends.
            share: The largest part that comes of one user; by default the service's.

        Raises:
            BadInput: nothing is left, or too few users have something in it.
        """
        body: dict[str, Any] = {"min_rating": min_rating, "lasts_days": lasts_days, "share": share}
        path = f"/v1/services/{segment(service)}/kept/collections"
        return await self._gateways.ask_for(KeptCollection, "POST", path, body)

    async def erase_kept(self, service: str, user: str, *, subject: str | None = None) -> KeptErased:
        """Erase what a service has kept of a user, or of one subject; says what was trained on it."""
        path = f"/v1/services/{segment(service)}/kept/erase"
        return await self._gateways.ask_for(KeptErased, "POST", path, {"user": user, "subject": subject})
