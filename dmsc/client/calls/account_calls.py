"""Requests about what was used and what it costs."""

from __future__ import annotations

from dmsc.client.gateway_requests import Gateways
from schemas.accounts import AccountKey, AccountStatement


class AccountCalls:
    """A part of `AsyncClient`."""

    _gateways: Gateways

    async def accounts(
        self,
        by: AccountKey = "job",
        *,
        since: float | None = None,
        until: float | None = None,
        user: str | None = None,
        service: str | None = None,
        everybody: bool | None = None,
    ) -> AccountStatement:
        """Device-seconds by kind, energy, carbon and price, by job, user, tenant or service.

        `since` (a day ago) and `until` (now) are seconds since the epoch. With `service`, of its versions
        alone; their work is in the accounts of those whom they answered. Operators get all accounts, others
        their own, unless `user` or `everybody` says otherwise. Raises `BadInput` for a period that is none,
        and `Refused` for an account that the user may not see.
        """
        given = {"by": by, "since": since, "until": until, "user": user, "service": service}
        params = {name: value for name, value in given.items() if value is not None}
        if everybody is not None:
            params["all"] = "true" if everybody else "false"
        return await self._gateways.ask_for(AccountStatement, "GET", "/v1/accounts", params=params)
