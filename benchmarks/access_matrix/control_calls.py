"""What is tried with the credentials of gateways and routers, which are handed out to other machines.

They make streams, and read them, so JetStream does as they ask: what follows from that is trusted, and is not
tried. Tried is how far their rights reach: each call of JetStream's API on each stream, with a body that
nobody can carry out, and each subject, in their own names and others'. Readings of one message are real, and
what they tell is looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.access_matrix.parties import Party
from benchmarks.access_matrix.probes import HEX, MISCELLANEOUS, TARGETS, Probe, concrete, may_say
from benchmarks.access_matrix.wire import Said
from benchmarks.access_matrix.world import VICTIM

UNDOABLE = b"{"
"""No call can be carried out with this body."""
OF_STREAMS = (
    *("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.GET", "MSG.DELETE", "SNAPSHOT", "RESTORE"),
    *("LEADER.STEPDOWN", "PEER.REMOVE", "INFO"),
)
OF_CONSUMERS = ("INFO", "DELETE", "PAUSE", "UNPIN", "LEADER.STEPDOWN", "MSG.NEXT")
NOBODY = "nobody"
"""No consumer is called so."""


def control_probes(
    party: Party, streams: Mapping[str, Mapping[str, Any]], places: Mapping[str, Sequence[str]]
) -> Iterator[Probe]:
    """All of a gateway's or router's. `places`: some subjects of each stream."""
    numbers = itertools.count()
    inbox = f"{party.inboxes[0]}.{HEX}.x._.1"

    def body() -> bytes:
        return f"{party.title} {next(numbers)}".encode()

    def call(name: str, content: bytes = UNDOABLE) -> Probe:
        return Probe("jetstream", (Said(f"$JS.API.{name}", content, inbox),))

    for subject in concrete(party):
        allowed = may_say(party, subject)
        yield Probe("say", (Said(subject, body()),), must=allowed)
        yield Probe("ask", (Said(subject, body(), inbox),), must=allowed)
    for subject in MISCELLANEOUS:
        yield Probe("ask", (Said(subject, body(), inbox),))
    for subject in TARGETS:
        yield Probe("say", (Said(subject, body()),))
    for name in streams:
        for verb in OF_STREAMS:
            yield call(f"STREAM.{verb}.{name}")
        yield call(f"STREAM.CREATE.EVIL-{name}")
        for where in (name, f"{name}.thief", *(f"{name}.thief.{place}" for place in (*places[name], ">"))):
            yield call(f"CONSUMER.CREATE.{where}")
        yield call(f"CONSUMER.DURABLE.CREATE.{name}.thief")
        for verb in ("NAMES", "LIST"):
            yield call(f"CONSUMER.{verb}.{name}")
        for verb in OF_CONSUMERS:
            yield call(f"CONSUMER.{verb}.{name}.{NOBODY}")
        yield call(f"DIRECT.GET.{name}")
        for place in places[name]:
            yield call(f"DIRECT.GET.{name}.{place}", b"")
            yield Probe("say", (Said(place, body()),))
        for word in (b"+ACK", b"+TERM", b"+NXT"):
            yield Probe("jetstream", (Said(f"$JS.ACK.{name}.{VICTIM}.1.1.1.1.0", word, inbox),))
    own = [f"{prefix}.{HEX}.{party.kind}.{party.name}.1" for prefix in party.inboxes]
    for place, target in itertools.product(own, TARGETS):
        yield Probe("answer oneself", (Said(place, body(), target),), (Said(target, body()),))
