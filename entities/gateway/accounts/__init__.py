"""Statements of what was used and what it costs, at the gateways (docs/accounts.md).

`operations` says who may ask for whose; the routes are in `entities.gateway.http.routes.accounts`. The
accountant makes the statements; nothing is counted here.
"""
