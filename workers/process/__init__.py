"""Processes of a job on a node: the fork server that starts them, and how a child begins (DESIGN §6).

It decides how a process is started (fork or spawn), under which user and with which confinement, and what it
may open. Node agents talk to the fork server over a socket; the server imports `instance` and `tasks` for its
children. It never uses the bus and never starts a thread or a device before a fork.

- `fork_server`: imports torch once, then forks children on orders of the node agent.
- `incubator`: a preloaded process that forks fork servers in milliseconds (ADR-0030).
- `child_process`: a child from its start to the `main` of its module.
- `url_rules`: which URLs of a job the process may open (ADR-0035).
"""
