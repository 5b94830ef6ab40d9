"""What each identity may publish and listen to, from the table of subjects: pure, and the server enforces it.

From each row's senders and receivers follow its subjects, its stream or bucket as far as JetStream's API
gives them out, and the inboxes of those whom it answers (`bus.inboxes`). A row's token that names a party
(`bus.subject.Names`) is filled with the identity's own name, `{job}` with its job. So an instance has the
subjects of its own SID and job, and nobody has another's inbox.

Two things of NATS are designed around here:

* A subscription to `a.>` is allowed where `a.*` is: that shows more only if subjects go deeper there, which a
  test of the table rules out.
* JetStream sends what it has stored to whatever reply subject a request names, without asking whether the
  asker might publish there. So instances get no raw reads of what they can write (objects are read through
  the leader, in JSON), nobody below the control plane makes streams, and `bus.services` drops such messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from bus import inboxes, rendezvous, streams, subjects
from bus.identity import ANY, Identity
from bus.inboxes import inbox_of
from bus.subject import Delivery, Names, Subject
from bus.subjects import DISCONNECTED, SUBJECTS
from schemas.envelope import EntityKind as K
from schemas.signals import Role

API = "$JS.API"
REMEMBERED = 4_096
"""Identities that may all come back at once."""

PRIVATE = (
    *(subjects.ACCESS, subjects.DOOR, subjects.DEAD_LETTER, subjects.STORE_QUERY, subjects.KEPT_ANSWER),
    *(subjects.USER_COMMAND, subjects.EXPLAIN_ACCESS, subjects.USER_RECORD, subjects.REVOCATION),
    *(subjects.AUDIT, subjects.START_INSTANCE, subjects.LINK_SECRET, subjects.UNREADABLE),
    *(subjects.SECRET, subjects.ANALYSE, subjects.WRITE_SAMPLE),
)
"""Who asked for what (Type 3, the doors), bytes that nobody could read, rows of an instance's own store; who
has which tokens, the audit; and whatever carries a secret, which a tap hides and a NATS client would not."""

_OWN_NAME = ("sid", "agent", "gateway")
_ON_BEHALF = (subjects.REGISTRATION, subjects.STATE_CHANGE)
"""A node agent says these of its instances too, which can't any more."""
_PROVISIONING = frozenset({K.SERVICE_REGISTRY, K.ORCHESTRATOR, K.AUTHORIZER, K.GATEWAY, K.ROUTER})
"""Whoever makes the streams can have them republish anything: the control plane, and nobody else."""
_HISTORIANS = _PROVISIONING | {K.CLIENT, K.FUNCTIONAL_MODULE}
"""Who reads streams; instances and agents listen to what comes."""
_WINDOWS = frozenset({K.GATEWAY})
"""Who shows users what their role may see: dashboard, logs, the tap in a browser; each after Type 3."""
_OBJECT_USERS = frozenset({K.GATEWAY, K.ORCHESTRATOR, K.INSTANCE})


@dataclass(frozen=True, slots=True)
class Permissions:
    """Allow lists of NATS subjects. `never`: may not be published, whatever `publish` says."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    never: tuple[str, ...] = ()

    def with_(self, other: Permissions) -> Permissions:
        """Both."""
        return Permissions(
            _least({*self.publish, *other.publish}),
            _least({*self.subscribe, *other.subscribe}),
            tuple(sorted({*self.never, *other.never})),
        )

    def may_publish(self, subject: str) -> bool:
        allowed = any(covers(pattern, subject) for pattern in self.publish)
        return allowed and not any(covers(pattern, subject) for pattern in self.never)

    def may_subscribe(self, subject: str) -> bool:
        return any(covers(pattern, subject) for pattern in self.subscribe)


@dataclass(slots=True)
class _Lists:
    publish: set[str] = field(default_factory=set)
    subscribe: set[str] = field(default_factory=set)
    never: tuple[str, ...] = ()

    def done(self) -> Permissions:
        return Permissions(_least(self.publish), _least(self.subscribe), self.never)


@lru_cache(maxsize=REMEMBERED)
def of_identity(identity: Identity) -> Permissions:
    """For an entity, an instance, a functional module, or a tool of the mesh's owner."""
    lists = _Lists()
    _ask(lists, inbox_of(identity.kind, identity.name))
    if identity.kind is K.TAP:
        _everything(lists)
    for row in SUBJECTS:
        if identity.kind in row.senders:
            _send(lists, row, identity)
        if identity.kind in row.receivers or identity.kind is K.CLIENT:
            _receive(lists, row, identity)
    if identity.kind is K.SERVICE_REGISTRY:
        lists.subscribe.add(DISCONNECTED)
    if identity.kind is K.FUNCTIONAL_MODULE:  # what it said before, to go on from there
        _read_stream(lists, subjects.SUGGESTION, subjects.SUGGESTION.wildcard(module=identity.module))
    if identity.kind in _WINDOWS:
        _show(lists)
    if identity.kind in _PROVISIONING:
        _provision(lists)
    if identity.kind in _OBJECT_USERS:
        _use_objects(lists, raw=identity.kind is not K.INSTANCE)
    if identity.kind is K.AUTHORIZER:  # the chain's end, through the leader
        lists.publish.add(f"{API}.STREAM.MSG.GET.{subjects.AUDIT.stream}")
    if identity.kind is K.INSTANCE:
        _meet(lists, identity.job)
    if identity.kind is K.CLIENT:
        lists.publish.add(f"{API}.STREAM.INFO.*")
    return lists.done()


def of_role(role: Role, inbox: str) -> Permissions:
    """For a user's own connection, by role: what `dmsc tap` shows that role, and what a client may ask.

    `inbox`: its prefix, `inbox_of_token`.
    """
    lists = _Lists()
    _ask(lists, inbox)
    everything = role in (Role.OPERATOR, Role.ADMIN)
    for row in SUBJECTS:
        if everything or row not in PRIVATE:
            lists.subscribe.add(row.wildcard())
            _read_stored(lists, row, row.wildcard())
    if everything:
        _everything(lists)
    if role is not Role.VIEWER:
        # each of them is decided again by who answers; nothing that a stream keeps (see above)
        asks = (subjects.DOOR, subjects.MODULE_QUESTION)
        more = (subjects.STORE_QUERY, subjects.OBSERVATION) if everything else ()
        lists.publish.update(row.wildcard() for row in (*asks, *more))
    if role is Role.ADMIN:
        lists.publish.add(">")
        lists.never = _of_the_authorizer()
    return lists.done()


def _ask(lists: _Lists, inbox: str) -> None:
    """Hear answers, and messages to oneself."""
    lists.publish.add(f"{inbox}.*.{inboxes.SELF}.*")
    lists.subscribe.add(f"{inbox}.>")


def _everything(lists: _Lists) -> None:
    """What a tap without limits listens to and reads."""
    lists.subscribe.add(">")
    for row in SUBJECTS:
        _read_stored(lists, row, row.wildcard())
    lists.publish.add(f"{API}.STREAM.INFO.*")
    lists.publish.update(f"{API}.{call}" for call in ("INFO", "STREAM.NAMES", "STREAM.LIST"))


def _show(lists: _Lists) -> None:
    """All that is said, as it comes and from the streams; no bucket, and nobody's inbox."""
    for row in SUBJECTS:
        if row.bucket is None:
            lists.subscribe.add(row.wildcard())
            _read_stored(lists, row, row.wildcard())


# --- rows --------------------------------------------------------------------------------------------------
def _send(lists: _Lists, row: Subject, identity: Identity) -> None:
    lists.publish.add(sent(row, identity))
    if row.bucket is not None:
        wanted = received(row, identity)
        _read_stored(lists, row, wanted)
        lists.subscribe.add(wanted)
        # through the leader, before a compare-and-set; it can't be narrowed to a key
        lists.publish.add(f"{API}.STREAM.MSG.GET.KV_{row.bucket}")
    elif row.stream is not None and identity.kind in _PROVISIONING:
        _read_stream(lists, row, received(row, identity))


def _receive(lists: _Lists, row: Subject, identity: Identity) -> None:
    wanted = row.wildcard() if identity.kind is K.CLIENT else received(row, identity)
    if identity.kind is not K.CLIENT or row not in PRIVATE or identity.kind in row.receivers:
        lists.subscribe.add(wanted)
    if row.bucket is not None or identity.kind in _HISTORIANS:
        _read_stored(lists, row, wanted)
    if row.delivery is Delivery.REQUEST and identity.kind in row.receivers:
        lists.publish.add(inboxes.answering(row.answered_by, _answers_as(row, identity)))


def _answers_as(row: Subject, identity: Identity) -> str:
    """The name under which `identity` serves this row; `*` for all of them, of a mesh's owner."""
    if row.answerer_token is None:
        return inboxes.ANYBODY
    if row.answerer_token == "module":
        return identity.module
    return identity.cluster if row.answerer_token == "cluster" else identity.name


def sent(row: Subject, identity: Identity) -> str:
    """The pattern on which `identity` may send messages of this row, being one of its senders."""
    own = row.names in (Names.SENDER, Names.BOTH)
    if identity.kind is K.CLUSTER and row in _ON_BEHALF:
        own = False
    return _filled(row, identity, own)


def received(row: Subject, identity: Identity) -> str:
    """The pattern on which `identity` may hear messages of this row, being one of its receivers."""
    return _filled(row, identity, row.names in (Names.RECEIVER, Names.BOTH))


def _filled(row: Subject, identity: Identity, own: bool) -> str:
    tokens: dict[str, str] = {}
    if identity.job and identity.job != ANY:
        tokens["job"] = identity.job
    if own:
        tokens |= dict.fromkeys(_OWN_NAME, identity.name)
        if identity.cluster and identity.cluster != ANY:
            tokens["cluster"] = identity.cluster
        if identity.module and identity.module != ANY:
            tokens["module"] = identity.module
    return row.wildcard(**tokens)


# --- what is kept ------------------------------------------------------------------------------------------
def _read_stored(lists: _Lists, row: Subject, wanted: str) -> None:
    if row.bucket is not None:
        _read(lists, f"KV_{row.bucket}", wanted)
    elif row.stream is not None:
        _read_stream(lists, row, wanted)


def _read_stream(lists: _Lists, row: Subject, wanted: str) -> None:
    assert row.stream is not None
    _read(lists, row.stream, wanted)


def _read(lists: _Lists, stream: str, wanted: str) -> None:
    """A consumer of our own with this filter, and the last message of such a subject."""
    lists.publish.update(
        (
            f"{API}.CONSUMER.CREATE.{stream}.*.{wanted}",
            f"{API}.CONSUMER.MSG.NEXT.{stream}.*",
            f"{API}.CONSUMER.DELETE.{stream}.*",
            f"{API}.DIRECT.GET.{stream}.{wanted}",
        )
    )


def _provision(lists: _Lists) -> None:
    lists.publish.add(f"{API}.STREAM.NAMES")
    for config in streams.stream_configs(1):
        lists.publish.update(f"{API}.STREAM.{call}.{config['name']}" for call in ("CREATE", "INFO", "UPDATE"))


def _use_objects(lists: _Lists, *, raw: bool) -> None:
    bucket, stream = streams.OBJECT_BUCKET, f"OBJ_{streams.OBJECT_BUCKET}"
    lists.publish.update(
        (
            f"$O.{bucket}.C.*",
            f"$O.{bucket}.M.*",
            f"{API}.STREAM.MSG.GET.{stream}",
            f"{API}.STREAM.PURGE.{stream}",
        )
    )
    if raw:
        _read(lists, stream, f"$O.{bucket}.M.>")


def _meet(lists: _Lists, job: str) -> None:
    """The meeting points of a job's groups."""
    for namespace in rendezvous.namespaces(job) if job != ANY else (None,):
        meeting = rendezvous.subjects_of(namespace)
        lists.publish.update(meeting)
        lists.subscribe.update(meeting)
    for stream in (rendezvous.VALUES_STREAM, rendezvous.COUNTERS_STREAM):
        lists.publish.add(f"{API}.STREAM.MSG.GET.{stream}")
        lists.publish.add(f"{API}.STREAM.INFO.{stream}")


def _of_the_authorizer() -> tuple[str, ...]:
    """What nobody but the AAM writes, whoever else may write everything: users, revocations, the audit."""
    found: list[str] = []
    for row in SUBJECTS:
        if row.senders == {K.AUTHORIZER} and (row.bucket or row.stream):
            stream = f"KV_{row.bucket}" if row.bucket else row.stream
            found.append(row.wildcard())
            found += [f"{API}.STREAM.{call}.{stream}" for call in ("DELETE", "PURGE", "UPDATE", "MSG.DELETE")]
    return tuple(found)


# --- patterns ----------------------------------------------------------------------------------------------
def covers(pattern: str, subject: str) -> bool:
    """Whether everything that `subject` (which may have wildcards) stands for is within `pattern`."""
    mine, theirs = pattern.split("."), subject.split(".")
    for index, token in enumerate(mine):
        if token == ">":
            return len(theirs) > index
        if index >= len(theirs) or theirs[index] == ">":
            return False
        if token not in ("*", theirs[index]):
            return False
    return len(mine) == len(theirs)


def _least(patterns: set[str]) -> tuple[str, ...]:
    """Sorted; where everything is allowed, nothing else is said."""
    return (">",) if ">" in patterns else tuple(sorted(patterns))
