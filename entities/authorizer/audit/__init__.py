"""The audit trail: a hash chain of refusals and privileged acts on the stream `AUDIT` (`schemas.audit`).

It decides which refusals get a record of their own, which are only counted, and whether an act may go on
although the archive lags. `entities.authorizer.service` records acts and refused requests, the connection
authorizers refused connections. It never deletes a record, and never delays an answer for a refusal's record.

- `audit_trail`: writes the chain
- `audit_archive`: copies the chain to files with a signed head
- `refusals`: refusals that wait to be written
- `rate_limited_records`: limits records per group and window, pure
"""
