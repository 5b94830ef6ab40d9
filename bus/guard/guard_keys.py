"""The AAM's keys for the server's auth callout, and the lines of a server's configuration that use them.

The server asks the AAM about every connection (NATS auth callout) and trusts answers that are signed with the
issuer's key. Its configuration contains public keys only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from bus.guard.accounts import ALONE, NatsAccount, account_lines, system_exports
from bus.messaging.disconnects import SYSTEM_ACCOUNT
from bus.security.credentials import root_public
from bus.security.nats_jwt import SealingKeys, SigningKeys
from bus.security.trust_roots import TrustRoots
from schemas.errors import BadInput
from schemas.limits import CALLOUT_ANSWER_S

GUARD_ACCOUNT = "AUTH"


@dataclass(frozen=True)
class GuardKeys:
    """The keys of AAM processes, which nobody else may know, except `roots`.

    `roots` are the public keys by which credentials are checked; on a server of several meshes they are
    empty, because each mesh has its own. `issuer` signs answers to the server; `sealing` decrypts its
    requests; `guard` and `system` are users of the accounts in which requests are answered and connections
    are ended.
    """

    roots: TrustRoots
    issuer: str
    sealing: str
    guard: str
    system: str

    @classmethod
    def generate(cls, root: str | None) -> GuardKeys:
        """New keys for the mesh of this root, or, with None, for a server of several meshes."""
        return cls(
            roots=TrustRoots(root="" if root is None else root_public(root)),
            issuer=SigningKeys.account().seed,
            sealing=SealingKeys.generate().seed,
            guard=SigningKeys.user().seed,
            system=SigningKeys.user().seed,
        )

    def with_roots(self, roots: TrustRoots, *, fresh: bool = False) -> GuardKeys:
        """The same keys with these roots; with `fresh`, new keys, which the server knows after a restart."""
        return replace(GuardKeys.generate(None) if fresh else self, roots=roots)

    @cached_property
    def issuer_keys(self) -> SigningKeys:
        return SigningKeys(self.issuer)

    @cached_property
    def sealing_keys(self) -> SealingKeys:
        return SealingKeys(self.sealing)

    def text(self) -> str:
        """The content of the keys' file: roots and keys in one JSON object."""
        body = asdict(self)
        return json.dumps({**body.pop("roots"), **body}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> GuardKeys:
        """The keys in a file.

        Raises:
            BadInput: the file is missing, or does not hold such keys.
        """
        try:
            text = path.read_text(encoding="utf-8")
            body = json.loads(text)
            own = {name: body[name] for name in body.keys() - TrustRoots.__slots__}
            keys = cls(roots=TrustRoots.parse(text, str(path)), **own)
            keys.issuer_keys, keys.sealing_keys  # noqa: B018  # raises here if they are damaged
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}; it holds the authorizer's keys") from None
        except (ValueError, TypeError, AttributeError, BadInput):
            raise BadInput(f"{path}: not the authorizer's keys") from None
        return keys


def guarded_clause(keys: GuardKeys, accounts: Sequence[NatsAccount] = ALONE, copies: int = 1) -> list[str]:
    """The lines of a server's configuration that hand every new connection to the AAM.

    The AAM puts each connection into one of these accounts; `copies` is as for `account_lines`.
    """
    guard, system = SigningKeys(keys.guard).public, SigningKeys(keys.system).public
    return [
        "accounts {",
        *account_lines(accounts, copies),
        f"  {GUARD_ACCOUNT} {{ users: [{{nkey: {guard}}}] }}",
        f"  {SYSTEM_ACCOUNT} {{",
        f"    users: [{{nkey: {system}}}]",
        f"    exports: [{system_exports(accounts)}]",
        "  }",
        "}",
        f"system_account: {SYSTEM_ACCOUNT}",
        "authorization {",
        f"  timeout: {CALLOUT_ANSWER_S:g}",
        "  auth_callout {",
        f"    account: {GUARD_ACCOUNT}",
        f"    issuer: {keys.issuer_keys.public}",
        f"    auth_users: [{guard}, {system}]",
        f"    xkey: {keys.sealing_keys.public}",
        "  }",
        "}",
    ]
