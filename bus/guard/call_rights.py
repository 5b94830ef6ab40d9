"""Which JetStream calls a broker makes for which asker, from the table of subjects. Pure.

A call that is not allowed here is refused.
"""

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
from schemas.data_set.builds import BuildRecord
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
    """The objects that a job may use: it writes and reads below each of `own`; `read` are objects or folders
    that it only reads; with `every` it may use all."""

    own: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    every: bool = False

    def may_write(self, name: str) -> bool:
        return self.every or any(name.startswith(prefix) for prefix in self.own)

    def may_read(self, name: str) -> bool:
        listed = any(name == entry or name.startswith(f"{entry}/") for entry in self.read)
        return listed or self.may_write(name)


def names_of_build(record: BuildRecord) -> ObjectNames:
    """The objects that the units of a build may use.

    They write below the folder of its work, which builds of other work, or of other names, don't share. They
    read what the build names, if its user was allowed to read that when it was submitted.
    """
    spec = record.spec
    own = f"{bus_name(spec.folder)}/"
    code = None if spec.code is None else spec.code.url
    urls = (*(url for key, url in spec.urls() if key != "store"), code)
    readable_names = (
        bus_name(url) for url in urls if url and (url in record.may_read or url.startswith(DATA_SETS))
    )
    return ObjectNames(
        own=(own,) if own != "/" else (),
        read=tuple(name for name in readable_names if "/" in name),
    )


def names_of(record: JobRecord | None) -> ObjectNames:
    """The objects that a job may use.

    It writes below its own folder. It reads what its specification names, if its user was allowed to read
    that when the job was submitted. Data sets may be read by all jobs.
    """
    if record is None:
        return ObjectNames()
    spec = record.spec
    folder = bus_name(spec.artifacts)
    code = None if spec.code is None else spec.code.url
    urls = (spec.resume_from, spec.weights_url, *spec.data.urls().values(), code)
    own = f"{folder}/{record.job}/"
    readable_names = (
        bus_name(url) for url in urls if url and (url in record.may_read or url.startswith(DATA_SETS))
    )
    return ObjectNames(
        own=(own,) if folder else (),
        # Not what all jobs' folders lie in (`bus://artifacts`): that would name everybody's objects.
        read=tuple(name for name in readable_names if "/" in name and not own.startswith(f"{name}/")),
    )


@lru_cache(maxsize=4_096)
def _readable(asker: BrokerCaller) -> tuple[tuple[str, str], ...]:
    try:
        identity = asker.identity()
        return readable_by(Role(asker.scope)) if identity is None else readable(identity)
    except (BadInput, ValueError):
        return ()


def may_read(asker: BrokerCaller, stream: str, subjects: str) -> bool:
    """Whether the asker may read all of `subjects`; if empty, whether it may read anything in the stream."""
    readable_patterns = _readable(asker)
    if not subjects:
        return any(name == stream for name, _ in readable_patterns)
    return any(name == stream and covers(pattern, subjects) for name, pattern in readable_patterns)


def touches_objects(call: Call) -> bool:
    """Whether the decision about a call needs the names of the job's objects."""
    if isinstance(call, AskStore):
        return False
    return call.subject.startswith("$O.") if isinstance(call, Write) else call.stream == OBJECTS


def check(asker: BrokerCaller, call: Call, names: ObjectNames, user: str = "") -> None:
    """Checks that an asker may have a call made.

    Args:
        asker: The asker, as named by the request's subject, which the server binds to the identity.
        call: The requested call.
        names: The objects of the asker's job.
        user: For a query to an instance's store: the user of its job; empty if there is no such job.

    Raises:
        Refused: the asker may not.
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
    own_patterns = _rendezvous_patterns(asker)
    if isinstance(call, Purge):
        counters = call.stream == rendezvous.COUNTERS_STREAM
        return counters and any(covers(pattern, call.subject) for pattern in own_patterns)
    plain = {"*", ">"}.isdisjoint(call.subject.split("."))
    return plain and any(covers(pattern, call.subject) for pattern in own_patterns)


def _rendezvous_patterns(asker: BrokerCaller) -> tuple[str, ...]:
    """The patterns of the rendezvous keys of the asker's job, which it may write."""
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
        # An asker that knows a nuid has read it in an object's metadata: nobody guesses 88 bits.
        return isinstance(call, Read) or _is_own(asker, nuid)
    name = object_name(subject)
    if name is None:
        return False
    if isinstance(call, Read):
        return names.may_read(name)
    is_metadata = not isinstance(call, Write) or _is_own_metadata(asker, name, call.body)
    return is_metadata and names.may_write(name)


def _is_own(asker: BrokerCaller, nuid: str) -> bool:
    return asker.scope == EVERY or nuid.startswith(f"{asker.scope}.")


def object_name(subject: str) -> str | None:
    """The name of the object whose metadata have this subject; None if it is no such subject."""
    token = subject.removeprefix(METAS)
    if not subject.startswith(METAS) or "." in token:
        return None
    try:
        raw = base64.urlsafe_b64decode(token)
        return raw.decode() if base64.urlsafe_b64encode(raw).decode() == token else None
    except ValueError:
        return None


def _is_own_metadata(asker: BrokerCaller, name: str, body: bytes) -> bool:
    """Whether a body is the metadata of the object of that name, with chunks that belong to the asker.

    Metadata with chunks of others are refused: somebody with more rights who replaces or deletes the object
    would remove the chunks that they name.
    """
    if not body:
        return False
    try:
        meta = json.loads(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(meta, dict) or meta.get("name") != name or meta.get("bucket") != streams.OBJECT_BUCKET:
        return False
    nuid = meta.get("nuid")
    is_link = isinstance(meta.get("options"), dict) and "link" in meta["options"]
    return isinstance(nuid, str) and bool(_nuid.fullmatch(nuid)) and _is_own(asker, nuid) and not is_link
