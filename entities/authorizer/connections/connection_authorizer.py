"""The AAM's decisions on connections to the bus: who may connect, and to which subjects (draft §3; ADR-0022).

`ConnectionAuthorizer.decide` is pure but for the log, its counters and the users. Several may run, in any
process that has the keys: each answers the requests that the server sends it. No secret is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from bus.guard.auth_callout import AuthCallout, Caller, ConnectionGrant, NotKnownYet
from bus.guard.guard_keys import GuardKeys
from bus.guard.permissions import of_identity, of_role, of_users_module
from bus.logs import get_logger
from bus.messaging.disconnects import ACCOUNT
from bus.nats.reply_subjects import inbox_of_token
from bus.security.credentials import Checked, check, id_of, root_of
from bus.security.identity import ANY, Identity
from bus.security.trust_roots import PresentRoots
from entities.authorizer.access.authentication import UnknownUser, User, Users, recognise
from entities.authorizer.audit.rate_limited_records import Refusal
from entities.authorizer.audit.refusals import Refusals
from entities.authorizer.disconnection import connection_by, connection_of
from schemas import names
from schemas.base import is_token
from schemas.envelope import EntityKind
from schemas.errors import Refused
from schemas.plain_text import plain
from schemas.signals import Role

log = get_logger("authorizer.callout")

REMEMBERED = 100
"""Most texts of refusals kept."""
NAME_MOST = 120
"""Characters of the name that a caller gives itself, for logs and the audit."""
LOGGED_MOST = 1_000
"""Refusals logged one by one; then only each hundredth, so that a million attempts fill no disk."""

PresentUsers = Callable[[], Users]


class Jobs(Protocol):
    """The jobs whose instances may connect, and those whose instances may no longer."""

    @property
    def going(self) -> Collection[str]: ...

    @property
    def ended(self) -> Collection[str]: ...

    async def news(self) -> None:
        """Wait until another job is known."""


class Reporter(Protocol):
    """Takes a log line and its fields."""

    def __call__(self, event: str, **fields: str) -> object: ...


class ConnectionAuthorizer:
    """Decides on connections."""

    def __init__(
        self,
        keys: GuardKeys,
        users: PresentUsers,
        report: Reporter | None = None,
        *,
        roots: PresentRoots | None = None,
        account: str = ACCOUNT,
        refusals: Refusals | None = None,
        jobs: Jobs | None = None,
        revocations_read: asyncio.Event | None = None,
        user_connection_s: float = 24 * 3600.0,
    ) -> None:
        """Make an authorizer of connections.

        Args:
            keys: the guard's keys.
            users: returns the present users and revocations.
            report: takes the lines about accepted connections; by default they go to the log.
            roots: the roots by which credentials are checked; by default those of `keys`.
            account: the account that connections are put into.
            refusals: takes refused connections, for the audit stream.
            jobs: the jobs; without them no instance may connect.
            revocations_read: until it is set, only authorizers may connect; None: `users` has all revocations
                already.
            user_connection_s: a user must reconnect after this; a removed user's connections are closed at
                once (`disconnection`).
        """
        self.account = account
        self.granted: Counter[str] = Counter()  # by kind or role
        self.refused: Counter[str] = Counter()  # by the reason's code
        self.reasons: deque[str] = deque(maxlen=REMEMBERED)  # of the last refusals, in words
        self._keys = keys
        self.roots: PresentRoots = roots or (lambda: keys.roots)
        self._users = users
        self._report: Reporter = report or log.info
        self._refusals = refusals
        self._jobs = jobs
        self._revocations_read = revocations_read
        self._user_connection_s = user_connection_s

    @contextlib.asynccontextmanager
    async def answering(
        self, servers: Sequence[str], name: str, *, patience_s: float = 30.0
    ) -> AsyncIterator[AuthCallout]:
        """Answer the servers until the block ends.

        Raises:
            BusUnreachable, Refused: see `AuthCallout.running`.
        """
        async with AuthCallout.running(
            servers, self._keys, self, name=name, patience_s=patience_s
        ) as callout:
            self._report("guarding the bus", service=name)
            yield callout

    def decide(self, caller: Caller) -> ConnectionGrant:
        """Decide on a caller's connection.

        Raises:
            Refused: the reason, for the log.
            NotKnownYet: an instance's job is not known yet, or the revocations are not read yet.
        """
        try:
            kind, grant = self._decide(caller, time.time())
        except NotKnownYet:
            raise
        except Refused as error:
            self.left_out(caller, error)
            raise
        self.granted[kind] += 1
        where = {} if self.account == ACCOUNT else {"account": self.account}
        self._report(
            "connection accepted",
            connection=caller.name[:NAME_MOST],
            host=caller.host,
            as_=grant.name,
            what=kind,
            **where,
        )
        return grant

    def _decide(self, caller: Caller, now: float) -> tuple[str, ConnectionGrant]:
        if not caller.token:
            raise Refused("no credential and no token", why="nothing")
        if caller.signature:
            credential = self._check_credential(caller, now)
            identity = credential.identity
            if identity.kind is not EntityKind.AUTHORIZER:  # its connection reads the revocations
                self._wait_for_revocations(identity.name)
            self._refuse_ended(credential)
            name = connection_by(identity.name, (credential.root, *credential.ids))
            return identity.kind, ConnectionGrant(
                name, of_identity(identity), credential.expires_at, self.account
            )
        self._wait_for_revocations("who shows a token")
        user = recognise(self._users(), caller.token, now)
        if isinstance(user, UnknownUser):
            why = "user" if user.name else "unknown"
            reason = user.reason if user.name else "neither a credential of this mesh nor a user's token"
            raise Refused(reason, why=why, user=user.name)
        return self._grant_user(user, caller, now)

    def _wait_for_revocations(self, who: str) -> None:
        """Check that revocations are known.

        Raises:
            NotKnownYet: the revocations are not read yet.
        """
        if self._revocations_read is not None and not self._revocations_read.is_set():
            raise NotKnownYet(f"{who} waits until what was revoked is known here", why="early")

    def _refuse_ended(self, credential: Checked) -> None:
        """Check that a credential still counts.

        Raises:
            Refused: it was revoked, or its job has ended.
            NotKnownYet: it belongs to an instance of a job that is not known.
        """
        users, who = self._users(), credential.identity
        for id in credential.ids:
            if (revocation := users.revoked_credentials.get(id)) is not None:
                why = f": {revocation.reason}" if revocation.reason else ""
                raise Refused(
                    f"credential {id}, by which {who.name} comes, was revoked by {revocation.by}{why}",
                    why="revoked",
                )
        if who.kind is not EntityKind.INSTANCE or who.job == ANY:  # the mesh's owner
            return
        if self._jobs is not None and who.job in self._jobs.ended:
            raise Refused(f"the job of {who.name} has ended, and its credentials with it", why="ended")
        if self._jobs is None or who.job not in self._jobs.going:
            raise NotKnownYet(f"no record of the job of {who.name} is known here", why="job")

    async def news(self, caller: Caller) -> None:
        """Wait until the revocations are known, or another job is."""
        if self._revocations_read is not None and not self._revocations_read.is_set():
            await self._revocations_read.wait()
        elif self._jobs is None:
            await asyncio.Event().wait()
        else:
            await self._jobs.news()

    def _check_credential(self, caller: Caller, now: float) -> Checked:
        """Check a credential by this mesh's root, or by the root before it for as long as that one counts."""
        assert caller.signature
        roots, root = self.roots(), root_of(caller.token)
        if root == roots.before != roots.root and now >= roots.before_until:
            raise Refused(
                "its credential is of the root before this one, whose time is over; "
                "`dmsc credential` makes a new one",
                why="replaced",
            )
        old = root != roots.root and roots.counts(root, now)
        root = root if old else roots.root
        credential = check(caller.token, caller.nonce, caller.signature, root, now)
        expires_at = min(credential.expires_at, int(roots.before_until)) if old else credential.expires_at
        return replace(credential, expires_at=expires_at, root=id_of(root))

    def _grant_user(self, user: User, caller: Caller, now: float) -> tuple[str, ConnectionGrant]:
        inbox = inbox_of_token(caller.token)
        permissions = of_role(user.role, inbox)
        module = module_of(user, caller.name.partition("/")[0], self._user_names())
        if module is not None:
            permissions = permissions.with_(of_users_module(module, user.name, inbox))
        expires = int(now + self._user_connection_s)
        if user.expires_at is not None:  # the connection expires with the token
            expires = min(expires, int(user.expires_at))
        return user.role, ConnectionGrant(connection_of(user.name), permissions, expires, self.account)

    def _user_names(self) -> set[str]:
        users = self._users()
        return {*(user.name for user in users.listed), *users.records}

    def knows(self, token: str) -> bool:
        """Whether this is or was a token of one of our users."""
        user = recognise(self._users(), token, time.time())
        return isinstance(user, User) or bool(user.name)

    def left_out(self, caller: Caller, error: Refused) -> None:
        """Count and log a refused connection, and queue it for the audit."""
        self.refused[str(error.fields.get("why", "credential"))] += 1
        self.reasons.append(error.text)
        if self._refusals is not None:
            refusal = refused_connection(caller, error)
            self._refusals.add(refusal, "connection", refusal)
        total = self.refused.total()
        if total <= LOGGED_MOST or total % 100 == 0:
            who = {"connection": caller.name[:NAME_MOST], "host": caller.host}
            log.warning("connection refused", **who, reason=error.text, refused=total)


def refused_connection(caller: Caller, error: Refused) -> Refusal:
    """A refused connection for the audit.

    `user` is the user whose token was shown and is no longer valid; the name in `resource` is what the caller
    gave.
    """
    name = plain(caller.name.partition("/")[0])[:NAME_MOST]
    return Refusal(
        user=str(error.fields.get("user", "")),
        action="connect",
        resource=f"{name or 'nameless'} from {caller.host}",
        reason=error.text,
    )


def module_of(user: User, sid: str, users: Collection[str] = ()) -> Identity | None:
    """The functional module that a user may run under this SID; None if they may not run it.

    A user may run modules with the user's name, `alice` or `alice-…`, an administrator any, a viewer none.
    `users` has the names of all: `alice-smith` is not alice's if there is a user of that name.
    """
    longer = (name for name in users if name != user.name and names.is_users(name, user.name))
    own = names.is_users(sid, user.name) and not any(names.is_users(sid, name) for name in longer)
    if user.role is Role.VIEWER or not is_token(sid) or not (own or user.role is Role.ADMIN):
        return None
    if names.taken(sid) is not None:  # not even an administrator's module may have an entity's name
        return None
    owner = user.name if user.role is Role.RESEARCHER else ""  # other roles may change any job themselves
    return Identity(name=sid, kind=EntityKind.FUNCTIONAL_MODULE, module=names.module_of(sid), owner=owner)
