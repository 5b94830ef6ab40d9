"""Who may connect to the bus, and whose connections end (ADR-0022, ADR-0039).

It decides on each connection that a server asks about (auth callout): accept it with which permissions, or
refuse it. It closes connections of revoked credentials, of revoked users and of ended jobs.
`entities.authorizer.guard_service` and `entities.authorizer.tenant_guard` put its parts together.
It never decides on single requests: Type 3 and the servers' permissions do.

- `connection_authorizer`: decides on a connection
- `expulsions`: closes connections that are no longer allowed
- `job_states`: which jobs run and which have ended
- `roots_file`: which root credentials count, during a rotation
"""
