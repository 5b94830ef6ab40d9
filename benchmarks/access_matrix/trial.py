"""Each probe is carried out, and what came of it is compared with the table of effects.

Probes go in batches: where anything is not as it should be, the world is mended and that batch's are tried
again one by one, so that each wrong one is named.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.access_matrix.broker_calls import broker_probes
from benchmarks.access_matrix.contents import MARK, mark
from benchmarks.access_matrix.control_calls import control_probes
from benchmarks.access_matrix.effects import fits
from benchmarks.access_matrix.parties import Party
from benchmarks.access_matrix.probes import Probe, concrete, probes_of, unreachable
from benchmarks.access_matrix.wire import Heard, Said, Shut, Wire, wire
from benchmarks.access_matrix.world import INBOX, SERVICES, Print, StreamPrint, World
from bus import subjects
from bus.guard.permissions import covers
from bus.wire import codec
from schemas.errors import BadMessage

BATCH = 96
MANY = 200
"""Questions to brokers, of which some must have been answered."""
MARKED = re.compile(re.escape(MARK) + r"([^>]*)>")
FROM_JETSTREAM = (b'"type":"io.nats.jetstream.api', b'"type": "io.nats.jetstream.api')
ADVISORY = b'"type":"io.nats.jetstream.'
TRACE = b'{"server":{'
BROADEST = (
    ">",
    "*.>",
    "dmsc.>",
    "dmsc.v1.>",
    "dmsc.*.>",
    "$KV.>",
    "$O.>",
    "$JS.>",
    "$SYS.>",
    "$SRV.>",
    "_INBOX.>",
)
HEX = "fedcba9876543210fedcba9876543210"
OTHERS_INBOXES = (
    *("_INBOX.gateway-a.0.1", "_INBOX.orchestrator.0.1", "_INBOX.j-s1-r0.0.1", "_INBOX.guard.1"),
    f"_INBOX.gateway.gateway-a.{HEX}.authorizer._.1",
    f"_INBOX.orchestrator.orchestrator.{HEX}.instance.k-s0-r0.1",
    f"_INBOX.instance.j-s1-r0.{HEX}.service-registry._.1",
    f"_INBOX.user.ffffffffffffffffffff.{HEX}.gateway._.1",
)
UNSAID = (
    "$SYS.ACCOUNT.DMSC.DISCONNECT",
    "$SYS.REQ.USER.AUTH",
    "$SRV.PING",
    "dmsc.server.disconnect",
    "$O.artifacts.C.z",
)


def all_probes(
    party: Party, streams: Mapping[str, Mapping[str, Any]], places: Mapping[str, Sequence[str]]
) -> list[Probe]:
    """On the server, and on brokers."""
    if party.beyond:
        return list(control_probes(party, streams, places))
    return [*probes_of(party, streams, places), *broker_probes(party, streams, places)]


def _batches(probes: Sequence[Probe]) -> Iterator[list[Probe]]:
    """What brokers are asked, and all else, apart: what comes back is looked at otherwise."""
    for _, some in itertools.groupby(probes, lambda probe: probe.kind == "broker"):
        together = list(some)
        for start in range(0, len(together), BATCH):
            yield together[start : start + BATCH]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A probe that had an effect which the table does not know, or lacked one that it promises."""

    party: str
    probe: str
    effect: str

    @property
    def text(self) -> str:
        return f"{self.party}: {self.probe}\n      → {self.effect}"


@dataclass
class Findings:
    probes: Counter[str] = field(default_factory=Counter)
    """By party."""
    wrong: list[Wrong] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        self.probes.update(other.probes)
        self.wrong += other.wrong


class Trial:
    """One party against the world."""

    def __init__(
        self, world: World, party: Party, *, known: frozenset[tuple[str, str]] = frozenset()
    ) -> None:
        """`known`: (party, probe) that are not told."""
        self._world = world
        self._party = party
        self._known = known
        self._before: Print = {}
        self.read: set[str] = set()
        self.findings = Findings()

    @asynccontextmanager
    async def _attacker(self) -> AsyncIterator[Wire]:
        party = self._party
        async with wire(self._world.url, party.token(self._world.root), party.name) as attacker:
            for prefix in party.inboxes:
                attacker.listen(f"{prefix}.>")
            await attacker.flush()
            yield attacker

    async def run(self, probes: Sequence[Probe] | None = None, *, first_only: bool = False) -> Findings:
        """All of it. `first_only`: only until something is wrong."""
        world = self._world
        if probes is None:
            places = {name: [one.subject for one in said] for name, said in world.planted.items()}
            probes = all_probes(self._party, world.configs, places)
        for pattern in unreachable(self._party):
            self._wrong("the table", f"no row has {pattern}, which it is said to say")
        await world.mend()
        async with self._attacker() as attacker:
            await self._listen(attacker)
        self._before = await world.look()
        async with self._attacker() as attacker:
            for batch in _batches(probes):
                if first_only and self.findings.wrong:
                    break
                await self._try(attacker, batch)
        asked = sum(probe.kind == "broker" for probe in probes)
        if asked > MANY and not self.read and not first_only:
            self._wrong("all together", "brokers told it nothing, though it may know something")
        for place in await world.lost():
            if not self._may_write(place):
                self._wrong("all together", f"what was kept on {place} is gone or changed")
        return self.findings

    def _wrong(self, probe: str, effect: str) -> None:
        if (self._party.title, probe) not in self._known:
            self.findings.wrong.append(Wrong(self._party.title, probe, effect))

    # --- saying --------------------------------------------------------------------------------------------

    async def _try(self, attacker: Wire, batch: Sequence[Probe]) -> None:
        self.findings.probes[self._party.title] += len(batch)
        found = await self._carried_out(attacker, batch)
        if found and not await self._named(attacker, batch, found):
            self._wrong("several together", "; ".join(found))

    async def _named(self, attacker: Wire, batch: Sequence[Probe], found: Sequence[str]) -> bool:
        """Which of them it was, by halves; False: none of them by itself."""
        if len(batch) == 1:
            self._wrong(batch[0].title, "; ".join(found))
            return True
        named = False
        half = len(batch) // 2
        for part in (batch[:half], batch[half:]):
            again = await self._carried_out(attacker, part)
            named = bool(again and await self._named(attacker, part, again)) or named
        return named

    async def _carried_out(self, attacker: Wire, batch: Sequence[Probe]) -> list[str]:
        world = self._world
        world.overheard()
        attacker.heard.clear()
        attacker.denied.clear()
        for probe in batch:
            attacker.say(*probe.messages)
        try:
            if any(probe.after for probe in batch):
                await attacker.flush()
                for probe in batch:
                    attacker.say(*probe.after)
            await world.settle(attacker)
        except Shut as error:
            return [f"the server ended the connection: {error}"]
        after = await world.look()
        heard = world.overheard()
        said = [one for probe in batch for one in (*probe.messages, *probe.after)]
        brokered = batch[0].kind == "broker"
        effects = [*self._heard(said, heard, brokered), *self._learnt(attacker.heard, brokered)]
        effects += self._changed(self._before, after, heard)
        effects += _unheard(batch, heard)
        if after != self._before and effects:
            changed = {
                name.partition("/")[0]
                for name in after.keys() | self._before.keys()
                if after.get(name) != self._before.get(name)
            }
            await world.mend(changed)
            after = await world.look()
        self._before = after
        return effects

    def _heard(self, said: Iterable[Said], heard: Iterable[Heard], brokered: bool) -> list[str]:
        """What reached anybody's ears."""
        own = {(one.subject, one.payload) for one in said}
        effects = []
        for one in heard:
            if (one.subject, one.payload) in own:
                if not self._may_reach(one.subject):
                    effects.append(f"it reached {one.subject}")
            elif not self._may_follow(one) and not (brokered and self._may_be_brokered(one)):
                what = one.payload[:80].decode(errors="replace")
                effects.append(f"something was said on {one.subject}: {what!r}")
        return list(dict.fromkeys(effects))

    def _may_reach(self, subject: str) -> bool:
        party = self._party
        answers = (f"_INBOX.*.*.*.{party.kind}.{party.name}.*", f"_INBOX.*.*.*.{party.kind}._.*")
        allowed = (*party.says, *party.beyond, *(f"{prefix}.>" for prefix in party.inboxes), *answers)
        return any(fits(pattern, subject) for pattern in allowed)

    def _may_follow(self, one: Heard) -> bool:
        """What others say because of it: answers to itself, a service's word of what it could not read."""
        if any(fits(f"{prefix}.>", one.subject) for prefix in self._party.inboxes):
            return True
        if one.subject.startswith("$JS.EVENT.") and ADVISORY in one.payload:
            return True
        if one.payload.startswith(TRACE):  # the server's word of how a message of its went
            return self._may_reach(one.subject)
        for row in (subjects.DEAD_LETTER, subjects.LOG):
            if one.subject in {row(sid=who.name) for who in SERVICES}:
                try:
                    codec.decode(one.payload, row.schema)
                except BadMessage:
                    return False
                return True
        return False

    def _may_be_brokered(self, one: Heard) -> bool:
        """What a broker says in its name: calls whose answers go to one of the two, and what it writes.

        What comes to the attacker by that is looked at when it has come; what changes, by itself.
        """
        if one.reply.startswith("$JS.ACK."):
            return True
        ours = [*(f"{prefix}.>" for prefix in self._party.inboxes), "_INBOX.broker.>"]
        if one.subject.startswith("$JS.API."):
            return any(fits(pattern, one.reply) for pattern in ours)
        return any(fits(pattern, one.subject) for pattern in ours) or self._may_write(one.subject)

    def _may_write(self, subject: str) -> bool:
        return any(fits(pattern, subject) for pattern in self._party.writes)

    def _learnt(self, heard: Iterable[Heard], brokered: bool) -> list[str]:
        """What came to the attacker itself; JetStream's own words by a broker, or to whom may ask."""
        effects = []
        for one in heard:
            directly = any(kind in one.payload for kind in FROM_JETSTREAM) or b"Nats-Sequence" in one.head
            if (directly or one.reply.startswith("$JS.ACK.")) and not brokered and not self._party.beyond:
                effects.append("JetStream answered it")
            self.read |= marks(one)
            for place in marks(one):
                if not any(fits(pattern, place) for pattern in self._party.learns):
                    effects.append(f"it learnt what is on {place}")
        return list(dict.fromkeys(effects))

    def _changed(self, before: Print, after: Print, heard: Sequence[Heard]) -> list[str]:
        """What is stored otherwise than before; records of what was rightly said aside."""
        effects, rewritten = [], set[str]()
        for name in sorted(before.keys() | after.keys()):
            old, new = before.get(name), after.get(name)
            if old is not None and new is not None:
                lost = [place for place in old.lost(new) if not self._may_write(place)]
                effects += [f"{name}: what was kept on {place} is gone or changed" for place in lost]
            if old == new:
                continue
            if old is None or new is None:
                effects.append(f"{name} was {'made' if old is None else 'removed'}")
            elif "/" in name:
                if name.partition("/")[0] not in rewritten:
                    effects.append(f"the consumer {name} was moved")
            elif self._rewritten(old, new, heard):
                rewritten.add(name)
            elif not _recorded(old, new, heard):
                effects.append(f"{name}: {old.differences(new)}")
        return effects

    def _rewritten(self, old: StreamPrint, new: StreamPrint, heard: Sequence[Heard]) -> bool:
        """Whether all that came to a stream is what a broker may write; that nothing else went by it, is
        looked at in the end."""
        subjects_of = json.loads(old.config)["subjects"]
        came = [one.subject for one in heard if any(covers(pattern, one.subject) for pattern in subjects_of)]
        same = (old.config, old.consumers) == (new.config, new.consumers)
        purged = any(one.subject.startswith("$JS.API.STREAM.PURGE.") for one in heard)
        return same and (bool(came) or purged) and all(self._may_write(subject) for subject in came)

    # --- listening -----------------------------------------------------------------------------------------

    async def _listen(self, attacker: Wire) -> None:
        """It listens to everything it can; then something is said everywhere."""
        world, party = self._world, self._party
        own = f"{party.inboxes[0]}.{HEX}.x._.9", f"{party.inboxes[1]}.9"
        places = [*concrete(party), *OTHERS_INBOXES, *UNSAID, *own]
        for pattern in (*BROADEST, *dict.fromkeys(self._deeper(places)), *places):
            attacker.listen(pattern)
        await attacker.flush()
        attacker.heard.clear()
        world.auditor.say(*(Said(place, mark(place)) for place in places))
        await world.auditor.flush()
        await world.settle(attacker)
        learnt = {place for one in attacker.heard for place in marks(one)}
        for place in places:
            self.findings.probes[party.title] += 1
            mine = any(fits(f"{prefix}.>", place) for prefix in party.inboxes)
            allowed = mine or any(fits(pattern, place) for pattern in party.learns)
            if place in learnt and not allowed:
                self._wrong(f"listen: {place}", "it heard it")
        if not any(place in learnt for place in own):
            self._wrong("listen: its own inbox", "it heard nothing")
        await world.mend()
        world.overheard()

    @staticmethod
    def _deeper(places: Iterable[str]) -> Iterable[str]:
        for place in places:
            tokens = place.split(".")
            for count in range(1, len(tokens)):
                yield ".".join([*tokens[:count], ">"])
                yield ".".join([*tokens[:count], *["*"] * (len(tokens) - count)])


def marks(one: Heard) -> set[str]:
    """The places whose mark is in a message, also where it is in the base64 of JSON.

    Who may read dead letters reads the heads of what could not be read, whatever it was.
    """
    if fits(subjects.DEAD_LETTER.wildcard(), one.subject):
        return {one.subject}
    found = set(MARKED.findall(one.payload.decode(errors="replace")))
    if one.payload.startswith(b"{"):
        try:
            body = json.loads(one.payload)
        except ValueError:
            return found
        message = body.get("message") if isinstance(body, dict) else None
        if isinstance(message, dict):
            try:
                data = base64.b64decode(str(message.get("data", "")))
            except (binascii.Error, ValueError):
                return found
            found |= set(MARKED.findall(data.decode(errors="replace")))
    return found


def _recorded(old: StreamPrint, new: StreamPrint, heard: Sequence[Heard]) -> bool:
    """Whether nothing happened to a stream but that messages, which were heard, came to it."""
    patterns = json.loads(old.config)["subjects"]
    came = sum(any(covers(pattern, one.subject) for pattern in patterns) for one in heard)
    grown = new.last - old.last
    same = (old.config, old.first, old.deleted, old.consumers) == (
        new.config,
        new.first,
        new.deleted,
        new.consumers,
    )
    return same and 0 <= grown <= came and new.messages - old.messages == grown


def _unheard(batch: Sequence[Probe], heard: Iterable[Heard]) -> list[str]:
    there = {(one.subject, one.payload) for one in heard}
    return [
        f"it did not reach {one.subject}, as the table promises"
        for probe in batch
        if probe.must
        for one in probe.messages
        if (one.subject, one.payload) not in there
    ]


__all__ = ["INBOX", "Findings", "Trial", "Wrong"]
