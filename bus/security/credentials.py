"""Credentials for the bus: signed identities, from the mesh's root over a node agent to an instance.

Three kinds of text are accepted as the bus's token (`DMSC_BUS_TOKEN`, `--bus-token`, `Bus.connect`):

    dmsc_root_…   the mesh's root: its holder may be anybody (the state folder's `bus_token`)
    dmsc_id_…     a credential: one identity, a chain of signatures from the root to it, and its own key
    …             anything else: a user's token; or, for an unguarded server, a token or `user:password`

A credential is a list of JWTs. The root signs the first; each further one is signed by the key that the one
before names. A node agent hands on credentials to instances of its own node, and the holder of a leave to
join hands them on to agents (`may_hand_on`). No authorizer takes part in that, and only the root's public key
is needed to check a chain. A connection sends the chain and a signature of the server's nonce; a recording of
both can't be used again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from bus.security import nats_jwt, renewal
from bus.security.identity import ANY, CREDENTIAL_PREFIX, ROOT_PREFIX, Identity, is_credential, is_root
from bus.security.kind_keys import KindKeys
from bus.security.nats_jwt import SigningKeys, from_base64, to_base64
from schemas.envelope import EntityKind
from schemas.errors import BadInput, Refused
from schemas.limits import CLOCK_SKEW_S
from schemas.names import agent_name

TYPE = "dmsc-identity"
BETWEEN = "~"
"""The separator between the JWTs of a chain."""
LONGEST_CHAIN = 3
ID_DIGITS = 12
CHAIN_MOST_BYTES = 3_000
"""Most bytes of a chain: the server reads no CONNECT beyond 4 KiB."""
PARSED = 64
"""How many parsed credentials are cached: a process has one for each of its entities."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A chain and the key of its last link."""

    chain: tuple[str, ...]
    keys: SigningKeys
    kind_keys: KindKeys = field(default_factory=KindKeys)
    """Keys to seal and open secrets; empty in credentials that older versions made."""

    @property
    def text(self) -> str:
        body: dict[str, Any] = {"chain": self.chain, "seed": self.keys.seed}
        if self.kind_keys.publics:
            body |= {"opens": self.kind_keys.seeds, "seals": self.kind_keys.publics}
        if self.kind_keys.older:
            body["opened"] = self.kind_keys.older
        return CREDENTIAL_PREFIX + to_base64(json.dumps(body, separators=(",", ":")).encode())

    @property
    def identity(self) -> Identity:
        """The identity that the credential claims, unchecked."""
        return Identity.of_claims(nats_jwt.decode(self.chain[-1]).get("id"))

    @property
    def id(self) -> str:
        """The id of its last link."""
        return id_of(self.chain[-1])

    @property
    def expires_at(self) -> int:
        return int(nats_jwt.decode(self.chain[-1])["exp"])

    @classmethod
    def parse(cls, text: str) -> Credential:
        """The credential that a text holds.

        Raises:
            BadInput: the text is damaged or no credential.
        """
        return _parsed(text)


@lru_cache(maxsize=PARSED)
def _parsed(text: str) -> Credential:
    try:
        body = json.loads(from_base64(text.strip().removeprefix(CREDENTIAL_PREFIX)))
        chain = tuple(str(link) for link in body["chain"])
        keys = SigningKeys(body["seed"])
        kind_keys = KindKeys(*(dict(body.get(name, {})) for name in ("opens", "seals", "opened")))
        if not chain or nats_jwt.decode(chain[-1]).get("sub") != keys.public:
            raise BadInput("its key is another's")
    except (ValueError, KeyError, TypeError, BadInput, Refused):
        raise BadInput("the credential for the bus is damaged: copy all of it") from None
    return Credential(chain, keys, kind_keys)


@dataclass(frozen=True, slots=True)
class Presented:
    """What a client presents to the server: `chain` as the token, and a function that signs the nonce."""

    chain: str
    sign: Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Checked:
    """An identity that a chain proves, until `expires_at` (seconds since the epoch)."""

    identity: Identity
    expires_at: int
    ids: tuple[str, ...] = ()
    """The ids of the chain's credentials, the root's first; revoking one ends all that follow from it."""
    root: str = ""
    """The root's id, with which all connections by its credentials can be ended."""


def new_root() -> str:
    """A new root for a mesh, which is a secret."""
    return ROOT_PREFIX + SigningKeys.account().seed


def root_public(root: str) -> str:
    """The public key of a root, which the authorizer knows."""
    return _root_keys(root).public


def issue(
    root: str,
    identity: Identity,
    *,
    lifetime_s: float = 365 * 86_400.0,
    now: float | None = None,
    before: Sequence[str] = (),
) -> str:
    """A credential that the root signs; it also opens secrets that were sealed under the roots `before`.

    Raises:
        BadInput: `root` is not a root.
    """
    kind_keys = KindKeys.of_root(root).after(*filter(is_root, before)).narrowed(*_opens(identity))
    return _signed((), _root_keys(root), identity, lifetime_s, now, kind_keys).text


def delegate(
    token: str | None,
    identity: Identity,
    *,
    lifetime_s: float = 30 * 86_400.0,
    now: float | None = None,
) -> str | None:
    """A narrower credential made from a wider one: a node agent makes that of an instance, for example.

    A plain token is returned as it is, because an unguarded server knows nothing narrower. By default the
    credential outlives a job, because an instance can't renew it.

    Raises:
        BadInput: `token` is damaged.
        Refused: the holder of `token` may not hand on such a credential.
    """
    token = None if token is None else renewal.present_of(token)
    if token is not None and is_root(token):
        return issue(token, identity, lifetime_s=lifetime_s, now=now)
    if token is None or not is_credential(token):
        return token
    own = Credential.parse(token)
    _may_hand_on(own.identity, identity)
    kind_keys = own.kind_keys.narrowed(*_opens(identity))
    return _signed(own.chain, own.keys, identity, lifetime_s, now, kind_keys).text


def present(token: str, name: str, kind: EntityKind, *, root_lifetime_s: float = 24 * 3600.0) -> Presented:
    """What to present to the server for a root or a credential; `name` and `kind` matter for a root.

    The holder of a root signs a credential for itself at each dial, for `root_lifetime_s`.

    Raises:
        BadInput: `token` is damaged.
    """
    if is_root(token):
        credential = _signed((), _root_keys(token), _as_anybody(name, kind), root_lifetime_s, None)
    else:
        credential = chosen(token, name)
    keys = credential.keys

    def sign(nonce: str) -> bytes:
        return to_base64(keys.sign(nonce.encode())).encode()

    return Presented(BETWEEN.join(credential.chain), sign)


def shown_identity(token: str, name: str, kind: EntityKind) -> Identity:
    """The identity that `present` presents.

    Raises:
        BadInput: `token` is damaged.
    """
    return _as_anybody(name, kind) if is_root(token) else chosen(token, name).identity


def chosen(token: str, name: str) -> Credential:
    """The credential of `name` among several with blanks between them.

    A process with several entities has one credential for each.

    Raises:
        BadInput: there is none for `name`, or it is damaged.
    """
    texts = token.split()
    if len(texts) <= 1:
        return Credential.parse(token)
    for text in texts:
        credential = Credential.parse(text)
        if credential.identity.name == name:
            return credential
    raise BadInput(f"none of the credentials for the bus is for {name}")


def check(chain: str, nonce: str, signature: str, root: str, now: float) -> Checked:
    """Checks a chain and the signature of the server's nonce against the root's public key.

    Raises:
        Refused: something is wrong with them; the text says what, and holds no secret.
    """
    links = chain.split(BETWEEN)
    if len(chain) > CHAIN_MOST_BYTES or len(links) > LONGEST_CHAIN:
        raise Refused("the chain of its credential is too long")
    signer, before, expires = root, None, float("inf")
    for link in links:
        claims = nats_jwt.decode(link)
        if claims["iss"] != signer:
            raise Refused(
                "its credential is not from this mesh, or was put together from several", why="foreign"
            )
        identity, until = _read(claims, now)
        if before is not None:
            _may_hand_on(before, identity)
        signer, before, expires = claims["sub"], identity, min(expires, until)
    assert before is not None
    try:
        signature_bytes = from_base64(signature)
    except (ValueError, TypeError, AttributeError):
        raise Refused("the answer to the server's nonce is unusable") from None
    if not nonce:
        raise Refused("the server sent no nonce")
    try:
        nats_jwt.verify(signer, nonce.encode(), signature_bytes)
    except Refused:
        raise Refused(
            "it does not hold the key of its credential, or answered an older nonce", why="key"
        ) from None
    return Checked(before, int(expires), tuple(map(id_of, links)))


def id_of(link: str) -> str:
    """The id of a credential, or of a root's public key, by which it is revoked or replaced.

    It is a digest, so that nobody can choose it.
    """
    return hashlib.sha256(link.encode()).hexdigest()[:ID_DIGITS]


def root_of(chain: str) -> str:
    """The root's public key that a chain claims, unchecked; `check` verifies the chain.

    Raises:
        Refused: this is no chain.
    """
    if len(chain) > CHAIN_MOST_BYTES:
        raise Refused("the chain of its credential is too long")
    return str(nats_jwt.decode(chain.partition(BETWEEN)[0])["iss"])


def _read(claims: Mapping[str, Any], now: float) -> tuple[Identity, float]:
    issued, until = claims.get("iat"), claims.get("exp")
    if claims.get("type") != TYPE or not isinstance(issued, int) or not isinstance(until, int):
        raise Refused("its credential is not one of identity")
    if not isinstance(claims.get("sub"), str):
        raise Refused("its credential names no key")
    try:
        identity = Identity.of_claims(claims.get("id"))
    except BadInput as error:
        raise Refused(f"its credential is unusable: {error.text}") from None
    if until <= now:
        raise Refused(f"the credential of {identity.name} has expired", why="expired")
    if issued > now + CLOCK_SKEW_S:
        raise Refused(f"the credential of {identity.name} is not valid yet; compare the clocks")
    return identity, until


def _may_hand_on(giver: Identity, receiver: Identity) -> None:
    """Refuses a handing on that `may_hand_on` does not allow.

    Raises:
        Refused: it is not allowed.
    """
    if not may_hand_on(giver, receiver):
        raise Refused(
            f"{giver.kind} {giver.name} may not give a credential to {receiver.kind} {receiver.name}"
        )


def may_hand_on(giver: Identity, receiver: Identity) -> bool:
    """Whether the identity `giver` may hand on a credential to `receiver`.

    A node agent may for instances of its own node. A leave to join with any node of a cluster may for agents
    of that cluster; a leave to join with any cluster also for gateways and routers. Nobody else may.
    """
    if giver.kind is not EntityKind.CLUSTER or not receiver.is_narrow:
        return False
    if giver.cluster not in (ANY, receiver.cluster):
        return False
    if giver.node != ANY:
        return receiver.kind is EntityKind.INSTANCE and giver.is_narrow and giver.node == receiver.node
    if receiver.kind is EntityKind.CLUSTER:
        return receiver.name == agent_name(receiver.cluster, receiver.node)
    is_entry = receiver.kind in (EntityKind.GATEWAY, EntityKind.ROUTER)
    return is_entry and giver.cluster == ANY and receiver.name == f"{receiver.kind}-{receiver.cluster}"


def _opens(identity: Identity) -> tuple[EntityKind, ...]:
    """The kinds whose secrets a credential opens: its own kind, or gateways for one that may make theirs."""
    if identity.kind is EntityKind.CLUSTER and identity.cluster == ANY:
        return (EntityKind.GATEWAY,)
    return (identity.kind,)


def _signed(
    chain: Sequence[str],
    keys: SigningKeys,
    identity: Identity,
    lifetime_s: float,
    now: float | None,
    kind_keys: KindKeys | None = None,
) -> Credential:
    at = time.time() if now is None else now
    own = SigningKeys.user()
    link = nats_jwt.encode(
        {
            "type": TYPE,
            "iss": keys.public,
            "sub": own.public,
            "iat": int(at),
            "exp": int(at + lifetime_s),
            "id": identity.claims(),
        },
        keys,
    )
    return Credential((*chain, link), own, kind_keys or KindKeys())


def _root_keys(root: str) -> SigningKeys:
    if not is_root(root):
        raise BadInput("not the root of a mesh")
    return SigningKeys(root.strip().removeprefix(ROOT_PREFIX))


def _as_anybody(name: str, kind: EntityKind) -> Identity:
    """The identity of a mesh's owner: a tool or an entity of no particular cluster or job."""
    special: dict[EntityKind, dict[str, Any]] = {
        EntityKind.GATEWAY: {"cluster": ANY},
        EntityKind.ROUTER: {"cluster": ANY},
        EntityKind.CLUSTER: {"cluster": ANY, "node": ANY},
        EntityKind.INSTANCE: {"cluster": ANY, "node": ANY, "job": ANY},
        EntityKind.FUNCTIONAL_MODULE: {"module": ANY},
    }
    return Identity(name=name, kind=kind, **special.get(kind, {}))
