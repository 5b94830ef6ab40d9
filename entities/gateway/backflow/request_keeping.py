"""From a request to its item: its terms when it is asked, redaction and storing once it is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from bus.logs import get_logger
from bus.tasks import TaskSet
from entities.gateway.backflow.consent_rules import Said
from entities.gateway.backflow.consents import Consents
from entities.gateway.backflow.kept_items import KeptItems
from entities.gateway.backflow.pseudonyms import Pseudonym, Pseudonyms
from entities.gateway.backflow.redaction import redact
from schemas.errors import DmscError
from schemas.job import JobRecord
from schemas.serve_spec import KeepSpec
from schemas.services.generation import Generation, KeptMessage, KeptTerms
from schemas.services.keeping import MOST_ITEM_BYTES, KeptItem

log = get_logger("backflow")

DAY_SECONDS = 86_400
MOST_BESIDE = 4_096
"""Characters of a text that is not kept which are looked at beside one that is."""


@dataclass(frozen=True, kw_only=True)
class KeepingConfig:
    """`most_stores`: items that are being stored at a time; what comes beyond is not kept.

    `stop_s`: how long a gateway that stops waits for them.
    """

    most_stores: int = 256
    stop_s: float = 5.0


class RequestKeeping:
    """Keeps what both sides agree to. Nothing of it delays or fails an answer."""

    def __init__(
        self,
        job: Callable[[str], JobRecord | None],
        pseudonyms: Pseudonyms,
        consents: Consents,
        items: KeptItems,
        config: KeepingConfig = KeepingConfig(),
    ) -> None:
        self._job = job
        self._pseudonyms = pseudonyms
        self._consents = consents
        self._items = items
        self._config = config
        self._stores = TaskSet(on_failure=lambda _, error: log.error("an item was lost", error=repr(error)))
        self._store_of: dict[str, asyncio.Task[None]] = {}  # by generation
        # One thread of its own: redaction waits for nobody's tokenizing, and nobody's for it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redaction")

    def rules(self, job: str) -> KeepSpec | None:
        """What the version that this job runs says of keeping; None: nothing is kept."""
        record = self._job(job)
        return None if record is None or record.spec.serve is None else record.spec.serve.keep

    async def terms(self, generation: Generation, said: Said, subject: str | None) -> KeptTerms | None:
        """The terms on which a request is kept, still without its texts; None: it is not.

        `said`: what the request says; `subject`: whose it is, as it says.
        """
        rules = self.rules(generation.job)
        if rules is None or said == "none":
            return None
        try:
            who = await self._pseudonyms.of(generation.user, subject)
            allowed = await self._consents.allow(generation.service, who, rules, said, generation.began)
        except DmscError as error:  # who can't be asked has not agreed
            log.warning("a request is not kept: consents can't be read", code=error.code)
            return None
        if not allowed:
            return None
        return KeptTerms(
            user=who.user,
            subject=who.subject,
            standing=allowed == "standing",
            days=rules.days,
        )

    def take(self, generation: Generation, answer: Callable[[], str]) -> None:
        """An answer is whole. `answer` makes its text; it may be called on a thread, later."""
        if generation.keep is None:
            return
        if len(self._stores) >= self._config.most_stores:
            log.warning("a request is not kept: too many are being stored", service=generation.service)
            return
        id, work = generation.id, self._store(generation, generation.keep, answer)
        self._store_of[id] = self._stores.create(work, name=f"keep {id}")
        self._store_of[id].add_done_callback(lambda _: self._store_of.pop(id, None))

    async def _store(self, generation: Generation, terms: KeptTerms, answer: Callable[[], str]) -> None:
        rules = self.rules(generation.job)
        if rules is None:
            return
        loop = asyncio.get_running_loop()
        item = await loop.run_in_executor(self._thread, item_of, generation, terms, rules, answer)
        if item is None:
            return
        try:
            said: Said = "" if terms.standing else "train"
            who = Pseudonym(terms.user, terms.subject)
            # Asked again: between question and answer a minute may lie, and a withdrawal.
            if await self._consents.allow(generation.service, who, rules, said, generation.began):
                await self._items.store(item, rules.most)
        except DmscError as error:
            log.warning("a request is not kept: it can't be stored", code=error.code, error=error.text)

    async def redacted(self, text: str, hide: Sequence[str], before: str = "") -> str:
        """The text without what redaction takes out, off the event loop. `before`: what it goes on from."""
        loop = asyncio.get_running_loop()
        work = partial(redact, (text,), hide, before=before[-MOST_BESIDE:])
        return (await loop.run_in_executor(self._thread, work)).texts[0]

    async def stored(self, generation: str) -> None:
        """Waits until this answer is stored, if it is about to be, for as long as a gateway that stops."""
        task = self._store_of.get(generation)
        if task is not None:
            await asyncio.wait((task,), timeout=self._config.stop_s)

    async def settle(self) -> None:
        """Waits until all that was answered is stored."""
        await self._stores.wait()

    async def close(self) -> None:
        """Settles, for as long as a gateway that stops may; what is not stored then is not kept."""
        try:
            async with asyncio.timeout(self._config.stop_s):
                await self.settle()
        except TimeoutError:
            await self._stores.close()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)


def with_messages(terms: KeptTerms, messages: Sequence[tuple[str, str]]) -> KeptTerms | None:
    """The terms with what was asked, as (role, text); None: it is too long to be kept. Pure."""
    if _bytes_of(messages) > MOST_ITEM_BYTES:
        return None
    asked = tuple(KeptMessage(role=role, text=text) for role, text in messages)
    return terms.model_copy(update={"messages": asked})


def _bytes_of(messages: Iterable[tuple[str, str]]) -> int:
    return sum(len(text.encode("utf-8", "replace")) for _, text in messages)


def item_of(
    generation: Generation, terms: KeptTerms, rules: KeepSpec, answer: Callable[[], str]
) -> KeptItem | None:
    """The item, redacted; None: its texts are too long, or the service keeps none of them.

    A text that is not kept is looked at beside one that is: a number may begin in one and end in the other.
    """
    asked, messages = [(each.role, each.text) for each in terms.messages], []
    before = behind = ""
    if "prompt" in rules.parts:
        messages += asked
    elif asked:
        before = asked[-1][1][-MOST_BESIDE:]
    if "answer" in rules.parts:
        messages.append(("assistant", answer()))
    elif messages:
        behind = answer()[:MOST_BESIDE]
    if not messages or _bytes_of(messages) > MOST_ITEM_BYTES:
        return None
    redacted = redact([text for _, text in messages], rules.hide, before=before, behind=behind)
    kept = [
        KeptMessage(role=role, text=text) for (role, _), text in zip(messages, redacted.texts, strict=True)
    ]
    return KeptItem(
        service=generation.service,
        version=generation.version,
        item=generation.id,
        user=terms.user,
        subject=terms.subject,
        tenant=generation.tenant,
        standing=terms.standing,
        shape=generation.shape,
        messages=tuple(kept),
        takes_feedback="feedback" in rules.parts,
        redacted=redacted.counts,
        at=generation.began,
        until=min(generation.began, time.time()) + terms.days * DAY_SECONDS,
    )
