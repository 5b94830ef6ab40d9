"""Every identity and role × every row × publish, subscribe, read: as the table says, by the real server.

A request is a publish with an inbox of one's own; what answering needs is in `test_threats`.

What is expected is derived here from the table anew, not from `bus.guard.permissions`.
"""

from __future__ import annotations

import itertools

from bus import subjects
from bus.security.credentials import issue
from bus.security.identity import Identity
from bus.subject_row import Names, Subject
from bus.subjects import (
    ACCESS,
    DEAD_LETTER,
    DOOR,
    MODULE_QUESTION,
    OBSERVATION,
    STORE_QUERY,
    SUBJECTS,
)
from schemas.envelope import EntityKind as K
from schemas.signals import Role
from tests.integration.guard.conftest import TOKENS, Guarded
from tests.integration.guard.raw_connection import RawConnection, raw_connection

BELOW = {K.CLUSTER, K.INSTANCE, K.FUNCTIONAL_MODULE, K.CLIENT}
"""Who reads by way of a broker, whose part is in `test_broker`."""
ROWS = [row for row in SUBJECTS if row.name != "broker request"]
ANSWERING_STREAMS = {"JOBS", "AUDIT", "FAULT_QUEUE", "UNREADABLE"}
CONTROL_PLANE = {K.SERVICE_REGISTRY, K.ORCHESTRATOR, K.AUTHORIZER, K.GATEWAY, K.ROUTER}
IDENTITIES = (
    Identity(name="service-registry", kind=K.SERVICE_REGISTRY),
    Identity(name="gateway-a", kind=K.GATEWAY, cluster="a"),
    Identity(name="authorizer", kind=K.AUTHORIZER),
    Identity(name="router-a", kind=K.ROUTER, cluster="a"),
    Identity(name="orchestrator", kind=K.ORCHESTRATOR),
    Identity(name="a-n", kind=K.CLUSTER, cluster="a", node="n"),
    Identity(name="j-s0-r0", kind=K.INSTANCE, cluster="a", node="n", job="j"),
    Identity(name="mine", kind=K.FUNCTIONAL_MODULE, module="mine"),
    Identity(name="tool", kind=K.CLIENT),
    Identity(name="tap", kind=K.TAP),
)
PARTIES = ("sid", "agent", "gateway", "cluster", "module")
PRIVATE = {
    row.name
    for row in (
        *(
            ACCESS,
            DOOR,
            DEAD_LETTER,
            STORE_QUERY,
            subjects.KEPT_ANSWER,
            subjects.UPLOADS,
            subjects.FEED_PIECE,
            subjects.USER_COMMAND,
            subjects.AUDIT,
        ),
        *(subjects.EXPLAIN_ACCESS, subjects.USER_RECORD, subjects.REVOCATION, subjects.START_INSTANCE),
        subjects.LINK_SECRET,
        *(subjects.SECRET, subjects.ANALYSE, subjects.WRITE_SAMPLE, subjects.READ_FILES),
        *(subjects.REMOVE_CHECKPOINTS, subjects.UNREADABLE),
        *(subjects.PREPARE_UNIT, subjects.REMOVE_OBJECTS, subjects.UNIT_COMMIT, subjects.DATA_SET_VERSION),
        *(subjects.GENERATION, subjects.BIND_SESSION, subjects.WAVE_TOKENS, subjects.PREDICT),
        *(subjects.STORED_FILE, subjects.BATCH, subjects.BATCH_UNIT),
        *(subjects.CONSENT, subjects.KEPT_COLLECTION, subjects.KEPT_ITEM, subjects.PSEUDONYM_KEY),
        subjects.SERVICE_SALT,
        *(subjects.ACCOUNT_SLICE, subjects.ACCOUNT_POSITION, subjects.ACCOUNT_QUERY, subjects.BUDGET_STATE),
        subjects.USE_REPORT,
        *(subjects.REGISTER_MODEL, subjects.MOVE_ALIAS, subjects.APPROVE_MODEL, subjects.EVALUATE_MODEL),
        *(subjects.REMOVE_MODEL, subjects.RULE_MODEL, subjects.MODEL_KEYS),
        *(subjects.NAMED_MODEL, subjects.MODEL_VERSION, subjects.ALIAS_MOVE),
        *(subjects.MACHINE_DEMAND, subjects.MACHINE_POOL, subjects.MACHINES_QUERY, subjects.ORDER_MACHINES),
        *(subjects.RELEASE_MACHINE, subjects.RESET_POOL),
    )
}
OTHER = "somebody-else"
OF_STANDBYS = (subjects.REGISTRATION, subjects.STATE_CHANGE, subjects.HEARTBEAT)


def tokens_of(row: Subject, who: Identity, *, party: bool, job: bool) -> dict[str, str]:
    """Tokens of `who`; foreign ones where `party` or `job` say so."""
    own = {
        "cluster": who.cluster or "a",
        "module": who.module or "m",
        "job": who.job or "j",
        "owner": "system",
    }
    found = {token: own.get(token, who.name if token in PARTIES else "x") for token in row.tokens}
    if party:
        found |= {token: OTHER for token in row.tokens if token in PARTIES}
    if job and "job" in row.tokens:
        found["job"] = OTHER
    return found


def may_send(row: Subject, who: Identity, *, party: bool, job: bool) -> bool:
    if who.kind not in row.senders or (job and who.job and "job" in row.tokens):
        return False
    if who.kind in BELOW and (row.bucket is not None or row.stream in ANSWERING_STREAMS):
        return False
    if not party or not any(token in PARTIES for token in row.tokens):
        return True
    if who.kind in (K.ORCHESTRATOR, K.SERVICE_REGISTRY) and row in OF_STANDBYS:
        return True  # of several that bear one name each stands by under its own; readers hold them to it
    return row.names not in (Names.SENDER, Names.BOTH) or only_cluster(row, who)


def may_hear(row: Subject, who: Identity, *, party: bool, job: bool) -> bool:
    if who.kind is K.TAP or (who.kind is K.GATEWAY and row.bucket is None):  # which shows it, by role
        return True
    hears = who.kind in row.receivers or (who.kind in row.senders and row.bucket is not None)
    if who.kind is K.CLIENT:
        return who.kind in row.receivers or row.name not in PRIVATE
    if not hears or (job and who.job and "job" in row.tokens):
        return False
    if not party or not any(token in PARTIES for token in row.tokens):
        return True
    return row.names not in (Names.RECEIVER, Names.BOTH) or only_cluster(row, who)


def only_cluster(row: Subject, who: Identity) -> bool:
    """The row names a cluster alone, and `who` is of none: of no particular one."""
    return [token for token in row.tokens if token in PARTIES] == ["cluster"] and not who.cluster


def may_read(row: Subject, who: Identity, *, party: bool, job: bool) -> bool:
    """History and values, by a consumer of one's own."""
    if who.kind in BELOW:
        return False
    if who.kind is K.TAP or (who.kind is K.GATEWAY and row.bucket is None):
        return True
    if row.bucket is not None:
        return may_hear(row, who, party=party, job=job)
    if who.kind not in CONTROL_PLANE:
        return False
    if who.kind in CONTROL_PLANE and who.kind in row.senders:
        return row.names not in (Names.RECEIVER, Names.BOTH) or not party
    return may_hear(row, who, party=party, job=job)


def readable(row: Subject, subject: str) -> str | None:
    stream = f"KV_{row.bucket}" if row.bucket else row.stream
    return None if stream is None else f"$JS.API.CONSUMER.CREATE.{stream}.r1.{subject}"


class Tally:
    """What was asked, and what the server said otherwise than expected."""

    def __init__(self) -> None:
        self.asked = 0
        self.wrong: list[str] = []

    async def check(self, connection: RawConnection, who: str, what: str, expected: dict[str, bool]) -> None:
        if what == "subscribe":
            denied = await connection.denied(subscribe=expected)
        else:
            denied = await connection.denied(publish=expected)
        self.asked += len(expected)
        self.wrong += [
            f"{who}: {what} {subject}: {'refused' if subject in denied else 'allowed'}"
            for subject, allowed in expected.items()
            if allowed == (subject in denied)
        ]


async def test_entities_instances_modules_and_tools(mesh: Guarded) -> None:
    tally = Tally()
    for who in IDENTITIES:
        async with raw_connection(mesh.url, issue(mesh.root, who), who.name, who.kind) as connection:
            publish: dict[str, bool] = {}
            subscribe: dict[str, bool] = {}
            read: dict[str, bool] = {}
            for row, party, job in itertools.product(ROWS, (False, True), (False, True)):
                subject = row(**tokens_of(row, who, party=party, job=job))
                foreign = {"party": party, "job": job}
                # the same subject may be made twice: where a row has no such token
                publish.setdefault(subject, may_send(row, who, **foreign))
                subscribe.setdefault(subject, may_hear(row, who, **foreign))
                if (reading := readable(row, subject)) is not None:
                    read.setdefault(reading, may_read(row, who, **foreign))
            await tally.check(connection, str(who.kind), "publish", publish)
            await tally.check(connection, str(who.kind), "subscribe", subscribe)
            await tally.check(connection, str(who.kind), "read", read)
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.asked > 3 * len(IDENTITIES) * len(SUBJECTS) / 2


async def test_users_by_role(mesh: Guarded) -> None:
    tally = Tally()
    asks = {Role.VIEWER: set(), Role.RESEARCHER: {DOOR.name, MODULE_QUESTION.name}}
    asks[Role.OPERATOR] = asks[Role.RESEARCHER] | {STORE_QUERY.name, OBSERVATION.name}
    asks[Role.ADMIN] = {
        row.name for row in ROWS if row.bucket is None and row.stream not in ANSWERING_STREAMS
    }
    for role in Role:
        everything = role in (Role.OPERATOR, Role.ADMIN)
        async with raw_connection(mesh.url, TOKENS[role]) as connection:
            rows = {row(**dict.fromkeys(row.tokens, "x")): row for row in ROWS}
            seen = {subject: everything or row.name not in PRIVATE for subject, row in rows.items()}
            await tally.check(
                connection,
                role,
                "publish",
                {subject: row.name in asks[role] for subject, row in rows.items()},
            )
            await tally.check(connection, role, "subscribe", seen)
            reads = {
                reading: False
                for subject, row in rows.items()
                if (reading := readable(row, subject)) is not None
            }
            await tally.check(connection, role, "read", reads)
            raw = (
                "$JS.API.STREAM.DELETE.AUDIT",
                "$JS.API.INFO",
                "$KV.users.me",
                "$O.artifacts.M.x",
                "$SYS.x",
            )
            await tally.check(connection, role, "publish", dict.fromkeys(raw, False))
            wide = dict.fromkeys((">", "dmsc.v1.>", "_INBOX.>", "$JS.>", "$O.>"), everything)
            await tally.check(connection, role, "subscribe", wide)
    assert not tally.wrong, "\n".join(tally.wrong)


def test_no_row_lies_deeper_than_another_rows_pattern() -> None:
    """The server allows a subscription to `a.>` where `a.*` is allowed; that must show nothing more."""
    for one, other in itertools.permutations([row.wildcard().split(".") for row in SUBJECTS], 2):
        if one[-1] != "*" or len(other) <= len(one):
            continue
        head = one[:-1]
        assert not all(a in ("*", b) or b == "*" for a, b in zip(head, other, strict=False)), (one, other)
