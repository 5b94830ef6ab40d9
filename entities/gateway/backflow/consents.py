"""What users have said about keeping: given, withdrawn. A withdrawal is written before anything is erased."""

from __future__ import annotations

import time
from typing import Any

from bus import subjects
from bus.connection import Bus
from entities.gateway.backflow.consent_rules import Said, Word, may_keep, withdrawn_at
from entities.gateway.backflow.pseudonyms import Pseudonym
from schemas.errors import Conflict
from schemas.serve_spec import KeepSpec
from schemas.services.keeping import Consent


class Consents:
    """The bucket of consents, as one gateway reads and writes it. All raise what the bus raises.

    `skew_s`: clocks of gateways may differ so much. A withdrawal counts for requests up to so long after it.
    """

    def __init__(self, bus: Bus, skew_s: float = 5.0) -> None:
        self._bucket = bus.bucket(subjects.CONSENT)
        self._skew_s = skew_s

    async def give(self, service: str, subject: str, rules: KeepSpec) -> Consent:
        """What is asked from now on may be kept by these rules; a withdrawal of a moment ago passes first."""
        more = {"days": rules.days, "parts": rules.parts}
        return await self._change(service, subject, withdraw=False, own=True, **more)

    async def withdraw(self, service: str, subject: str, *, own: bool) -> Consent:
        """Nothing that was asked up to now is kept any more; what is, the caller erases afterwards."""
        return await self._change(service, subject, withdraw=True, own=own)

    async def _change(self, service: str, subject: str, *, withdraw: bool, own: bool, **more: Any) -> Consent:
        while True:
            entry = await self._bucket.get(leader=True, service=service, subject=subject)
            former = Consent(service=service, subject=subject) if entry is None else entry.message
            now = time.time()
            times = (
                {"withdrawn_at": max(now + self._skew_s, former.withdrawn_at)}
                if withdraw
                else {"given_at": max(now, former.withdrawn_at + 0.001)}
            )
            consent: Consent = former.model_copy(update={**times, "own": own, **more})
            revision = 0 if entry is None else entry.revision
            try:
                await self._bucket.update(consent, revision=revision, service=service, subject=subject)
            except Conflict:  # another gateway writes it at the same time
                continue
            return consent

    async def of(self, service: str, subject: str) -> Consent | None:
        """What the subject has said, through the leader."""
        entry = await self._bucket.get(leader=True, service=service, subject=subject)
        return None if entry is None else entry.message

    async def each(self, subject: str) -> list[Consent]:
        """What a subject has said, by service."""
        found: list[Consent] = [entry.message for entry in await self._bucket.entries(subject=subject)]
        return sorted(found, key=lambda consent: consent.service)

    async def both(self, service: str, who: Pseudonym) -> tuple[Consent | None, Consent | None]:
        """What the subject has said, and what the token's user has."""
        own = await self.of(service, who.subject)
        return own, own if who.is_own else await self.of(service, who.user)

    async def allow(self, service: str, who: Pseudonym, rules: KeepSpec, said: Said, asked_at: float) -> Word:
        """By whose word a request may be kept; empty: it may not (see `may_keep`)."""
        if said == "none":
            return ""
        return may_keep(rules, said, asked_at, *await self.both(service, who))

    async def withdrawn_at(self, service: str, who: Pseudonym) -> float:
        """Up to when nothing of this subject is kept; below 0: nobody has withdrawn."""
        return withdrawn_at(await self.both(service, who))
