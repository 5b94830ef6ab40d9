"""The keys of the AAM as the server's guard, and the lines of a server's configuration that follow from them.

The server asks the AAM about every connection (NATS auth callout) and believes what is signed with the
issuer's key; in its configuration stand public keys alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from bus.accounts import ALONE, Account, account_lines, system_exports
from bus.credentials import root_public
from bus.departures import SYSTEM_ACCOUNT
from bus.nats_jwt import SealingKeys, SigningKeys
from bus.roots import Roots
from schemas.errors import BadInput

GUARD_ACCOUNT = "AUTH"
ANSWER_S = 1.0
"""How long the server waits for the AAM's word; then the connection is refused, and dialled again."""


@dataclass(frozen=True)
class GuardKeys:
    """Secrets of AAM processes alone, but for `root`, the public key that checks credentials. It is empty
    on a server of several meshes: each has its own root.

    `issuer` signs what the server believes; `sealing` opens its questions; `guard` and `system` are users of
    the accounts in which questions are answered and connections are ended. The rest is as in `Roots`.
    """

    root: str
    issuer: str
    sealing: str
    guard: str
    system: str
    before: str = ""
    before_until: float = 0.0
    grace_until: float = 0.0
    handed_over: float = 0.0

    @classmethod
    def generate(cls, root: str | None) -> GuardKeys:
        """For the mesh of this root; None: for a server of several."""
        return cls(
            root="" if root is None else root_public(root),
            issuer=SigningKeys.account().seed,
            sealing=SealingKeys.generate().seed,
            guard=SigningKeys.user().seed,
            system=SigningKeys.user().seed,
        )

    @property
    def roots(self) -> Roots:
        return Roots(**{name: getattr(self, name) for name in Roots.__slots__})

    def with_roots(self, roots: Roots, *, fresh: bool = False) -> GuardKeys:
        """The same for these roots. `fresh`: new keys, which the server knows only after a restart."""
        keys = GuardKeys.generate(None) if fresh else self
        return replace(keys, **asdict(roots))

    @cached_property
    def issuer_keys(self) -> SigningKeys:
        return SigningKeys(self.issuer)

    @cached_property
    def sealing_keys(self) -> SealingKeys:
        return SealingKeys(self.sealing)

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> GuardKeys:
        """
        Raises:
            BadInput: the file is missing, or not one of these.
        """
        try:
            keys = cls(**json.loads(path.read_text(encoding="utf-8")))
            keys.issuer_keys, keys.sealing_keys  # noqa: B018  # damaged ones are told here
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}; it holds the authorizer's keys") from None
        except (ValueError, TypeError, AttributeError, BadInput):
            raise BadInput(f"{path}: not the authorizer's keys") from None
        return keys


def guarded_clause(keys: GuardKeys, accounts: Sequence[Account] = ALONE, copies: int = 1) -> list[str]:
    """The lines of a server's configuration that hand every connection to the AAM, which puts it into one of
    these accounts; `copies` as for `account_lines`."""
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
        f"  timeout: {ANSWER_S:g}",
        "  auth_callout {",
        f"    account: {GUARD_ACCOUNT}",
        f"    issuer: {keys.issuer_keys.public}",
        f"    auth_users: [{guard}, {system}]",
        f"    xkey: {keys.sealing_keys.public}",
        "  }",
        "}",
    ]
