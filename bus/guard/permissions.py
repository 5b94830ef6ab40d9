"""What each identity may publish and subscribe to, from the table of subjects. Pure; the server enforces it.

Each row's senders and receivers give rights to its subjects, to its stream or bucket through JetStream's API,
and to the inboxes of the parties that it answers (`bus.nats.reply_subjects`). A row's token that names a
party (`bus.subject_row.Names`) is filled with the identity's own name, and `{job}` with its job. So an
instance has the subjects of its own SID and job, and nobody has another's inbox.

Two properties of NATS shape these rules:

* The server allows a subscription to `a.>` where `a.*` is allowed. That shows more only if there are deeper
  subjects, and a test of the table makes sure that there are none.
* JetStream sends stored messages, and acknowledgements, to any reply subject that a request names, without
  checking whether the requester may publish there. So nobody below the control plane calls it: a broker
  (`bus.broker`) decides who may read what (`readable`), and nobody below may publish what a stream
  acknowledges.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from bus import subjects
from bus.guard.broker_caller import BELOW, BROKER, BrokerCaller, callers_of_role
from bus.messaging import rendezvous, stream_specs, streams
from bus.nats import reply_subjects
from bus.nats.reply_subjects import inbox_of
from bus.security.identity import ANY, Identity
from bus.subject_row import Delivery, Names, Subject
from bus.subjects import DISCONNECTED, SUBJECTS
from schemas.base import is_token
from schemas.envelope import EntityKind as K
from schemas.names import MESH, STANDING
from schemas.signals import Role

API = "$JS.API"
REMEMBERED = 4_096
"""How many identities' permissions are cached: they may all reconnect at once."""

PRIVATE = (
    *(subjects.ACCESS, subjects.DOOR, subjects.DEAD_LETTER, subjects.STORE_QUERY),
    *(subjects.KEPT_ANSWER, subjects.UPLOADS, subjects.FEED_PIECE),
    *(subjects.USER_COMMAND, subjects.EXPLAIN_ACCESS, subjects.USER_RECORD, subjects.REVOCATION),
    *(subjects.AUDIT, subjects.START_INSTANCE, subjects.LINK_SECRET, subjects.UNREADABLE),
    *(subjects.SECRET, subjects.ANALYSE, subjects.WRITE_SAMPLE, subjects.READ_FILES),
    *(
        subjects.REMOVE_CHECKPOINTS,
        subjects.BROKER_REQUEST,
        subjects.PREPARE_UNIT,
        subjects.REMOVE_OBJECTS,
        subjects.UNIT_COMMIT,
        subjects.DATA_SET_VERSION,
        subjects.GENERATION,
        subjects.BIND_SESSION,
        subjects.WAVE_TOKENS,
        subjects.PREDICT,
        subjects.CONSENT,
        subjects.KEPT_COLLECTION,
        subjects.KEPT_ITEM,
        subjects.PSEUDONYM_KEY,
        subjects.STORED_FILE,
        subjects.BATCH,
        subjects.BATCH_UNIT,
        subjects.SERVICE_SALT,
    ),
    *(subjects.ACCOUNT_SLICE, subjects.ACCOUNT_POSITION, subjects.ACCOUNT_QUERY, subjects.BUDGET_STATE),
    subjects.USE_REPORT,
    *(subjects.REGISTER_MODEL, subjects.MOVE_ALIAS, subjects.APPROVE_MODEL, subjects.EVALUATE_MODEL),
    *(subjects.REMOVE_MODEL, subjects.RULE_MODEL, subjects.MODEL_KEYS),
    *(subjects.NAMED_MODEL, subjects.MODEL_VERSION, subjects.ALIAS_MOVE),
    *(subjects.MACHINE_DEMAND, subjects.MACHINE_POOL, subjects.MACHINES_QUERY, subjects.ORDER_MACHINES),
    *(subjects.RELEASE_MACHINE, subjects.RESET_POOL),
)
"""Rows that only operators and admins see: requests of users (Type 3, the gateways' request API), unreadable
bytes, rows of an instance's own store, prompts and answers of services, files of a job, records of feeds,
what users spent, machines and what they cost, tokens and the audit; models, which users read at gateways, by
`model.read`; and rows that carry a secret, which a tap hides but a NATS client does not."""

_PROVISIONING = frozenset({K.SERVICE_REGISTRY, K.ORCHESTRATOR, K.AUTHORIZER, K.GATEWAY, K.ROUTER})
"""Kinds that may make streams: only the control plane, because a stream can be made to republish anything."""
_HISTORIANS = _PROVISIONING | {K.CLIENT, K.FUNCTIONAL_MODULE, K.ACCOUNTANT}
"""Kinds that read streams; instances and agents only subscribe."""
_WINDOWS = frozenset({K.GATEWAY})
"""Kinds that show users what their role may see (dashboard, logs, browser tap), each after Type 3."""
_OBJECT_USERS = frozenset({K.GATEWAY, K.ORCHESTRATOR, K.MODEL_REGISTRY})
"""Kinds that store and read all objects; instances have a broker do that for their own."""
_OF_STANDBYS = (subjects.REGISTRATION, subjects.STATE_CHANGE, subjects.HEARTBEAT)
_ACKNOWLEDGED = frozenset(spec.name for spec in stream_specs.STREAMS if spec.acknowledged)
_SPOKEN = frozenset(
    row
    for row in SUBJECTS
    if row.bucket is None and row.stream not in _ACKNOWLEDGED and row is not subjects.BROKER_REQUEST
)
"""Rows that all their senders may publish. Rows of a bucket or of a stream that acknowledges are excluded:
JetStream's acknowledgement goes to any reply subject that the message names."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Allow lists of NATS subjects. `never` may not be published even if `publish` covers it."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    never: tuple[str, ...] = ()

    def with_(self, other: Permissions) -> Permissions:
        """The union of both."""
        return Permissions(
            _minimal({*self.publish, *other.publish}),
            _minimal({*self.subscribe, *other.subscribe}),
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
        return Permissions(_minimal(self.publish), _minimal(self.subscribe), self.never)


@lru_cache(maxsize=REMEMBERED)
def of_identity(identity: Identity) -> Permissions:
    """The permissions of an entity, an instance, a functional module, or a tool of the mesh's owner."""
    return _of_identity(identity).done()


@lru_cache(maxsize=REMEMBERED)
def readable(identity: Identity) -> tuple[tuple[str, str], ...]:
    """What a broker reads for an identity below the control plane: pairs of stream and subject pattern."""
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
    if identity.kind is K.FUNCTIONAL_MODULE:  # its earlier suggestions, to go on from there
        _read_stream(lists, subjects.SUGGESTION, sent(subjects.SUGGESTION, identity))
    if identity.kind in _WINDOWS:
        _show(lists)
    if identity.kind in _PROVISIONING:
        _provision(lists)
    if identity.kind is K.ACCOUNTANT:  # how large what is stored is, not what is in it
        _list_objects(lists)
    if identity.kind in _OBJECT_USERS:
        _use_objects(lists)
    if identity.kind is K.INSTANCE:
        _use_rendezvous(lists, identity.job)
    if identity.kind is K.BROKER:
        _act_as_broker(lists)
    if identity.kind in BELOW:
        lists.publish.add(BrokerCaller.of_identity(identity).subject)
    else:
        _read_directly(lists)
        if identity.kind is K.AUTHORIZER:  # reads the last entry of the audit's hash chain through the leader
            lists.publish.add(f"{API}.STREAM.MSG.GET.{subjects.AUDIT.stream}")
    return lists


def of_role(role: Role, inbox: str) -> Permissions:
    """The permissions of a user's own connection, by role.

    They cover what `dmsc tap` shows the role, and what a client may request. `inbox` is the prefix of the
    user's inboxes (`inbox_of_token`).
    """
    lists = _of_role(role)
    _ask(lists, inbox)
    lists.publish.update(asker.subject for asker in callers_of_role(role, inbox))
    return lists.done()


@lru_cache(maxsize=len(Role))
def readable_by(role: Role) -> tuple[tuple[str, str], ...]:
    """What a broker reads for users of this role: pairs of stream and subject pattern."""
    return tuple(sorted(_of_role(role).reads))


def of_users_module(module: Identity, user: str, inbox: str) -> Permissions:
    """The permissions that a user's functional module has besides the user's own.

    It has the permissions of the module itself, and may have a broker query the stores of the user's own
    jobs. `module.owner` is the user if it makes suggestions for their jobs only; `inbox` is the prefix of the
    user's inboxes.
    """
    module_permissions = of_identity(replace(module, jobs=()))
    asks = (BrokerCaller.of_owner(user, inbox).subject,) if is_token(user) else ()
    return module_permissions.with_(Permissions(asks, ()))


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
        # The answering service decides each request again.
        asks = (subjects.DOOR, subjects.MODULE_QUESTION)
        more = (subjects.STORE_QUERY, subjects.OBSERVATION) if everything else ()
        lists.publish.update(row.wildcard() for row in (*asks, *more))
    if role is Role.ADMIN:
        lists.publish.update(row.wildcard() for row in SUBJECTS if row in _SPOKEN)
    return lists


def _ask(lists: _Lists, inbox: str) -> None:
    """Allows receiving answers, and messages to oneself."""
    lists.publish.add(f"{inbox}.*.{reply_subjects.SELF}.*")
    lists.subscribe.add(f"{inbox}.>")


def _everything(lists: _Lists) -> None:
    """Allows what a tap without limits subscribes to and reads."""
    lists.subscribe.add(">")
    for row in SUBJECTS:
        _read_stored(lists, row, row.wildcard())


def _show(lists: _Lists) -> None:
    """Allows all published messages, live and from the streams, but no bucket and nobody's inbox."""
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
        pattern = received(row, identity)
        _read_stored(lists, row, pattern)
        lists.subscribe.add(pattern)
        if identity.kind not in BELOW:
            # A read through the leader, before a compare-and-set, can't be narrowed to a key.
            lists.publish.add(f"{API}.STREAM.MSG.GET.KV_{row.bucket}")
    elif row.stream is not None and identity.kind in _PROVISIONING:
        _read_stream(lists, row, received(row, identity))


def _receive(lists: _Lists, row: Subject, identity: Identity) -> None:
    pattern = row.wildcard() if identity.kind is K.CLIENT else received(row, identity)
    allowed = identity.kind is not K.CLIENT or row not in PRIVATE or identity.kind in row.receivers
    if allowed:
        lists.subscribe.add(pattern)
    if allowed and (row.bucket is not None or identity.kind in _HISTORIANS):
        _read_stored(lists, row, pattern)
    if row.delivery is Delivery.REQUEST and identity.kind in row.receivers:
        lists.publish.add(reply_subjects.answering(row.answered_by, _answers_as(row, identity)))


def _answers_as(row: Subject, identity: Identity) -> str:
    """The name under which `identity` serves this row; `*` for a mesh's owner, which serves under any."""
    if row.answerer_token is None:
        return reply_subjects.ANYBODY
    if row.answerer_token == "module":
        return identity.module
    return identity.cluster if row.answerer_token == "cluster" else identity.name


def sent(row: Subject, identity: Identity) -> str:
    """The pattern on which `identity` may send messages of this row, being one of its senders."""
    if identity.kind in STANDING and row in _OF_STANDBYS:
        return row.wildcard()  # a standby has another name, which readers check
    return _filled(row, identity, row.names in (Names.SENDER, Names.BOTH))


def received(row: Subject, identity: Identity) -> str:
    """The pattern on which `identity` may receive messages of this row, being one of its receivers."""
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
def _read_stored(lists: _Lists, row: Subject, pattern: str) -> None:
    if row.bucket is not None:
        lists.reads.add((f"KV_{row.bucket}", pattern))
    elif row.stream is not None:
        _read_stream(lists, row, pattern)


def _read_stream(lists: _Lists, row: Subject, pattern: str) -> None:
    assert row.stream is not None
    lists.reads.add((row.stream, pattern))


def _read_directly(lists: _Lists) -> None:
    """Allows consumers with these filters, and reads of the last message of such a subject."""
    for stream, pattern in lists.reads:
        lists.publish.update(
            (
                f"{API}.CONSUMER.CREATE.{stream}.*.{pattern}",
                f"{API}.CONSUMER.MSG.NEXT.{stream}.*",
                f"{API}.CONSUMER.DELETE.{stream}.*",
                f"{API}.DIRECT.GET.{stream}.{pattern}",
                f"{API}.STREAM.INFO.{stream}",
            )
        )


def _provision(lists: _Lists) -> None:
    lists.publish.add(f"{API}.STREAM.NAMES")
    for config in streams.stream_configs(1):
        lists.publish.update(f"{API}.STREAM.{call}.{config['name']}" for call in ("CREATE", "INFO", "UPDATE"))


def _list_objects(lists: _Lists) -> None:
    bucket = streams.OBJECT_BUCKET
    lists.reads.add((f"OBJ_{bucket}", f"$O.{bucket}.M.>"))


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


def _use_rendezvous(lists: _Lists, job: str) -> None:
    """Allows the rendezvous keys of a job: an instance subscribes; a broker reads and writes for it."""
    for namespace in rendezvous.namespaces(job) if job != ANY else (None,):
        values, counters = rendezvous.subjects_of(namespace)
        lists.subscribe.update((values, counters))
        lists.reads.update(((rendezvous.VALUES_STREAM, values), (rendezvous.COUNTERS_STREAM, counters)))


def _act_as_broker(lists: _Lists) -> None:
    """Allows what a broker does for others, by its own decision (`bus.guard.call_rights`)."""
    lists.subscribe.add(f"{BROKER}.>")
    lists.publish.add(reply_subjects.answering(K.BROKER))
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
    """Whether `pattern` matches all subjects that `subject`, which may have wildcards, stands for."""
    pattern_tokens, subject_tokens = pattern.split("."), subject.split(".")
    for index, token in enumerate(pattern_tokens):
        if token == ">":
            return len(subject_tokens) > index
        if index >= len(subject_tokens) or subject_tokens[index] == ">":
            return False
        if token not in ("*", subject_tokens[index]):
            return False
    return len(pattern_tokens) == len(subject_tokens)


def _minimal(patterns: set[str]) -> tuple[str, ...]:
    """The patterns, sorted; only `>` if that is among them."""
    return (">",) if ">" in patterns else tuple(sorted(patterns))
