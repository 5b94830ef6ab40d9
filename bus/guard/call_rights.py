"""Who may have which call made: pure, from the table of subjects. What is not allowed here is refused."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from functools import lru_cache

from bus.guard.broker_caller import EVERY, OWNER, BrokerCaller
from bus.guard.jetstream_calls import AskStore, Call, Consume, Open, Purge, Read, Write
from bus.guard.permissions import covers, readable, readable_by
from bus.messaging import rendezvous, streams
from schemas.envelope import EntityKind as K
from schemas.errors import BadInput, Refused
from schemas.job import JobRecord
from schemas.signals import Role
from schemas.urls import BUS, bus_name

DATA_SETS = f"{BUS}datasets/"
OBJECTS = f"OBJ_{streams.OBJECT_BUCKET}"
CHUNKS, METAS = f"$O.{streams.OBJECT_BUCKET}.C.", f"$O.{streams.OBJECT_BUCKET}.M."
_nuid = re.compile(r"^([A-Za-z0-9_-]{1,120}\.)?[0-9a-zA-Z]{20,40}$")


@dataclass(frozen=True, slots=True)
class ObjectNames:
    """Of objects: what begins with one of `own` is written and read; `read` are objects, or their folders."""

    own: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    every: bool = False

    def may_write(self, name: str) -> bool:
        return self.every or any(name.startswith(prefix) for prefix in self.own)

    def may_read(self, name: str) -> bool:
        named = any(name == one or name.startswith(f"{one}/") for one in self.read)
        return named or self.may_write(name)


def names_of(record: JobRecord | None) -> ObjectNames:
    """The objects of a job: below its own folder it writes; it reads what its specification names, as far as
    its user might read that when it was submitted. Data sets are there for all who train."""
    if record is None:
        return ObjectNames()
    spec = record.spec
    folder = bus_name(spec.artifacts)
    named = (spec.resume_from, spec.initial_weights, spec.data.source)
    own = f"{folder}/{record.job}/"
    found = (bus_name(url) for url in named if url and (url in record.may_read or url.startswith(DATA_SETS)))
    return ObjectNames(
        own=(own,) if folder else (),
        # Not what all jobs' folders lie in (`bus://artifacts`): that would name everybody's objects.
        read=tuple(one for one in found if "/" in one and not own.startswith(f"{one}/")),
    )


@lru_cache(maxsize=4_096)
def _readable(asker: BrokerCaller) -> tuple[tuple[str, str], ...]:
    try:
        identity = asker.identity()
        return readable_by(Role(asker.scope)) if identity is None else readable(identity)
    except (BadInput, ValueError):
        return ()


def may_read(asker: BrokerCaller, stream: str, subjects: str) -> bool:
    """Whether all that `subjects` stands for is readable; without: whether anything in the stream is."""
    found = _readable(asker)
    if not subjects:
        return any(name == stream for name, _ in found)
    return any(name == stream and covers(pattern, subjects) for name, pattern in found)


def touches_objects(call: Call) -> bool:
    """Whether the names of a job's objects are needed to decide."""
    if isinstance(call, AskStore):
        return False
    return call.subject.startswith("$O.") if isinstance(call, Write) else call.stream == OBJECTS


def check(asker: BrokerCaller, call: Call, names: ObjectNames, user: str = "") -> None:
    """
    Args:
        asker: as the server holds the subject of the question to the identity.
        call: what is wanted.
        names: of the objects of the asker's job.
        user: whose job it is of which an instance's store is to be asked; empty: there is no such job.

    Raises:
        Refused: it may not.
    """
    if isinstance(call, AskStore):
        if asker.kind != OWNER or not user or user != asker.scope:
            whose = f"is {user}'s" if user else "is not there"
            raise Refused(f"{asker.scope} asks stores of their own jobs; {call.job} {whose}", job=call.job)
        return
    if not _may(asker, call, names):
        raise Refused(f"{asker.name} may not publish on {call.order.subject}", subject=call.order.subject)


def _may(asker: BrokerCaller, call: Read | Consume | Open | Write | Purge, names: ObjectNames) -> bool:
    if isinstance(call, Consume):
        return call.consumer.startswith(asker.consumers)
    if isinstance(call, Open):
        return call.consumer.startswith(asker.consumers) and may_read(asker, call.stream, call.subjects)
    if touches_objects(call):
        return _may_use_object(asker, call, names)
    if isinstance(call, Read):
        return may_read(asker, call.stream, call.subjects)
    meeting = _meeting(asker)
    if isinstance(call, Purge):
        counters = call.stream == rendezvous.COUNTERS_STREAM
        return counters and any(covers(pattern, call.subject) for pattern in meeting)
    plain = {"*", ">"}.isdisjoint(call.subject.split("."))
    return plain and any(covers(pattern, call.subject) for pattern in meeting)


def _meeting(asker: BrokerCaller) -> tuple[str, ...]:
    """The meeting points of the asker's job, which it writes."""
    if asker.kind != K.INSTANCE:
        return ()
    spaces = (None,) if asker.scope == EVERY else rendezvous.namespaces(asker.scope)
    return tuple(subject for space in spaces for subject in rendezvous.subjects_of(space))


# --- objects -----------------------------------------------------------------------------------------------
def _may_use_object(asker: BrokerCaller, call: Read | Write | Purge, names: ObjectNames) -> bool:
    if asker.kind != K.INSTANCE:
        return False
    subject = call.subjects if isinstance(call, Read) else call.subject
    if subject.startswith(CHUNKS):
        nuid = subject.removeprefix(CHUNKS)
        if not _nuid.fullmatch(nuid):
            return False
        # Who knows a nuid has read it in the description of an object: nobody guesses 88 bits.
        return isinstance(call, Read) or _is_own(asker, nuid)
    name = object_name(subject)
    if name is None:
        return False
    if isinstance(call, Read):
        return names.may_read(name)
    described = not isinstance(call, Write) or _describes(asker, name, call.body)
    return described and names.may_write(name)


def _is_own(asker: BrokerCaller, nuid: str) -> bool:
    return asker.scope == EVERY or nuid.startswith(f"{asker.scope}.")


def object_name(subject: str) -> str | None:
    """The name of the object that a description's subject is of; None where it is of none."""
    token = subject.removeprefix(METAS)
    if not subject.startswith(METAS) or "." in token:
        return None
    try:
        raw = base64.urlsafe_b64decode(token)
        return raw.decode() if base64.urlsafe_b64encode(raw).decode() == token else None
    except ValueError:
        return None


def _describes(asker: BrokerCaller, name: str, body: bytes) -> bool:
    """Whether this describes the object of that name, with chunks of the asker's own: whoever replaces or
    deletes it, with more rights, removes the chunks that it names."""
    if not body:
        return False
    try:
        meta = json.loads(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(meta, dict) or meta.get("name") != name or meta.get("bucket") != streams.OBJECT_BUCKET:
        return False
    nuid = meta.get("nuid")
    linked = isinstance(meta.get("options"), dict) and "link" in meta["options"]
    return isinstance(nuid, str) and bool(_nuid.fullmatch(nuid)) and _is_own(asker, nuid) and not linked
