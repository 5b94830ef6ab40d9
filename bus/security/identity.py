"""Identities: who is on the other end of a connection, as credentials say it and permissions need it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from schemas import names
from schemas.base import is_token
from schemas.envelope import EntityKind
from schemas.errors import BadInput

ROOT_PREFIX, CREDENTIAL_PREFIX = "dmsc_root_", "dmsc_id_"
"""The beginnings of the texts of `bus.security.credentials`."""
CONTROL_PLANE = frozenset(
    (
        *(EntityKind.SERVICE_REGISTRY, EntityKind.GATEWAY, EntityKind.AUTHORIZER),
        *(
            EntityKind.ROUTER,
            EntityKind.ORCHESTRATOR,
            EntityKind.BROKER,
            EntityKind.ACCOUNTANT,
            EntityKind.MODEL_REGISTRY,
            EntityKind.PROVISIONER,
        ),
    )
)
ANY = "*"
"""In an identity, stands for every job, cluster, node or module: a mesh's owner has it. Never handed on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """An entity, an instance, a functional module or a tool; its fields fill the tokens of the table's rows.

    `name` is the SID. `job` belongs to instances, `cluster` to all members of a cluster, `node` to agents and
    instances, `module` to functional modules. `jobs` are the jobs whose instances' stores a module may query:
    all by default, as for the mesh's own modules; none for a user's module, for which a broker queries.
    `owner` is the user whose jobs alone a module makes suggestions for; no credential has one, because
    credentials are for the mesh's own modules.
    """

    name: str
    kind: EntityKind
    cluster: str = ""
    node: str = ""
    job: str = ""
    module: str = ""
    jobs: tuple[str, ...] = (ANY,)
    owner: str = ""

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            BadInput: a field is not one token (`a.b`, `*` and `>` would mean more than one name), a field is
                missing, or the name belongs to somebody else.
        """
        if not is_token(self.name):
            raise BadInput(f"name {self.name!r} is not one token (letters, digits, _, -)")
        for key in ("cluster", "node", "job", "module", "owner"):
            value = getattr(self, key)
            if value not in ("", ANY) and not is_token(value):
                raise BadInput(f"{key} {value!r} is not one token (letters, digits, _, -)")
        for job in self.jobs:
            if job != ANY and not is_token(job):
                raise BadInput(f"job {job!r} is not one token (letters, digits, _, -)")
        if self.kind is EntityKind.INSTANCE and not (self.job and self.cluster):
            raise BadInput(f"instance {self.name} needs its job and its cluster")
        if self.kind is EntityKind.FUNCTIONAL_MODULE and not self.module:
            raise BadInput(f"functional module {self.name} needs its module's name")
        if self.kind is EntityKind.CLUSTER and not (self.cluster and self.node):
            raise BadInput(f"node agent {self.name} needs its cluster and its node")
        if (why := self._misnamed()) is not None:
            raise BadInput(why)

    def _misnamed(self) -> str | None:
        """Why the name belongs to somebody else (`schemas.names`), or None; `*` stands for any."""
        if self.kind is EntityKind.INSTANCE:
            if self.job == ANY:
                return None
            if self.job != names.job_of(self.name) or self.name == self.job:
                return f"instance {self.name} is not called as those of job {self.job} are: {self.job}-…"
            why = names.reserved(self.name)
            return None if why is None else f"instance {self.name}: {why}"
        if self.cluster not in ("", ANY) and (why := names.misplaced(self.cluster, self.node)) is not None:
            return why
        leave_to_join = self.kind is EntityKind.CLUSTER and self.node == ANY
        if self.kind in CONTROL_PLANE or leave_to_join:
            return None
        if (why := names.taken(self.name)) is not None:
            return f"{self.kind} {self.name}: {why}"
        return None

    @property
    def is_narrow(self) -> bool:
        """Whether no field stands for several jobs, clusters, nodes or modules."""
        return ANY not in (self.cluster, self.node, self.job, self.module)

    def claims(self) -> dict[str, str]:
        """The form that a credential carries."""
        fields = asdict(self)
        jobs = fields.pop("jobs")
        narrowed = {} if jobs == (ANY,) else {"jobs": ",".join(jobs)}
        return {key: str(value) for key, value in fields.items() if value} | narrowed

    @classmethod
    def of_claims(cls, claims: Any) -> Identity:
        """The identity in the claims of a credential.

        Raises:
            BadInput: this is no identity.
        """
        if not isinstance(claims, dict):
            raise BadInput("not an identity")
        known = {"name", "kind", "cluster", "node", "job", "module"}
        try:
            fields: dict[str, Any] = {key: value for key, value in claims.items() if key in known}
            if "jobs" in claims:
                fields["jobs"] = tuple(filter(None, claims["jobs"].split(",")))
            return cls(**{**fields, "kind": EntityKind(fields.get("kind", ""))})
        except (TypeError, ValueError, AttributeError):
            raise BadInput("not an identity") from None


def is_root(token: str | None) -> bool:
    return token is not None and token.startswith(ROOT_PREFIX)


def is_credential(token: str | None) -> bool:
    return token is not None and token.startswith(CREDENTIAL_PREFIX)
