"""What is tried: each probe is one thing that an attacker says, which must have no effect but the table's.

Which subjects are tried comes from the product's own table, so that a new row is tried, too; what may come of
it does not.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.access_matrix.contents import tokens_of
from benchmarks.access_matrix.effects import fits
from benchmarks.access_matrix.parties import Party
from benchmarks.access_matrix.wire import Said
from benchmarks.access_matrix.world import VICTIM
from bus.messaging import rendezvous
from bus.subjects import SUBJECTS
from bus.wire import codec
from schemas.envelope import EntityKind, Sender
from schemas.registry import Resolve

V = "dmsc.v1"
HEX = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True, slots=True)
class Probe:
    """`messages`; then, once what came back has come, `after`. `must`: it is heard where it was sent.

    `note` tells it better than its messages.
    """

    kind: str
    messages: tuple[Said, ...]
    after: tuple[Said, ...] = ()
    must: bool = False
    note: str = ""

    @property
    def title(self) -> str:
        parts = []
        for one in (*self.messages, *self.after):
            head = " ".join(f"[{key}: {value}]" for key, value in one.headers)
            body = one.payload.decode(errors="replace")[:160] if one.payload.startswith(b"{") else ""
            parts.append(
                " ".join(filter(None, (one.subject, head, one.reply and f"reply {one.reply}", body)))
            )
        return f"{self.kind}: {self.note or ', then '.join(parts)}"


TARGETS = (
    *("$KV.steps.k", "$KV.jobs.k", "$KV.users.root", "$KV.registry.k-s0-r0", "$KV.link_secrets.k"),
    *("$KV.revocations.user.x", "$KV.leadership.orchestrator", "$KV.routes.k.a.0"),
    *("$O.artifacts.C.x", "$O.artifacts.M.x"),
    *(f"{V}.audit.authorizer", f"{V}.job.event.k", f"{V}.fault.record.k.k-s0-r0"),
    *(pattern.replace("*", "a2V5") for pattern in rendezvous.subjects_of(rendezvous.links_of("k"))),
    *("$JS.API.STREAM.DELETE.AUDIT", "$JS.API.STREAM.PURGE.OBJ_artifacts"),
    *(f"$JS.API.CONSUMER.DELETE.LOGS.{VICTIM}", f"$JS.ACK.LOGS.{VICTIM}.1.1.1.1.0"),
    *("_INBOX.gateway-a.0.1", f"_INBOX.gateway.gateway-a.{HEX}.authorizer._.1"),
    *("_INBOX.orchestrator.0.1", f"_INBOX.orchestrator.orchestrator.{HEX}.service-registry._.1"),
    *(f"{V}.step.commit.k.k-s0-r0", f"{V}.step.commit.j.j-s1-r0", f"{V}.cluster.b-n.start"),
    *(f"{V}.job.command.cancel", f"{V}.signal.access.gateway-a", f"{V}.policy.order.another"),
    *(f"{V}.dead_letter.gateway-a", f"{V}.log.gateway-a", f"{V}.registry.heartbeat.orchestrator"),
    *("$SYS.REQ.SERVER.PING", "$SYS.REQ.USER.AUTH", "$SRV.PING", "dmsc.server.disconnect"),
)
"""What a message can be made to reach by naming it as the reply: stored things, the API, others' ears."""

HEADERS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("Nats-Rollup", "all"),),
    (("Nats-Rollup", "sub"),),
    (("Nats-Msg-Id", "m1"),),
    (("Nats-TTL", "1s"),),
    (("Nats-TTL", "never"),),
    (("Nats-Incr", "+1"),),
    (("Nats-Batch-Id", "b1"), ("Nats-Batch-Sequence", "1")),
    (("Nats-Batch-Id", "b2"), ("Nats-Batch-Sequence", "1"), ("Nats-Batch-Commit", "1")),
    (("Nats-Expected-Stream", "JOBS"),),
    (("Nats-Expected-Last-Sequence", "0"),),
    (("Nats-Expected-Last-Subject-Sequence", "0"),),
    (("Nats-Expected-Last-Msg-Id", "m0"),),
    (("Nats-Schedule", "@at 2020-01-01T00:00:00Z"), ("Nats-Schedule-Target", "$KV.jobs.k")),
    (("Nats-Stream-Source", "LOGS 1 > > x"),),
    (("Nats-Marker-Reason", "Purge"),),
    (("KV-Operation", "PURGE"),),
    (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),),
)
TRACED = (
    *("$KV.steps.k", f"{V}.audit.authorizer", "_INBOX.gateway-a.0.1", f"{V}.job.command.cancel"),
    *("$JS.API.STREAM.DELETE.AUDIT", "$O.artifacts.C.x"),
)
MISCELLANEOUS = (
    *("$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.PING.CONNZ", "$SYS.REQ.USER.INFO", "$SYS.REQ.USER.AUTH"),
    *("$SYS.REQ.ACCOUNT.DMSC.CONNZ", "$SYS.REQ.ACCOUNT.PING.JSZ", "$SYS.REQ.SERVER.X.KICK"),
    *("$SYS.ACCOUNT.DMSC.DISCONNECT", "$SYS.ACCOUNT.DMSC.CLAIMS", "$SYS.REQ.CLAIMS.UPDATE"),
    *("$SRV.PING", "$SRV.INFO", "$SRV.STATS", "$SRV.PING.x", "dmsc.server.disconnect"),
    *("$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$JS.API.ACCOUNT.PURGE.DMSC"),
    *("$JS.API.META.LEADER.STEPDOWN", "$JS.API.SERVER.REMOVE", "$JS.EVENT.ADVISORY.API", "$JSC.R.x"),
    *("$NRG.V.x", "$GNR.0.0.x", "$LDS.x", "$MQTT.msgs.x", "$KV.unknown.x", "$O.unknown.C.x"),
    *("_R_.x", "dmsc.v1.rendezvous.counter.x.y", "dmsc.v2.job.command.cancel", "elsewhere"),
)


def concrete(party: Party) -> list[str]:
    """Every row's subjects, with the attacker's names and others', its job and others'."""
    found: dict[str, None] = {}
    for row in SUBJECTS:
        own, other = tokens_of(row, True), tokens_of(row, False)
        parties = [token for token in row.tokens if token in ("sid", "agent", "gateway", "cluster", "module")]
        mine = own | {token: party.name for token in parties if token != "cluster"}
        neighbour = own | {token: "j-s1-r0" for token in parties if token == "sid"}
        entity = own | {token: "orchestrator" for token in parties if token == "sid"}
        agent = own | {token: "b-n" for token in parties if token == "sid"}
        owned = mine | {"owner": "researcher"}
        variants = (
            own,
            other,
            mine,
            neighbour,
            entity,
            agent,
            owned,
            mine | {"job": "k"},
            other | {"job": "j"},
        )
        for tokens in variants:
            found[row(**{token: tokens[token] for token in row.tokens})] = None
    return [*found, *party.asks_as]


def may_say(party: Party, subject: str) -> bool:
    return any(fits(pattern, subject) for pattern in party.says)


def sayable(party: Party) -> list[str]:
    """One subject for each thing that the table lets this party say: its own where there is one."""
    found: dict[str, str] = {}
    for subject in concrete(party):
        for pattern in party.says:
            if fits(pattern, subject):
                found.setdefault(pattern, subject)
    return list(found.values())


def unreachable(party: Party) -> list[str]:
    """What the table lets it say and no row has."""
    said = sayable(party)
    return [pattern for pattern in party.says if not any(fits(pattern, subject) for subject in said)]


def probes_of(
    party: Party, streams: Mapping[str, Mapping[str, Any]], places: Mapping[str, Sequence[str]]
) -> Iterator[Probe]:
    """All of a party's. `places`: some subjects of each stream."""
    number = itertools.count()

    def body() -> bytes:
        return f"{party.title} {next(number)}".encode()

    inbox = f"{party.inboxes[0]}.{HEX}.x._.1"
    for subject in concrete(party):
        allowed = may_say(party, subject)
        yield Probe("say", (Said(subject, body()),), must=allowed)
        yield Probe("ask", (Said(subject, body(), inbox),), must=allowed)
    for subject in MISCELLANEOUS:
        yield Probe("ask", (Said(subject, body(), inbox),))
    for subject in TARGETS:
        yield Probe("say", (Said(subject, body()),))
    for name, config in streams.items():
        yield from _stream_probes(name, config, places[name], inbox, body)
    yield from _by_reply(party, body)
    yield from _headers(party, body)


def _by_reply(party: Party, body: Any) -> Iterator[Probe]:
    own = [f"{prefix}.{HEX}.{party.kind}.{party.name}.1" for prefix in party.inboxes]
    own += [f"{prefix}.1" for prefix in party.inboxes]
    for subject, target in itertools.product(sayable(party), TARGETS):
        yield Probe("by reply", (Said(subject, body(), target),))
        if subject == f"{V}.registry.resolve":
            yield Probe("by reply", (Said(subject, _resolve(party), target),))
    for place, target in itertools.product(own, TARGETS):
        # who receives a request may answer it: so one asks oneself
        yield Probe("answer oneself", (Said(place, body(), target),), (Said(target, body()),))
    heard = [subject for subject in sayable(party) if any(fits(one, subject) for one in party.learns)]
    for place, target in itertools.product(heard, TARGETS):
        yield Probe("answer oneself", (Said(place, body(), target),), (Said(target, body()),))


def _headers(party: Party, body: Any) -> Iterator[Probe]:
    for subject in sayable(party):
        for headers in HEADERS:
            yield Probe("header", (Said(subject, body(), "", headers),))
        for target in TRACED:
            yield Probe("header", (Said(subject, body(), "", (("Nats-Trace-Dest", target),)),))
        only = (("Nats-Trace-Dest", "$KV.steps.k"), ("Nats-Trace-Only", "true"))
        yield Probe("header", (Said(subject, body(), "", only),))


def _resolve(party: Party) -> bytes:
    kind = EntityKind(party.kind) if party.kind in set(EntityKind) else EntityKind.CLIENT
    sender = Sender(name=party.name, kind=kind, incarnation="attack")
    return codec.encode(Resolve(), codec.sender_map(sender), "attack-1")


def _stream_probes(
    name: str, config: Mapping[str, Any], places: Sequence[str], inbox: str, body: Any
) -> Iterator[Probe]:
    def call(verb: str, content: dict[str, Any] | None = None, reply: str = inbox) -> Probe:
        data = json.dumps(content).encode() if content is not None else b""
        return Probe("jetstream", (Said(f"$JS.API.{verb}", data, reply),))

    theirs = places[-1]
    thief = _pulling(name, theirs)
    pushed = {
        "stream_name": name,
        "config": {"deliver_subject": "$KV.users.root", "ack_policy": "none", "deliver_policy": "all"},
    }
    to_me = {
        "stream_name": name,
        "config": {"deliver_subject": inbox, "ack_policy": "none", "deliver_policy": "all"},
    }
    yield call(f"STREAM.INFO.{name}")
    yield call(f"STREAM.CREATE.{name}", dict(config))
    yield call(f"STREAM.CREATE.EVIL-{name}", {"name": f"EVIL-{name}", "sources": [{"name": name}]})
    republishing = {"src": ">", "dest": "$KV.users.root"}
    yield call(f"STREAM.UPDATE.{name}", {**config, "republish": republishing})
    yield call(f"STREAM.DELETE.{name}")
    yield call(f"STREAM.PURGE.{name}")
    yield call(f"STREAM.PURGE.{name}", {"filter": theirs})
    yield call(f"STREAM.MSG.GET.{name}", {"seq": 1})
    yield call(f"STREAM.MSG.GET.{name}", {"last_by_subj": theirs})
    yield call(f"STREAM.MSG.GET.{name}", {"last_by_subj": theirs}, "$KV.users.root")
    yield call(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
    yield call(f"STREAM.SNAPSHOT.{name}", {"deliver_subject": inbox})
    yield call(f"STREAM.RESTORE.{name}", {"config": dict(config), "state": {}})
    yield call(f"STREAM.LEADER.STEPDOWN.{name}")
    yield call(f"STREAM.PEER.REMOVE.{name}", {"peer": "x"})
    yield call(f"CONSUMER.CREATE.{name}", pushed)
    yield call(f"CONSUMER.CREATE.{name}", to_me)
    yield call(f"CONSUMER.CREATE.{name}.thief", thief)
    yield call(f"CONSUMER.CREATE.{name}.thief.{theirs}", thief)
    for place in places:
        yield call(f"CONSUMER.CREATE.{name}.thief.{place}", _pulling(name, place))
    durable = {"stream_name": name, "config": {"durable_name": "thief", "ack_policy": "none"}}
    yield call(f"CONSUMER.DURABLE.CREATE.{name}.thief", durable)
    yield call(f"CONSUMER.NAMES.{name}")
    yield call(f"CONSUMER.LIST.{name}")
    for verb in ("INFO", "DELETE", "PAUSE", "UNPIN", "LEADER.STEPDOWN"):
        yield call(f"CONSUMER.{verb}.{name}.{VICTIM}")
    yield call(f"CONSUMER.MSG.NEXT.{name}.{VICTIM}", {"batch": 10, "no_wait": True})
    yield call(f"CONSUMER.MSG.NEXT.{name}.{VICTIM}", {"batch": 10, "no_wait": True}, "$KV.users.root")
    yield call(f"DIRECT.GET.{name}", {"last_by_subj": theirs})
    yield call(f"DIRECT.GET.{name}", {"multi_last": [">"], "batch": 100})
    yield call(f"DIRECT.GET.{name}", {"seq": 1}, "$KV.users.root")
    for place in places:
        yield call(f"DIRECT.GET.{name}.{place}")
        yield call(f"DIRECT.GET.{name}.{place}", None, "$KV.users.root")
        yield Probe("say", (Said(place, body()),))
        yield Probe("say", (Said(place, body(), inbox, (("Nats-Rollup", "all"),)),))
    for word in (b"+ACK", b"+TERM", b"-NAK", b"+WPI", b"+NXT"):
        yield Probe("jetstream", (Said(f"$JS.ACK.{name}.{VICTIM}.1.1.1.1.0", word, inbox),))
    yield Probe("jetstream", (Said(f"$JS.FC.{name}.{VICTIM}.x", body(), inbox),))


def _pulling(stream: str, place: str) -> dict[str, Any]:
    config = {"name": "thief", "ack_policy": "none", "filter_subject": place}
    return {"stream_name": stream, "config": config}
