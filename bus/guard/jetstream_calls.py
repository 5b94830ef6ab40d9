"""Reads the JetStream calls that askers send to a broker, strictly, and builds the broker's own calls. Pure.

A broker passes on no body and no header unread: an unknown field could say where the answer goes
(`deliver_subject`), or empty a bucket (`Nats-Rollup: all`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bus.subjects import STORE_QUERY
from bus.wire import codec
from schemas.errors import BadInput, BadMessage
from schemas.limits import INACTIVE_S, LONGEST_PULL_NS, LONGEST_TTL_S
from schemas.store import StoreQuery

API = "$JS.API"
STORES = f"{STORE_QUERY.wildcard().removesuffix('*.*')}"
"""The prefix of the subjects on which instances' local stores are queried."""
MOST_AT_ONCE = 256
"""Most messages of one pull."""

_number = re.compile(r"^[0-9]{1,19}$")
_change = re.compile(r"^[+-][0-9]{1,18}$")
_name = re.compile(r"^[A-Za-z0-9_-]{1,120}$")
_time = re.compile(r"^[0-9T:.+Z-]{10,40}$")


@dataclass(frozen=True, slots=True)
class BrokerPublication:
    """The message that the broker publishes.

    With `forwarded`, its reply subject is the asker's own inbox, else the broker's.
    """

    subject: str
    body: bytes = b""
    headers: Mapping[str, str] | None = None
    forwarded: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """Reads messages of a stream with these subjects, or, if empty, the stream's state."""

    stream: str
    subjects: str
    order: BrokerPublication


@dataclass(frozen=True, slots=True)
class Consume:
    """Uses or deletes an existing consumer; its name says whose it is."""

    stream: str
    consumer: str
    order: BrokerPublication


@dataclass(frozen=True, slots=True)
class Open:
    """Creates a consumer."""

    stream: str
    consumer: str
    subjects: str
    order: BrokerPublication


@dataclass(frozen=True, slots=True)
class Write:
    """Stores a message."""

    subject: str
    body: bytes
    order: BrokerPublication


@dataclass(frozen=True, slots=True)
class Purge:
    """Removes all messages of one subject."""

    stream: str
    subject: str
    order: BrokerPublication


@dataclass(frozen=True, slots=True)
class AskStore:
    """Queries an instance's local store."""

    job: str
    sid: str
    query: StoreQuery
    order: BrokerPublication


Call = AskStore | Read | Consume | Open | Write | Purge


def parse(subject: str, headers: Mapping[str, str], body: bytes) -> Call:
    """The call that an asker requests.

    Raises:
        BadInput: this is no call that a broker makes.
    """
    _checked_subject(subject)
    if subject.startswith(STORES):
        return _ask_store(subject, headers, body)
    if not subject.startswith("$JS."):
        return Write(subject, body, BrokerPublication(subject, body, _checked_headers(headers)))
    if headers:
        raise BadInput(f"{subject}: a call takes no headers")
    for prefix, read in _CALLS:
        if subject.startswith(prefix):
            return read(subject[len(prefix) :], body)
    raise BadInput(f"{subject}: not a call that a broker makes")


def _ask_store(subject: str, headers: Mapping[str, str], body: bytes) -> Call:
    tokens = _concrete_subject(subject).removeprefix(STORES).split(".")
    try:
        query, _ = codec.decode(body, StoreQuery)
    except BadMessage as error:
        raise BadInput(f"{subject}: {error.text}") from None
    if len(tokens) != 2 or headers or not isinstance(query, StoreQuery):
        raise BadInput(f"{subject}: not a question to an instance's store")
    return AskStore(tokens[0], tokens[1], query, BrokerPublication(subject))


def _direct(rest: str, body: bytes) -> Call:
    stream, _, subjects = rest.partition(".")
    if body:
        raise BadInput("a direct read takes no body")
    return Read(
        _checked_name(stream),
        _concrete_subject(subjects),
        BrokerPublication(f"{API}.DIRECT.GET.{stream}.{subjects}"),
    )


def _message(rest: str, body: bytes) -> Call:
    fields = _fields(body, {"last_by_subj", "seq", "next_by_subj"})
    stream = _checked_name(rest)
    if set(fields) == {"last_by_subj"}:
        subjects = _concrete_subject(_text(fields, "last_by_subj"))
        query: dict[str, Any] = {"last_by_subj": subjects}
    else:
        subjects = _checked_subject(_text(fields, "next_by_subj"))
        query = {"seq": _count(fields, "seq"), "next_by_subj": subjects}
    return Read(
        stream, subjects, BrokerPublication(f"{API}.STREAM.MSG.GET.{stream}", _json(query), forwarded=True)
    )


def _info(rest: str, body: bytes) -> Call:
    stream = _checked_name(rest)
    if not body:
        return Read(stream, "", BrokerPublication(f"{API}.STREAM.INFO.{stream}"))
    fields = _fields(body, {"subjects_filter", "offset"})
    subjects = _checked_subject(_text(fields, "subjects_filter"))
    query = {"subjects_filter": subjects, "offset": _count(fields, "offset", 0)}
    return Read(stream, subjects, BrokerPublication(f"{API}.STREAM.INFO.{stream}", _json(query)))


def _create(rest: str, body: bytes) -> Call:
    stream, _, more = rest.partition(".")
    name, _, subjects = more.partition(".")
    config = _fields(body, {"stream_name", "config"}).get("config")
    if not isinstance(config, dict) or not subjects:
        raise BadInput("a consumer needs its configuration, and a filter in the subject")
    consumer: dict[str, Any] = {
        "name": _checked_name(name),
        "filter_subject": subjects,
        "ack_policy": "none",
        "replay_policy": "instant",
        "inactive_threshold": int(INACTIVE_S * 1e9),
        "mem_storage": True,
        "num_replicas": 1,
        "headers_only": config.get("headers_only") is True,
    }
    policy = config.get("deliver_policy")
    if policy == "by_start_sequence":
        consumer["opt_start_seq"] = max(1, _count(config, "opt_start_seq"))
    elif policy == "by_start_time":
        consumer["opt_start_time"] = _text(config, "opt_start_time")
        if not _time.fullmatch(consumer["opt_start_time"]):
            raise BadInput("opt_start_time is no time")
    elif policy != "last_per_subject":
        raise BadInput("a consumer begins at a sequence, at a time, or with the last of each subject")
    consumer["deliver_policy"] = policy
    request = {"stream_name": _checked_name(stream), "config": consumer}
    order = BrokerPublication(f"{API}.CONSUMER.CREATE.{stream}.{name}.{subjects}", _json(request))
    return Open(stream, name, subjects, order)


def _next(rest: str, body: bytes) -> Call:
    stream, _, consumer = rest.partition(".")
    fields = _fields(body, {"batch", "expires", "idle_heartbeat", "no_wait"})
    options: dict[str, Any] = {"batch": min(MOST_AT_ONCE, max(1, _count(fields, "batch")))}
    if fields.get("no_wait") is True:
        options["no_wait"] = True
    else:
        options["expires"] = min(LONGEST_PULL_NS, _count(fields, "expires"))
        options["idle_heartbeat"] = min(options["expires"] // 2, _count(fields, "idle_heartbeat"))
    subject = f"{API}.CONSUMER.MSG.NEXT.{_checked_name(stream)}.{_checked_name(consumer)}"
    return Consume(stream, consumer, BrokerPublication(subject, _json(options), forwarded=True))


def _delete(rest: str, body: bytes) -> Call:
    stream, _, consumer = rest.partition(".")
    if body:
        raise BadInput("the end of a consumer takes no body")
    return Consume(
        stream,
        consumer,
        BrokerPublication(f"{API}.CONSUMER.DELETE.{_checked_name(stream)}.{_checked_name(consumer)}"),
    )


def _purge(rest: str, body: bytes) -> Call:
    subject = _concrete_subject(_text(_fields(body, {"filter"}), "filter"))
    stream = _checked_name(rest)
    return Purge(
        stream, subject, BrokerPublication(f"{API}.STREAM.PURGE.{stream}", _json({"filter": subject}))
    )


_CALLS: tuple[tuple[str, Callable[[str, bytes], Call]], ...] = (
    (f"{API}.DIRECT.GET.", _direct),
    (f"{API}.STREAM.MSG.GET.", _message),
    (f"{API}.STREAM.INFO.", _info),
    (f"{API}.STREAM.PURGE.", _purge),
    (f"{API}.CONSUMER.CREATE.", _create),
    (f"{API}.CONSUMER.MSG.NEXT.", _next),
    (f"{API}.CONSUMER.DELETE.", _delete),
)


# --- fields ------------------------------------------------------------------------------------------------
def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a write, after a check of each name and value.

    Allowed are those of a compare-and-set, a deletion marker, a lifetime, a counter and a message id.
    """
    checked: dict[str, str] = {}
    for key, value in headers.items():
        allowed = (
            (key == "Nats-Expected-Last-Subject-Sequence" and _number.fullmatch(value))
            or (key == "KV-Operation" and value in ("PURGE", "DEL"))
            or (key == "Nats-Rollup" and value == "sub")
            or (key == "Nats-TTL" and _number.fullmatch(value) and 0 < int(value) <= LONGEST_TTL_S)
            or (key == "Nats-Incr" and _change.fullmatch(value))
            or (key == "Nats-Msg-Id" and _name.fullmatch(value))
        )
        if not allowed:
            raise BadInput(f"header {key!r} is not one that a broker takes, or not with that value")
        checked[key] = value
    return checked


def _fields(body: bytes, known: set[str]) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise BadInput("the call's body is no JSON") from None
    if not isinstance(fields, dict) or not set(fields) <= known:
        raise BadInput(f"the call's body has other fields than {', '.join(sorted(known))}")
    return fields


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not value:
        raise BadInput(f"{key} is missing")
    return value


def _count(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = fields.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise BadInput(f"{key} is no number that it could be")
    return value


def _checked_name(name: str) -> str:
    if not _name.fullmatch(name):
        raise BadInput(f"{name!r} is not the name of a stream or consumer")
    return name


def _checked_subject(subject: str) -> str:
    """The subject or pattern, if it has nothing that the server would read differently."""
    if not all(subject.split(".")) or not subject.isascii() or not subject.isprintable() or " " in subject:
        raise BadInput(f"{subject!r} is no subject")
    return subject


def _concrete_subject(subject: str) -> str:
    if not {"*", ">"}.isdisjoint(_checked_subject(subject).split(".")):
        raise BadInput(f"{subject}: one subject, without wildcards")
    return subject


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode()
