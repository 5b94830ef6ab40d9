"""What is tried on brokers: everything in one's own name, and all that they might make in others' names."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.access_matrix.parties import PARTIES, Party
from benchmarks.access_matrix.probes import TARGETS, Probe
from benchmarks.access_matrix.wire import Said
from benchmarks.access_matrix.world import VICTIM
from bus.wire import codec
from schemas.broker import BrokerRequest
from schemas.envelope import EntityKind, Sender
from schemas.store import StoreQuery

STORES = (("j", "j-s0-r0"), ("j", "j-s1-r0"), ("k", "k-s0-r0"), ("ended", "ended-s0-r0"), ("*", "k-s0-r0"))
"""Jobs, none of which is of a user who attacks, and instances whose local stores are asked."""
CONNECTION = "0123456789abcdef"
BEYOND = (
    *("$JS.API.STREAM.DELETE.AUDIT", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$JS.API.INFO"),
    *("$JS.API.ACCOUNT.PURGE.DMSC", "$SYS.REQ.SERVER.PING", "$SRV.PING", "dmsc.server.disconnect"),
    *("dmsc.v1.step.commit.j.j-s1-r0", "dmsc.v1.job.command.cancel", "dmsc.v1.job.event.k"),
    *("dmsc.v1.audit.authorizer", "_INBOX.gateway.gateway-a.0123456789abcdef.authorizer._.1"),
    *("$KV.users.root", "$KV.jobs.k", "$KV.*.k", "$O.artifacts.M.*", "$KV.rendezvous.>", "", "*", ">", " x"),
)


def inbox(party: Party, subject: str, payload: bytes) -> str:
    """An inbox for a broker's answer to this question, as ours look."""
    digest = hashlib.blake2b(subject.encode() + b"\n" + payload, digest_size=12).hexdigest()
    return f"{party.inboxes[0]}.{CONNECTION}.broker._.{CONNECTION}{digest}"


def broker_probes(
    party: Party, streams: Mapping[str, Mapping[str, Any]], places: Mapping[str, Sequence[str]]
) -> Iterator[Probe]:
    """All of a party's."""
    numbers = itertools.count()

    def said(subject: str, call: str, body: bytes, headers: Mapping[str, str], reply: str) -> Said:
        payload = _request(party, f"attack-{next(numbers)}", call, body, headers)
        return Said(subject, payload, reply or inbox(party, subject, payload))

    def calls(subject: str, stream: str) -> Iterator[Probe]:
        mine = f"b{hashlib.sha256(subject.encode()).hexdigest()[:20]}x{next(numbers):016x}"
        for call, body, headers in _calls(stream, streams[stream], places[stream], mine):
            asking = said(subject, call, body, headers, "")
            yield Probe("broker", (asking,), note=_note(subject, call, body, headers))
        for place in (*_guessable(places[stream]), ">"):
            reader = f"{mine}{len(place):x}"
            making = said(
                subject, f"$JS.API.CONSUMER.CREATE.{stream}.{reader}.{place}", _first(stream), {}, ""
            )
            pulling = said(subject, f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{reader}", _pull(), {}, "")
            yield Probe("broker", (making,), (pulling,), note=f"{subject}: a consumer of {stream} {place}")

    def stores(subject: str, kind: str) -> Iterator[Probe]:
        for job, sid in STORES:
            asked = f"dmsc.v1.store.query.{job}.{sid}"
            asking = said(subject, asked, _store_query(party, job), {}, "")
            yield Probe(kind, (asking,), note=f"{subject}: {asked}")

    for subject in party.asks_as:
        for stream in streams:
            yield from calls(subject, stream)
        yield from stores(subject, "broker")
        for call in BEYOND:
            for body, headers in ((b"", {}), (b"{}", {"Nats-Rollup": "all"})):
                asking = said(subject, call, body, headers, "")
                yield Probe("broker", (asking,), note=_note(subject, call, body, headers))
        for target in TARGETS:
            reading = "$JS.API.DIRECT.GET.KV_registry.$KV.registry.k-s0-r0"
            yield Probe("broker by reply", (said(subject, reading, b"", {}, target),))
            pulling = f"$JS.API.CONSUMER.MSG.NEXT.LOGS.{VICTIM}"
            yield Probe("broker by reply", (said(subject, pulling, _pull(), {}, target),))
    for subject in _others(party):
        yield from stores(subject, "broker in another's name")
        for stream in ("KV_jobs", "KV_users", "LOGS", "OBJ_artifacts", "KV_rendezvous"):
            for call, body, headers in _calls(stream, streams[stream], places[stream], "b" + "0" * 20 + "x1"):
                asking = said(subject, call, body, headers, "")
                note = _note(subject, call, body, headers)
                yield Probe("broker in another's name", (asking,), note=note)


def _note(subject: str, call: str, body: bytes, headers: Mapping[str, str]) -> str:
    return f"{subject}: {call} {dict(headers) or ''} {body.decode()[:200]}"


def _guessable(places: Sequence[str]) -> list[str]:
    """Chunks of objects have names at random, which only the object's description tells: who has it may read
    them. All of them together are tried."""
    chunks = "$O.artifacts.C."
    plain = [place for place in places if not (place.startswith(chunks) and len(place) > len(chunks) + 20)]
    return plain if plain == list(places) else [*plain, f"{chunks}*", f"{chunks}>", f"{chunks}k.*"]


def _others(party: Party) -> list[str]:
    """Where others ask, and some where nobody does."""
    found = {subject for one in PARTIES for subject in one.asks_as}
    found |= {
        f"dmsc.v1.broker.instance.{job}.{sid}" for job in "jk~" for sid in ("j-s1-r0", "k-s0-r0", party.name)
    }
    found |= {f"dmsc.v1.broker.user.{role}.{party.label}" for role in ("viewer", "operator", "admin")}
    found |= {f"dmsc.v1.broker.owner.{user}.{party.label}" for user in ("somebody", "researcher", "*")}
    found |= {
        "dmsc.v1.broker.orchestrator.~.orchestrator",
        f"dmsc.v1.broker.tap.~.{party.name}",
        "dmsc.v1.broker.x",
    }
    return sorted(found - set(party.asks_as))


def _calls(
    stream: str, config: Mapping[str, Any], places: Sequence[str], mine: str
) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    api = "$JS.API"

    def body(**fields: Any) -> bytes:
        return json.dumps(fields).encode()

    for place in (*_guessable(places), ">"):
        yield f"{api}.DIRECT.GET.{stream}.{place}", b"", {}
        yield f"{api}.STREAM.MSG.GET.{stream}", body(last_by_subj=place), {}
        yield f"{api}.STREAM.MSG.GET.{stream}", body(seq=1, next_by_subj=place), {}
        yield f"{api}.STREAM.INFO.{stream}", body(subjects_filter=place), {}
        pushed = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": 1,
            "deliver_subject": "$KV.users.root",
        }
        making = body(stream_name=stream, config=pushed)
        yield f"{api}.CONSUMER.CREATE.{stream}.{mine}d.{place}", making, {}
        yield f"{api}.STREAM.PURGE.{stream}", body(filter=place), {}
    for place in places:
        for headers in (
            {},
            {"Nats-Rollup": "all"},
            {"Nats-Rollup": "sub", "KV-Operation": "PURGE"},
            {"Nats-Incr": "+1"},
        ):
            yield place, b"attack", headers
    yield f"{api}.DIRECT.GET.{stream}", body(last_by_subj=places[-1]), {}
    yield f"{api}.STREAM.MSG.GET.{stream}", body(seq=1), {}
    yield f"{api}.STREAM.MSG.DELETE.{stream}", body(seq=1), {}
    yield f"{api}.STREAM.INFO.{stream}", b"", {}
    yield f"{api}.STREAM.PURGE.{stream}", b"", {}
    yield f"{api}.STREAM.DELETE.{stream}", b"", {}
    yield f"{api}.STREAM.UPDATE.{stream}", json.dumps(dict(config)).encode(), {}
    yield f"{api}.STREAM.SNAPSHOT.{stream}", body(deliver_subject="$KV.users.root"), {}
    yield (
        f"{api}.CONSUMER.CREATE.{stream}",
        body(stream_name=stream, config={"deliver_subject": "$KV.x.y"}),
        {},
    )
    yield f"{api}.CONSUMER.NAMES.{stream}", b"", {}
    yield f"{api}.CONSUMER.INFO.{stream}.{VICTIM}", b"", {}
    yield f"{api}.CONSUMER.MSG.NEXT.{stream}.{VICTIM}", _pull(), {}
    yield f"{api}.CONSUMER.DELETE.{stream}.{VICTIM}", b"", {}
    yield f"$JS.ACK.{stream}.{VICTIM}.1.1.1.1.0", b"+ACK", {}


def _first(stream: str) -> bytes:
    config = {"deliver_policy": "by_start_sequence", "opt_start_seq": 1}
    return json.dumps({"stream_name": stream, "config": config}).encode()


def _pull() -> bytes:
    return json.dumps({"batch": 64, "no_wait": True}).encode()


def _store_query(party: Party, job: str) -> bytes:
    query = StoreQuery.model_construct(job=job, table="events")
    return codec.encode(query, codec.sender_map(_sender(party)), "store")


def _sender(party: Party) -> Sender:
    kind = EntityKind(party.kind) if party.kind in set(EntityKind) else EntityKind.CLIENT
    return Sender(name=party.name, kind=kind, incarnation="attack")


def _request(party: Party, number: str, call: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    message = BrokerRequest.model_construct(call=call, headers=dict(headers), body=body)
    return codec.encode(message, codec.sender_map(_sender(party)), number)
