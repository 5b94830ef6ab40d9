"""Whether nothing is kept that one side did not agree to, and what the redaction leaves of planted data.

    python -m benchmarks.backflow [--requests 10000] [--seed N] [--json]

*Consent*: requests of a hundred users to three services (one keeps all, one only prompts for a week, one
nothing) are answered and stored on a real server, 64 at a time. Requests say train, none or nothing;
meanwhile users give standing consents, withdraw them, and are erased. What is stored is compared with what
was said, by the times that the records have. Something is planted in a tenth of the prompts and answers;
`left in what is stored` counts what of it can be read there. *Redaction*: texts by `planted_texts`, each put
together from a stream of tokens of one byte; `recall` counts what was planted of which no six letters or
digits in a row can be read any more, `precision` how many of what was taken out were planted, `harmless
changed` the texts without anything planted of which something was taken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from benchmarks.harness.command import bench, command
from benchmarks.harness.meshes import new_folder
from benchmarks.planted_texts import FRAMES, PlantedText, Planter, is_left
from bus import subjects
from bus.connection import Bus
from bus.logs import configure_logging
from bus.server.embedded import EmbeddedServer
from entities.gateway.backflow.consent_rules import Said
from entities.gateway.backflow.consents import Consents
from entities.gateway.backflow.kept_items import KeptItems
from entities.gateway.backflow.pseudonyms import Pseudonyms
from entities.gateway.backflow.redaction import redact
from entities.gateway.backflow.request_keeping import RequestKeeping, with_messages
from entities.gateway.generation.answer_text import text_of
from entities.tokens.byte_tokens import Utf8Tokenizer
from schemas.envelope import EntityKind
from schemas.job import JobRecord, JobSpec, JobState
from schemas.services.generation import GeneratedToken, Generation
from schemas.services.keeping import KeptItem

KEEPS: dict[str, dict[str, Any] | None] = {
    "all": {"days": 30, "most": 100_000},
    "prompts": {"days": 7, "parts": ["prompt"], "most": 100_000},
    "nothing": None,
}
USERS, TOGETHER = 100, 64
TOKENIZER = Utf8Tokenizer()


def streamed(text: str) -> list[GeneratedToken]:
    """The tokens of a text, in which its characters are split."""
    numbered = enumerate(TOKENIZER.encode(text))
    return [GeneratedToken(session=1, fence=1, position=place, token=token) for place, token in numbered]


def record_of(service: str) -> JobRecord:
    """The job of a version that keeps what `KEEPS` says."""
    spec = JobSpec.model_validate(
        {
            "name": service,
            "model": {"factory": "workers.models.gpt:byte_gpt"},
            "serve": {"service": service, "keep": KEEPS[service]},
        }
    )
    return JobRecord(job=service, spec=spec, state=JobState.RUNNING, submitted_at=1.0, changed_at=1.0)


class Traffic:
    """Requests, and what users say meanwhile. `asked`: id → user, service, said, when."""

    def __init__(self, bus: Bus, planter: Planter, chance: random.Random) -> None:
        jobs = {service: record_of(service) for service in KEEPS}
        self.names = Pseudonyms(bus)
        self.consents = Consents(bus, skew_s=0.0)  # one clock
        self.items = KeptItems(bus, self.consents)
        self.keeping = RequestKeeping(jobs.get, self.names, self.consents, self.items)
        self.asked: dict[str, tuple[str, str, Said, float]] = {}
        self.planted: dict[str, list[str]] = {}
        self.given: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self.withdrawn: dict[tuple[str, str], float] = {}
        self._jobs = jobs
        self._planter = planter
        self._chance = chance
        self._gate = asyncio.Semaphore(TOGETHER)

    async def request(self) -> None:
        async with self._gate:
            service, user = self._chance.choice(list(KEEPS)), f"user{self._chance.randrange(USERS)}"
            said: Said = self._chance.choice(("train", "none", "", "", ""))
            if self._chance.random() < 0.05:
                await self._say(service, user)
            prompt, answer = self._text(), self._text()
            generation = Generation(
                id=secrets.token_hex(16),
                service=service,
                version="v1",
                job=service,
                user=user,
                writer="gateway-a",
                session=1,
                most_tokens=8,
                began=time.time(),
            )
            self.asked[generation.id] = user, service, said, generation.began
            terms = await self.keeping.terms(generation, said, None)
            if terms is None:
                return
            stored = prompt.planted if service == "prompts" else (*prompt.planted, *answer.planted)
            self.planted[generation.id] = [value for _, value in stored]
            kept = with_messages(terms, [("user", prompt.text)])
            assert kept is not None
            taken = partial(text_of, streamed(answer.text), TOKENIZER, ())
            self.keeping.take(generation.model_copy(update={"keep": kept}), taken)
            await asyncio.sleep(self._chance.random() / 100)

    def _text(self) -> PlantedText:
        return self._planter.planted() if self._chance.random() < 0.1 else self._planter.harmless()

    async def _say(self, service: str, user: str) -> None:
        who = await self.names.of(user, None)
        rules = self._jobs[service].spec.serve
        if rules is None or rules.keep is None:
            return
        if self._chance.random() < 0.7:
            given = await self.consents.give(service, who.subject, rules.keep)
            self.given.setdefault((service, user), []).append((given.given_at, time.time()))
        else:
            withdrawn = await self.consents.withdraw(service, who.subject, own=True)
            self.withdrawn[service, user] = withdrawn.withdrawn_at
            await self.items.erase(service, who)

    def wrongly_kept(self, item: KeptItem) -> bool:
        """Whether one of the two did not agree, by what they said and when."""
        user, service, said, at = self.asked[item.item]
        withdrawn = self.withdrawn.get((service, user), -1.0)
        standing = any(withdrawn < given <= at for given, _ in self.given.get((service, user), ()))
        return (
            KEEPS[service] is None or said == "none" or at <= withdrawn or not (said == "train" or standing)
        )

    def left(self, item: KeptItem) -> int:
        """How many of the things that were planted in a request can still be read in its item."""
        texts = [message.text for message in item.messages]
        return sum(any(is_left(value, text) for text in texts) for value in self.planted[item.item])

    def due(self) -> set[str]:
        """What has to be kept: the request said so, and nobody has withdrawn since."""
        return {
            item
            for item, (user, service, said, at) in self.asked.items()
            if KEEPS[service] is not None
            and said == "train"
            and at > self.withdrawn.get((service, user), -1.0)
        }


async def consent(requests: int, planter: Planter, chance: random.Random) -> dict[str, Any]:
    """Requests, and what is stored of them."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer(stack.enter_context(new_folder())))
        connecting = Bus.connect(server.url, name="gateway-a", kind=EntityKind.GATEWAY)
        bus = await stack.enter_async_context(connecting)
        await bus.provision()
        traffic = Traffic(bus, planter, chance)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(requests):
                tasks.create_task(traffic.request())
        await traffic.keeping.settle()
        stack.push_async_callback(traffic.keeping.close)
        took_s = time.perf_counter() - began
        entries = await bus.bucket(subjects.KEPT_ITEM).entries()
        items: list[KeptItem] = [entry.message for entry in entries]
        stored = {item.item for item in items}
        return {
            "requests": requests,
            "kept": len(items),
            "withdrawals": len(traffic.withdrawn),
            "kept without consent": sum(map(traffic.wrongly_kept, items)),
            "agreed and not kept": len(traffic.due() - stored),
            "planted in what is stored": sum(len(traffic.planted[item.item]) for item in items),
            "left in what is stored": sum(map(traffic.left, items)),
            "requests per s": round(requests / took_s),
        }


def redaction(texts: int, planter: Planter) -> dict[str, Any]:
    """Recall by kind, precision, and what it costs."""
    planted: Counter[str] = Counter()
    left: Counter[str] = Counter()
    examples: list[str] = []
    marks = wanted = changed = peer_left = 0
    seconds, characters = 0.0, 0
    for number in range(texts):
        made = planter.planted() if number % 2 else planter.harmless()
        answer = text_of(streamed(made.text), TOKENIZER, ())
        began = time.perf_counter()
        found = redact([answer])
        seconds += time.perf_counter() - began
        characters += len(made.text)
        changed += not made.planted and bool(found.counts)
        marks += sum(found.counts.values())
        wanted += min(len(made.planted), sum(found.counts.values()))
        for kind, value in made.planted:
            planted[kind] += 1
            peer_left += kind == "phone" and is_left(value, by_phonenumbers(made.text))
            if is_left(value, found.texts[0]):
                left[kind] += 1
                examples.append(f"{kind} {value}: {found.texts[0]}")
    recalled = {kind: round(1 - left[kind] / planted[kind], 4) for kind in FRAMES if planted[kind]}
    return {
        "planted": planted.total(),
        "recall": round(1 - left.total() / planted.total(), 4),
        **{f"recall, {kind}": value for kind, value in recalled.items()},
        "recall, phone, by phonenumbers": round(1 - peer_left / planted["phone"], 4),
        "precision": round(wanted / marks, 4),
        "harmless changed": round(2 * changed / texts, 4),
        "us per 1,000 characters": round(1e9 * seconds / characters),
        "left": examples[:20],
    }


def by_phonenumbers(text: str) -> str:
    """The text without what phonenumbers finds, at its most lenient, read as American, British or German."""
    import phonenumbers

    for region in ("US", "GB", "DE"):
        found = phonenumbers.PhoneNumberMatcher(text, region, leniency=phonenumbers.Leniency.POSSIBLE)
        for match in sorted(found, key=lambda each: -each.start):
            text = f"{text[: match.start]}[PHONE]{text[match.end :]}"
    return text


async def measure(requests: int, seed: int) -> dict[str, Any]:
    """All figures."""
    configure_logging(level="error")
    planter, chance = Planter(seed), random.Random(seed)
    found = await consent(requests, planter, chance)
    return found | redaction(requests, planter) | {"seed": seed}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """For people."""
    for name, value in found.items():
        if name == "left":
            yield from (f"  left: {each!r}" for each in value)
        else:
            yield f"{name:32} {value:>12,}"


def found_of(options: argparse.Namespace) -> Coroutine[Any, Any, dict[str, Any]]:
    """The measurement that the command line asks for."""
    seed = options.seed or random.SystemRandom().randrange(1, 1 << 31)
    return measure(options.requests, seed)


if __name__ == "__main__":
    bench(command(__doc__, requests=10_000, seed=(0, "0: any")), found_of, lines)
