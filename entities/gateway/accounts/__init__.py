"""Statements of what was used and what it costs, and who was answered, at the gateways (docs/accounts.md).

`operations` says who may ask for whose statement; the routes are in `entities.gateway.http.routes.accounts`.
The accountant makes the statements. It is told by `use_reports` how many tokens this gateway gave each user
(`use_meter`, pure).
"""
