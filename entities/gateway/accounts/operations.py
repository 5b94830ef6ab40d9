"""Who may ask for which statement: everybody for their own, operators for all."""

from __future__ import annotations

from bus import subjects
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.operation import Operation
from schemas.accounts import AccountKey, AccountQuery, AccountStatement
from schemas.signals import AccessDecision

ALL = "accounts/all"
"""The resource that stands for all accounts; no user is called so."""


class AccountOperations:
    """What clients may ask of the accounts. `query_s`: the limit of one question."""

    def __init__(self, backends: Backends, query_s: float = 20.0) -> None:
        self._backends = backends
        self._query_s = query_s

    def statement(
        self, by: AccountKey, since: float, until: float, user: str | None, service: str | None = None
    ) -> Operation[AccountStatement]:
        """What was used from `since` to `until`; with `user`, by that user, with `service`, of it alone.

        Raises:
            BadInput: the period is none, or too long.
            Unavailable: no accountant runs.
        """

        async def act(_: AccessDecision) -> AccountStatement:
            question = AccountQuery(by=by, since=since, until=until, user=user, service=service)
            return await self._backends.command(subjects.ACCOUNT_QUERY, question, deadline_s=self._query_s)

        return Operation("account.read", user or ALL, act)
