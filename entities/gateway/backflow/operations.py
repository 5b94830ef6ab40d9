"""Operations on what is kept: consents, feedback, counts, files for training, erasure."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.resealing import Resealing
from entities.gateway.backflow.collections import KeptCollections, may_hold
from entities.gateway.backflow.consents import Consents
from entities.gateway.backflow.kept_items import KeptItems
from entities.gateway.backflow.learnt_from import learnt_from
from entities.gateway.backflow.pseudonyms import Pseudonym, Pseudonyms
from entities.gateway.backflow.request_keeping import KeepingConfig, RequestKeeping
from entities.gateway.operations.operation import Operation
from entities.model_records.model_index import ModelIndex
from schemas.envelope import EntityKind
from schemas.errors import BadInput, DmscError, NotFound
from schemas.job import JobRecord
from schemas.serve_spec import KeepSpec
from schemas.services.keeping import (
    CollectBody,
    Consent,
    ConsentGiven,
    EraseBody,
    Feedback,
    FeedbackBody,
    KeptCollection,
    KeptErased,
    KeptSummary,
)
from schemas.services.model_service import ModelService
from schemas.signals import AccessDecision

log = get_logger("backflow")

USE, OWN = "service.use", "self.read"
READ, COLLECT, ERASE = "kept.read", "kept.collect", "kept.erase"
NO_SERVICE = "there is no service {}; `dmsc service list` shows which there are"
MOST_CORRECTION = 65_536
"""Most characters of a correction: what is put in the place of something may be longer."""


@dataclass(frozen=True, kw_only=True)
class MeshKnowledge:
    """What this gateway knows of services, jobs and models, and this package asks."""

    services: Callable[[], Mapping[str, ModelService]]
    job: Callable[[str], JobRecord | None]
    jobs: Callable[[], Iterable[JobRecord]]
    models: Callable[[], ModelIndex]


@dataclass(frozen=True, kw_only=True)
class BackflowConfig:
    """`sweep_s`: between two looks for files whose end has come; `skew_s`: clocks may differ so much."""

    sweep_s: float = 600.0
    skew_s: float = 5.0
    keeping: KeepingConfig = field(default_factory=KeepingConfig)


class BackflowOperations:
    """What the HTTP routes call. `keeping` is what takes in requests."""

    def __init__(self, bus: Bus, known: MeshKnowledge, config: BackflowConfig = BackflowConfig()) -> None:
        self._bus = bus
        self._known = known
        self._config = config
        self._pseudonyms = Pseudonyms(bus)
        self._consents = Consents(bus, config.skew_s)
        self._items = KeptItems(bus, self._consents)
        self._collections = KeptCollections(bus, self._items)
        self.keeping = RequestKeeping(
            known.job, self._pseudonyms, self._consents, self._items, config.keeping
        )

    async def run(self) -> None:
        """Removes files whose end has come, until cancelled; then what was answered is stored."""
        resealing = Resealing(self._bus, EntityKind.GATEWAY, self._pseudonyms.seal_anew)
        try:
            while True:
                try:
                    await resealing.start()
                    await self.sweep()
                except DmscError as error:
                    log.info("ended collections can't be removed now", code=error.code)
                await asyncio.sleep(self._config.sweep_s)
        finally:
            resealing.stop()
            await self.keeping.close()

    async def sweep(self) -> int:
        """Removes the files whose end has come; returns how many. Raises what the bus raises."""
        return await self._collections.remove_ended()

    # --- what users say -------------------------------------------------------------------------------------
    def consents(self, subject: str | None) -> Operation[list[ConsentGiven]]:
        """What the bearer has said, or said for a subject that they serve."""

        async def act(access: AccessDecision) -> list[ConsentGiven]:
            who = await self._pseudonyms.of(access.user, subject)
            return [_said(each) for each in await self._consents.each(who.subject)]

        return Operation(OWN, "self", act)

    def consent(self, service: str, subject: str | None) -> Operation[ConsentGiven]:
        """Has later requests of the bearer, or of a subject that they serve, kept.

        Raises:
            NotFound: There is no such service.
            BadInput: The service keeps nothing.
        """

        async def act(access: AccessDecision) -> ConsentGiven:
            rules = self._rules(service)
            who = await self._pseudonyms.of(access.user, subject)
            return _said(await self._consents.give(service, who.subject, rules))

        return Operation(USE, service, act)

    def withdraw(self, service: str, subject: str | None) -> Operation[ConsentGiven]:
        """Takes a consent back, and erases what was kept. For oneself it counts for all that one serves.

        Raises:
            NotFound: There is no such service, and nothing is known of this subject.
        """

        async def act(access: AccessDecision) -> ConsentGiven:
            who = await self._pseudonyms.of(access.user, subject)
            erased = await self._erase(service, who, own=True)
            at = await self._consents.withdrawn_at(service, who)
            return ConsentGiven(
                service=service, state="withdrawn", at=at, erased=erased.items, jobs=erased.jobs
            )

        return Operation(OWN, "self", act, frees=True)

    def feedback(self, body: FeedbackBody) -> Operation[Feedback]:
        """Adds what the bearer says of an answer to what is kept of their request. Raises `NotFound`."""

        async def act(access: AccessDecision) -> Feedback:
            await self.keeping.stored(body.generation)  # the answer may be as old as a moment
            who = await self._pseudonyms.of(access.user, None)
            entry = await self._items.find(who.user, body.generation)
            asked = [each.text for each in entry.message.messages if each.role != "assistant"]
            hide, before = self._hide(entry.message.service), asked[-1] if asked else ""
            correction = await self.keeping.redacted(body.correction, hide, before)
            said = Feedback(rating=body.rating, correction=correction[:MOST_CORRECTION], at=time.time())
            await self._items.add_feedback(entry, said)
            return said

        return Operation(OWN, "self", act)

    # --- what services have ---------------------------------------------------------------------------------
    def summary(self, service: str) -> Operation[KeptSummary]:
        async def act(_: AccessDecision) -> KeptSummary:
            redacted: Counter[str] = Counter()
            users: set[str] = set()
            subjects: set[str] = set()
            ends: list[float] = []
            with_feedback = 0
            async for item in self._items.each(service):
                redacted.update(item.redacted)
                users.add(item.user)
                subjects.add(item.subject)
                ends.append(item.until)
                with_feedback += item.feedback is not None
            return KeptSummary(
                service=service,
                items=len(ends),
                users=len(users),
                subjects=len(subjects),
                with_feedback=with_feedback,
                redacted=dict(sorted(redacted.items())),
                first_ends=min(ends, default=None),
                collections=tuple(map(_told, await self._collections.of(service))),
            )

        return Operation(READ, service, act)

    def collect(self, service: str, body: CollectBody) -> Operation[KeptCollection]:
        """Makes a file of a service's items for jobs to train on. Raises `BadInput`."""

        async def act(_: AccessDecision) -> KeptCollection:
            rules = self._rules(service)
            made = await self._collections.make(service, body, body.share or rules.share)
            log.info("collection made", service=service, number=made.number, items=made.items)
            return _told(made)

        return Operation(COLLECT, service, act)

    def collection(self, service: str, number: int) -> Operation[KeptCollection]:
        """One of the files. Raises `NotFound`."""

        async def act(_: AccessDecision) -> KeptCollection:
            return _told(await self._collections.find(service, number))

        return Operation(READ, service, act)

    def erase(self, service: str, body: EraseBody) -> Operation[KeptErased]:
        """Erases what is kept of a user or of one subject; nothing that they have asked is kept again.

        Raises:
            NotFound: There is no such service, and nothing is known of this subject.
        """

        async def act(access: AccessDecision) -> KeptErased:
            who = await self._pseudonyms.of(body.user, body.subject)
            return await self._erase(service, who, own=access.user == body.user)

        return Operation(ERASE, service, act, frees=True)

    # --- parts ----------------------------------------------------------------------------------------------
    def _rules(self, service: str) -> KeepSpec:
        """What the service's newest version that keeps something says of it."""
        if service not in self._known.services():
            raise NotFound(NO_SERVICE.format(service))
        rules = self._all_rules(service)
        if not rules:
            raise BadInput(f"service {service} keeps nothing: its versions have no `serve.keep`")
        return rules[-1]

    def _all_rules(self, service: str) -> list[KeepSpec]:
        """What each version of a service that keeps something says of it, the oldest first."""
        found = self._known.services().get(service)
        rules = (self.keeping.rules(version.job) for version in (found.versions if found else ()))
        return [each for each in rules if each is not None]

    def _hide(self, service: str) -> tuple[str, ...]:
        """The texts that any version of a service has taken out."""
        return tuple(dict.fromkeys(text for rules in self._all_rules(service) for text in rules.hide))

    async def _erase(self, service: str, who: Pseudonym, *, own: bool) -> KeptErased:
        """First the word, then files, then items: whoever dies in between leaves what a repetition finds."""
        # Else anybody could fill the bucket with names of services.
        if service not in self._known.services() and not (
            await self._consents.of(service, who.subject) or await self._items.count(service, who)
        ):
            raise NotFound(NO_SERVICE.format(service))
        await self._consents.withdraw(service, who.subject, own=own)
        holding = [each for each in await self._collections.of(service, removed=True) if may_hold(each, who)]
        gone = [each for each in holding if each.removed_at is None]
        for collection in gone:
            await self._collections.remove(collection, "a subject was erased")
        count = await self._items.erase(service, who)
        sources = {collection.source for collection in holding}
        known = self._known
        # All jobs and models are looked at, again and again: beside the loop, of which answers are waiting.
        learnt = await asyncio.to_thread(
            learnt_from,
            sources,
            tuple(known.jobs()),
            tuple(known.models().each()),
            tuple(known.services().values()),
        )
        jobs = len(learnt.jobs)
        log.info("erased", service=service, items=count, collections=len(gone), jobs=jobs, own=own)
        return KeptErased(
            service=service,
            items=count,
            collections=tuple(collection.number for collection in gone),
            jobs=learnt.jobs,
            models=learnt.models,
            versions=learnt.versions,
        )


def _said(consent: Consent) -> ConsentGiven:
    if not consent.is_given:
        return ConsentGiven(service=consent.service, state="withdrawn", at=consent.withdrawn_at)
    return ConsentGiven(
        service=consent.service, state="given", at=consent.given_at, days=consent.days, parts=consent.parts
    )


def _told(collection: KeptCollection) -> KeptCollection:
    """As clients see it: without the marks of its subjects."""
    return collection.model_copy(update={"marks": ""})
