"""What each identity may publish and listen to, from the table of subjects: pure, and the server enforces it.

From each row's senders and receivers follow its subjects, its stream or bucket as far as JetStream's API
gives them out, and the inboxes of those whom it answers (`bus.nats.reply_subjects`). A row's token that names
a party (`bus.subject.Names`) is filled with the identity's own name, `{job}` with its job. So an instance has
the subjects of its own SID and job, and nobody has another's inbox.

Two things of NATS are designed around here:

* A subscription to `a.>` is allowed where `a.*` is: that shows more only if subjects go deeper there, which a
  test of the table rules out.
* JetStream sends what it has stored, and its word that something was stored, to whatever reply subject a
  request names, without asking whether the asker might publish there. So nobody below the control plane
  speaks to it: a broker (`bus.broker`) decides who may read what (`readable`), and nothing that a stream
  acknowledges may be published.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from bus import subjects
from bus.guard.broker_caller import BELOW, BROKER, BrokerCaller, callers_of_role
from bus.messaging import rendezvous, stream_specs, streams
from bus.nats import reply_subjects as inboxes
from bus.nats.reply_subjects import inbox_of
from bus.security.identity import ANY, Identity
from bus.subject import Delivery, Names, Subject
from bus.subjects import DISCONNECTED, SUBJECTS
from schemas.base import is_token
from schemas.envelope import EntityKind as K
from schemas.names import MESH, STANDING
from schemas.signals import Role

API = "$JS.API"
REMEMBERED = 4_096
"""Identities that may all come back at once."""

PRIVATE = (
    *(subjects.ACCESS, subjects.DOOR, subjects.DEAD_LETTER, subjects.STORE_QUERY),
    *(subjects.KEPT_ANSWER, subjects.UPLOADS),
    *(subjects.USER_COMMAND, subjects.EXPLAIN_ACCESS, subjects.USER_RECORD, subjects.REVOCATION),
    *(subjects.AUDIT, subjects.START_INSTANCE, subjects.LINK_SECRET, subjects.UNREADABLE),
    *(subjects.SECRET, subjects.ANALYSE, subjects.WRITE_SAMPLE, subjects.READ_FILES),
    *(subjects.REMOVE_CHECKPOINTS, subjects.BROKER_REQUEST),
)
"""Who asked for what (Type 3, the doors), bytes that nobody could read, rows of an instance's own
store, files of a job; who has which tokens, the audit; and whatever carries a secret, which a tap hides and a
NATS client would not."""

_PROVISIONING = frozenset({K.SERVICE_REGISTRY, K.ORCHESTRATOR, K.AUTHORIZER, K.GATEWAY, K.ROUTER})
"""Whoever makes the streams can have them republish anything: the control plane, and nobody else."""
_HISTORIANS = _PROVISIONING | {K.CLIENT, K.FUNCTIONAL_MODULE}
"""Who reads streams; instances and agents listen to what comes."""
_WINDOWS = frozenset({K.GATEWAY})
"""Who shows users what their role may see: dashboard, logs, the tap in a browser; each after Type 3."""
_OBJECT_USERS = frozenset({K.GATEWAY, K.ORCHESTRATOR})
"""Who stores large things, and reads all of them; instances have a broker do that, for theirs."""
_OF_STANDBYS = (subjects.REGISTRATION, subjects.STATE_CHANGE, subjects.HEARTBEAT)
_ACKNOWLEDGED = frozenset(spec.name for spec in stream_specs.STREAMS if spec.acknowledged)
_SPOKEN = frozenset(
    row
    for row in SUBJECTS
    if row.bucket is None and row.stream not in _ACKNOWLEDGED and row is not subjects.BROKER_REQUEST
)
"""What is said and not kept in a stream that answers: JetStream's word that it has stored something goes to
whatever reply subject the message named."""


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


@dataclass(slots=True)
class _Lists:
    publish: set[str] = field(default_factory=set)
    subscribe: set[str] = field(default_factory=set)
    reads: set[tuple[str, str]] = field(default_factory=set)  # streams, and patterns of their subjects
    never: tuple[str, ...] = ()

    def done(self) -> Permissions:
        return Permissions(_least(self.publish), _least(self.subscribe), self.never)


@lru_cache(maxsize=REMEMBERED)
def of_identity(identity: Identity) -> Permissions:
    """For an entity, an instance, a functional module, or a tool of the mesh's owner."""
    return _of_identity(identity).done()


@lru_cache(maxsize=REMEMBERED)
def readable(identity: Identity) -> tuple[tuple[str, str], ...]:
    """What a broker reads for somebody below the control plane: streams, and patterns of their subjects."""
    return tuple(sorted(_of_identity(identity).reads)) if identity.kind in BELOW else ()


def _of_identity(identity: Identity) -> _Lists:
    lists = _Lists()
    _ask(lists, inbox_of(identity.kind, identity.name))
    if identity.kind is K.TAP:
        _everything(lists)
    for row in SUBJECTS:
        if row is subjects.BROKER_REQUEST:
            continue
        if identity.kind in row.senders:
            _send(lists, row, identity)
        if identity.kind in row.receivers or identity.kind is K.CLIENT:
            _receive(lists, row, identity)
    if identity.kind is K.SERVICE_REGISTRY:
        lists.subscribe.add(DISCONNECTED)
    if identity.kind is K.FUNCTIONAL_MODULE:  # what it said before, to go on from there
        _read_stream(lists, subjects.SUGGESTION, sent(subjects.SUGGESTION, identity))
    if identity.kind in _WINDOWS:
        _show(lists)
    if identity.kind in _PROVISIONING:
        _provision(lists)
    if identity.kind in _OBJECT_USERS:
        _use_objects(lists)
    if identity.kind is K.INSTANCE:
        _meet(lists, identity.job)
    if identity.kind is K.BROKER:
        _broke(lists)
    if identity.kind in BELOW:
        lists.publish.add(BrokerCaller.of_identity(identity).subject)
    else:
        _read_directly(lists)
        if identity.kind is K.AUTHORIZER:  # the chain's end, through the leader
            lists.publish.add(f"{API}.STREAM.MSG.GET.{subjects.AUDIT.stream}")
    return lists


def of_role(role: Role, inbox: str) -> Permissions:
    """For a user's own connection, by role: what `dmsc tap` shows that role, and what a client may ask.

    `inbox`: its prefix, `inbox_of_token`.
    """
    lists = _of_role(role)
    _ask(lists, inbox)
    lists.publish.update(asker.subject for asker in callers_of_role(role, inbox))
    return lists.done()


@lru_cache(maxsize=len(Role))
def readable_by(role: Role) -> tuple[tuple[str, str], ...]:
    """What a broker reads for users of this role: streams, and patterns of their subjects."""
    return tuple(sorted(_of_role(role).reads))


def of_users_module(module: Identity, user: str, inbox: str) -> Permissions:
    """What a functional module of a user's may besides what the user may: be itself, and have a broker ask
    the stores of the user's own jobs. `module.owner`: the user, where it suggests for their jobs alone.
    `inbox`: the user's prefix."""
    itself = of_identity(replace(module, jobs=()))
    asks = (BrokerCaller.of_owner(user, inbox).subject,) if is_token(user) else ()
    return itself.with_(Permissions(asks, ()))


def _of_role(role: Role) -> _Lists:
    lists = _Lists()
    everything = role in (Role.OPERATOR, Role.ADMIN)
    for row in SUBJECTS:
        if everything or row not in PRIVATE:
            lists.subscribe.add(row.wildcard())
            _read_stored(lists, row, row.wildcard())
    if everything:
        _everything(lists)
    if role is not Role.VIEWER:
        # each of them is decided again by who answers
        asks = (subjects.DOOR, subjects.MODULE_QUESTION)
        more = (subjects.STORE_QUERY, subjects.OBSERVATION) if everything else ()
        lists.publish.update(row.wildcard() for row in (*asks, *more))
    if role is Role.ADMIN:
        lists.publish.update(row.wildcard() for row in SUBJECTS if row in _SPOKEN)
    return lists


def _ask(lists: _Lists, inbox: str) -> None:
    """Hear answers, and messages to oneself."""
    lists.publish.add(f"{inbox}.*.{inboxes.SELF}.*")
    lists.subscribe.add(f"{inbox}.>")


def _everything(lists: _Lists) -> None:
    """What a tap without limits listens to and reads."""
    lists.subscribe.add(">")
    for row in SUBJECTS:
        _read_stored(lists, row, row.wildcard())


def _show(lists: _Lists) -> None:
    """All that is said, as it comes and from the streams; no bucket, and nobody's inbox."""
    for row in SUBJECTS:
        if row.bucket is None and row is not subjects.BROKER_REQUEST:
            lists.subscribe.add(row.wildcard())
            _read_stored(lists, row, row.wildcard())


# --- rows --------------------------------------------------------------------------------------------------
def _send(lists: _Lists, row: Subject, identity: Identity) -> None:
    if row is subjects.STORE_QUERY and identity.kind is K.FUNCTIONAL_MODULE:
        lists.publish.update(row.wildcard(job=job) for job in identity.jobs)
    elif row in _SPOKEN or identity.kind not in BELOW:
        lists.publish.add(sent(row, identity))
    if row.bucket is not None:
        wanted = received(row, identity)
        _read_stored(lists, row, wanted)
        lists.subscribe.add(wanted)
        if identity.kind not in BELOW:
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
    if identity.kind in STANDING and row in _OF_STANDBYS:
        return row.wildcard()  # one that stands by is there under a name of its own; readers look at it
    return _filled(row, identity, row.names in (Names.SENDER, Names.BOTH))


def received(row: Subject, identity: Identity) -> str:
    """The pattern on which `identity` may hear messages of this row, being one of its receivers."""
    return _filled(row, identity, row.names in (Names.RECEIVER, Names.BOTH))


def _filled(row: Subject, identity: Identity, own: bool) -> str:
    tokens: dict[str, str] = {}
    if identity.job and identity.job != ANY:
        tokens["job"] = identity.job
    if own:
        if row.speaker is not None:
            tokens[row.speaker] = identity.name
        if identity.cluster and identity.cluster != ANY:
            tokens["cluster"] = identity.cluster
        if identity.module and identity.module != ANY:
            tokens["module"] = identity.module
        if identity.kind is K.FUNCTIONAL_MODULE:
            tokens["owner"] = identity.owner or MESH
    return row.wildcard(**tokens)


# --- what is kept ------------------------------------------------------------------------------------------
def _read_stored(lists: _Lists, row: Subject, wanted: str) -> None:
    if row.bucket is not None:
        lists.reads.add((f"KV_{row.bucket}", wanted))
    elif row.stream is not None:
        _read_stream(lists, row, wanted)


def _read_stream(lists: _Lists, row: Subject, wanted: str) -> None:
    assert row.stream is not None
    lists.reads.add((row.stream, wanted))


def _read_directly(lists: _Lists) -> None:
    """Consumers of our own with these filters, and the last message of such a subject."""
    for stream, wanted in lists.reads:
        lists.publish.update(
            (
                f"{API}.CONSUMER.CREATE.{stream}.*.{wanted}",
                f"{API}.CONSUMER.MSG.NEXT.{stream}.*",
                f"{API}.CONSUMER.DELETE.{stream}.*",
                f"{API}.DIRECT.GET.{stream}.{wanted}",
                f"{API}.STREAM.INFO.{stream}",
            )
        )


def _provision(lists: _Lists) -> None:
    lists.publish.add(f"{API}.STREAM.NAMES")
    for config in streams.stream_configs(1):
        lists.publish.update(f"{API}.STREAM.{call}.{config['name']}" for call in ("CREATE", "INFO", "UPDATE"))


def _use_objects(lists: _Lists) -> None:
    bucket, stream = streams.OBJECT_BUCKET, f"OBJ_{streams.OBJECT_BUCKET}"
    lists.publish.update(
        (
            f"$O.{bucket}.>",
            f"{API}.STREAM.MSG.GET.{stream}",
            f"{API}.STREAM.PURGE.{stream}",
        )
    )
    lists.reads.add((stream, f"$O.{bucket}.M.>"))


def _meet(lists: _Lists, job: str) -> None:
    """The meeting points of a job's groups: an instance listens there; a broker reads and writes for it."""
    for namespace in rendezvous.namespaces(job) if job != ANY else (None,):
        values, counters = rendezvous.subjects_of(namespace)
        lists.subscribe.update((values, counters))
        lists.reads.update(((rendezvous.VALUES_STREAM, values), (rendezvous.COUNTERS_STREAM, counters)))


def _broke(lists: _Lists) -> None:
    """What a broker does for others, as it decides (`bus.guard.call_rights`)."""
    lists.subscribe.add(f"{BROKER}.>")
    lists.publish.add(inboxes.answering(K.BROKER))
    for config in streams.stream_configs(1):
        stream = config["name"]
        lists.publish.update(
            (
                f"{API}.CONSUMER.CREATE.{stream}.>",
                f"{API}.CONSUMER.MSG.NEXT.{stream}.*",
                f"{API}.CONSUMER.DELETE.{stream}.*",
                f"{API}.DIRECT.GET.{stream}.>",
                f"{API}.STREAM.MSG.GET.{stream}",
                f"{API}.STREAM.INFO.{stream}",
            )
        )
    lists.publish.update(rendezvous.subjects_of(None))
    lists.publish.add(f"{API}.STREAM.PURGE.{rendezvous.COUNTERS_STREAM}")
    bucket = streams.OBJECT_BUCKET
    lists.publish.update((f"$O.{bucket}.C.*.*", f"$O.{bucket}.M.*", f"{API}.STREAM.PURGE.OBJ_{bucket}"))


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
