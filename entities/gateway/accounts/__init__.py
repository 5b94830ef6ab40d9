"""Statements of what was used and what it costs, at the gateways (docs/accounts.md).

`operations` says who may ask for whose, `routes` are the paths below `/v1/accounts`. The accountant makes the
statements; nothing is counted here.
"""
