"""AAM at the server's own door: who may connect, and to what (draft §3 AAM; ADR-0022).

`ConnectionAuthorizer.decide` is pure but for the log, its counters and the users. Several may run, in any
process that has the keys: each answers for whatever connection the server asks it about. No secret is logged.
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

USER_CONNECTION_S = 24 * 3600.0
"""A user's connection is made again after this; a removed user's is ended at once (`evictions`)."""
REMEMBERED = 100
NAME_MOST = 120
"""Characters of the name that a caller gives itself, for logs and the audit."""
TOLD_MOST = 1_000
"""Refusals logged one by one; then only each hundredth: who knocks a million times fills no disk."""

PresentUsers = Callable[[], Users | tuple[User, ...]]


class Jobs(Protocol):
    """Those whose instances may come in, and those whose instances may not any more."""

    @property
    def going(self) -> Collection[str]: ...

    @property
    def ended(self) -> Collection[str]: ...

    async def news(self) -> None:
        """Returns once another job is known."""


class Reporter(Protocol):
    """A line and its fields."""

    def __call__(self, event: str, **fields: str) -> object: ...


class ConnectionAuthorizer:
    """Decides about connections."""

    def __init__(
        self,
        keys: GuardKeys,
        users: PresentUsers,
        tell: Reporter | None = None,
        *,
        roots: PresentRoots | None = None,
        account: str = ACCOUNT,
        refusals: Refusals | None = None,
        jobs: Jobs | None = None,
        revocations_read: asyncio.Event | None = None,
    ) -> None:
        """`tell` takes the lines about those who were let in; by default they go to the log.
        `refusals`: where who was not is put down for the audit stream. `jobs`: without,
        no instance is let in. `revocations_read`: until it is set, only authorizers are let in; without,
        `users` has all revocations already.

        `account`: where they are put; `roots`: by which credentials are checked, if not those of `keys`.
        """
        self.account = account
        self.granted: Counter[str] = Counter()  # by kind or role
        self.refused: Counter[str] = Counter()  # by the reason's code
        self.reasons: deque[str] = deque(maxlen=REMEMBERED)  # of the last refusals, in words
        self._keys = keys
        self.roots: PresentRoots = roots or (lambda: keys.roots)
        self._users = users
        self._tell: Reporter = tell or log.info
        self._refusals = refusals
        self._jobs = jobs
        self._revocations_read = revocations_read

    @contextlib.asynccontextmanager
    async def at_door(
        self, servers: Sequence[str], name: str, *, patience_s: float = 30.0
    ) -> AsyncIterator[AuthCallout]:
        """Answers the servers until the end of the block.

        Raises:
            BusUnreachable, Refused: as `AuthCallout.running`.
        """
        async with AuthCallout.running(
            servers, self._keys, self, name=name, patience_s=patience_s
        ) as callout:
            self._tell("guarding the bus", service=name)
            yield callout

    def decide(self, caller: Caller) -> ConnectionGrant:
        """
        Raises:
            Refused: the reason, for the log.
            NotKnownYet: an instance's job is not known, or nothing that was revoked is.
        """
        try:
            what, grant = self._decide(caller, time.time())
        except NotKnownYet:
            raise
        except Refused as error:
            self.left_out(caller, error)
            raise
        self.granted[what] += 1
        where = {} if self.account == ACCOUNT else {"account": self.account}
        self._tell(
            "let in", connection=caller.name[:NAME_MOST], host=caller.host, as_=grant.name, what=what, **where
        )
        return grant

    def _decide(self, caller: Caller, now: float) -> tuple[str, ConnectionGrant]:
        if not caller.token:
            raise Refused("no credential and no token", why="nothing")
        if caller.signature:
            checked = self._checked(caller, now)
            identity = checked.identity
            if identity.kind is not EntityKind.AUTHORIZER:  # by whose connection the revocations are read
                self._wait_for_revocations(identity.name)
            self._refuse_ended(checked)
            name = connection_by(identity.name, (checked.root, *checked.ids))
            return identity.kind, ConnectionGrant(
                name, of_identity(identity), checked.expires_at, self.account
            )
        self._wait_for_revocations("who shows a token")
        found = recognise(self._users(), caller.token, now)
        if isinstance(found, UnknownUser):
            why = "user" if found.name else "unknown"
            reason = found.reason if found.name else "neither a credential of this mesh nor a user's token"
            raise Refused(reason, why=why, user=found.name)
        return self._user(found, caller, now)

    def _wait_for_revocations(self, who: str) -> None:
        """
        Raises:
            NotKnownYet: what was revoked has yet to be read.
        """
        if self._revocations_read is not None and not self._revocations_read.is_set():
            raise NotKnownYet(f"{who} waits until what was revoked is known here", why="early")

    def _refuse_ended(self, checked: Checked) -> None:
        """
        Raises:
            Refused: it was revoked, or its job has ended.
            NotKnownYet: it is an instance's of a job that is not known.
        """
        users, who = self._users(), checked.identity
        revoked = users.revoked_credentials if isinstance(users, Users) else {}
        for id in checked.ids:
            if id in revoked:
                why = f": {revoked[id].reason}" if revoked[id].reason else ""
                raise Refused(
                    f"credential {id}, by which {who.name} comes, was revoked by {revoked[id].by}{why}",
                    why="revoked",
                )
        if who.kind is not EntityKind.INSTANCE or who.job == ANY:  # the mesh's owner
            return
        if self._jobs is not None and who.job in self._jobs.ended:
            raise Refused(f"the job of {who.name} has ended, and its credentials with it", why="ended")
        if self._jobs is None or who.job not in self._jobs.going:
            raise NotKnownYet(f"no record of the job of {who.name} is known here", why="job")

    async def news(self, caller: Caller) -> None:
        """Returns once what was revoked is known, or another job."""
        if self._revocations_read is not None and not self._revocations_read.is_set():
            await self._revocations_read.wait()
        elif self._jobs is None:
            await asyncio.Event().wait()
        else:
            await self._jobs.news()

    def _checked(self, caller: Caller, now: float) -> Checked:
        """Of this mesh's root; for a while also of the one before it, for as long as that counts."""
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
        checked = check(caller.token, caller.nonce, caller.signature, root, now)
        expires_at = min(checked.expires_at, int(roots.before_until)) if old else checked.expires_at
        return replace(checked, expires_at=expires_at, root=id_of(root))

    def _user(self, user: User, caller: Caller, now: float) -> tuple[str, ConnectionGrant]:
        inbox = inbox_of_token(caller.token)
        permissions = of_role(user.role, inbox)
        module = module_of(user, caller.name.partition("/")[0], self._names())
        if module is not None:
            permissions = permissions.with_(of_users_module(module, user.name, inbox))
        expires = int(now + USER_CONNECTION_S)
        if user.expires_at is not None:  # with the token, so does the connection
            expires = min(expires, int(user.expires_at))
        return user.role, ConnectionGrant(connection_of(user.name), permissions, expires, self.account)

    def _names(self) -> set[str]:
        users = self._users()
        if not isinstance(users, Users):
            users = Users(listed=users)
        return {*(user.name for user in users.listed), *users.records}

    def knows(self, token: str) -> bool:
        """Whether this is, or was, a token of one of our users."""
        found = recognise(self._users(), token, time.time())
        return isinstance(found, User) or bool(found.name)

    def left_out(self, caller: Caller, error: Refused) -> None:
        """Notes who is not let in, for the log and the audit."""
        self.refused[str(error.fields.get("why", "credential"))] += 1
        self.reasons.append(error.text)
        if self._refusals is not None:
            refusal = refused_connection(caller, error)
            self._refusals.add(refusal, "connection", refusal)
        total = self.refused.total()
        if total <= TOLD_MOST or total % 100 == 0:
            who = {"connection": caller.name[:NAME_MOST], "host": caller.host}
            log.warning("not let in", **who, reason=error.text, refused=total)


def refused_connection(caller: Caller, error: Refused) -> Refusal:
    """As the audit tells it. `user` is a user whose token was shown, and opens nothing any more; the name in
    `resource` is what the caller said."""
    name = plain(caller.name.partition("/")[0])[:NAME_MOST]
    return Refusal(
        user=str(error.fields.get("user", "")),
        action="connect",
        resource=f"{name or 'nameless'} from {caller.host}",
        reason=error.text,
    )


def module_of(user: User, sid: str, users: Collection[str] = ()) -> Identity | None:
    """The functional module that a user may run under this SID: one that bears the user's name, `alice` or
    `alice-…`; an administrator any. A viewer runs none. `users`: the names of all: `alice-smith` is not
    alice's where there is a user of that name."""
    longer = (name for name in users if name != user.name and names.is_users(name, user.name))
    mine = names.is_users(sid, user.name) and not any(names.is_users(sid, name) for name in longer)
    if user.role is Role.VIEWER or not is_token(sid) or not (mine or user.role is Role.ADMIN):
        return None
    if names.taken(sid) is not None:  # not even an administrator's module is called like an entity
        return None
    owner = user.name if user.role is Role.RESEARCHER else ""  # others may change anybody's jobs themselves
    return Identity(name=sid, kind=EntityKind.FUNCTIONAL_MODULE, module=names.module_of(sid), owner=owner)
