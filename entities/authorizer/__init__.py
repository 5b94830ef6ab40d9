"""AAM, authentication and authorization module (draft §3, §4.3 Type 3; ADR-0022).

It decides who a token or credential belongs to, whether that user may do an action on a resource, and who may
connect to the bus and to which subjects. It records refusals and privileged acts on the audit stream.
Gateways send it Type 3 requests; the bus's servers ask it about connections (auth callout). `dmsc.launch` and
`dmsc.process` start it. It never logs or keeps a token, and never permits a privileged act without a record.

- `service`: the entity: answers Type 3 requests and user commands
- `guard_service`: answers the servers about connections, for one mesh
- `tenant_guard`: the same for a server that several meshes share
- `disconnection`: closes connections at the servers
- `access`: users, tokens and rules; `connections`: decisions on connections
- `users`: records of users; `audit`: the audit trail
"""

from entities.authorizer.guard_service import guarding
from entities.authorizer.service import Authorizer, AuthorizerConfig

__all__ = ["Authorizer", "AuthorizerConfig", "guarding"]
