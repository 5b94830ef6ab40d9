"""Secrets in messages: opened by who they are for, where they were put, and nowhere else."""

from __future__ import annotations

import msgpack
import pytest

from bus import subjects
from bus.security.credentials import delegate, issue, new_root
from bus.security.identity import ANY, Identity
from bus.security.kind_keys import KINDS, KindKeys
from bus.security.sealing import Keyring, Unsealable, is_sealed, secrets_of
from bus.wire import codec
from schemas.base import MESSAGE_TYPES
from schemas.cluster import LinkSecret
from schemas.envelope import EntityKind as K
from schemas.envelope import Sender
from schemas.errors import BadMessage
from schemas.gateway_api import DoorRequest
from schemas.signals import AccessRequest

ROOT = new_root()
GATEWAY = Identity(name="gateway-a", kind=K.GATEWAY, cluster="a")
AGENT = Identity(name="a-n", kind=K.CLUSTER, cluster="a", node="n")
SENDER = codec.sender_map(Sender(name="script", kind=K.CLIENT, incarnation="1"))
TOKEN = "the token of somebody"


def ring(identity: Identity, root: str = ROOT) -> Keyring:
    return Keyring.of_token(issue(root, identity), identity.name)


def of(kind: K, root: str = ROOT) -> Keyring:
    return ring(Identity(name=str(kind), kind=kind, **({"cluster": "a"} if kind is K.GATEWAY else {})), root)


def said(keyring: Keyring, message: DoorRequest, id: str = "1-1") -> bytes:
    return codec.encode(keyring.sealed(subjects.DOOR, message, id, keyring.of_kind(K.GATEWAY)), SENDER, id)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_opens_what_anybody_seals_to_it(kind: K) -> None:
    for sealer in (ring(AGENT), of(K.ORCHESTRATOR), Keyring(KindKeys.of_root(ROOT))):
        sealed = sealer.seal(TOKEN, sealer.of_kind(kind), b"here")
        assert is_sealed(sealed)
        assert TOKEN not in sealed
        assert of(kind).open(sealed, b"here") == TOKEN


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_else_opens_it(kind: K) -> None:
    sealed = of(kind).seal(TOKEN, of(kind).of_kind(kind), b"here")
    others = [of(other) for other in KINDS if other is not kind]
    for stranger in (*others, ring(AGENT), of(kind, new_root()), Keyring()):
        with pytest.raises(Unsealable):
            stranger.open(sealed, b"here")
    with pytest.raises(Unsealable, match="another message"):
        of(kind).open(sealed, b"there")


def test_a_process_has_a_pair_of_its_own() -> None:
    mine, namesake = of(K.GATEWAY), of(K.GATEWAY)
    sealed = namesake.seal(TOKEN, mine.public, b"x")
    assert mine.open(sealed, b"x") == TOKEN
    with pytest.raises(Unsealable):
        namesake.open(sealed, b"x")


def test_a_credential_opens_for_its_own_kind_and_hands_no_more_on() -> None:
    join = issue(ROOT, Identity(name="join", kind=K.CLUSTER, cluster=ANY, node=ANY))
    gateway = delegate(join, Identity(name="gateway-a", kind=K.GATEWAY, cluster="a"))
    assert gateway is not None
    owner = Keyring(KindKeys.of_root(ROOT))
    for_gateways = owner.seal(TOKEN, owner.of_kind(K.GATEWAY), b"")
    assert Keyring.of_token(gateway, "gateway-a").open(for_gateways, b"") == TOKEN
    narrow = delegate(join, AGENT)
    assert narrow is not None
    with pytest.raises(Unsealable):
        Keyring.of_token(narrow, "a-n").open(for_gateways, b"")
    instance = delegate(narrow, Identity(name="j-s0", kind=K.INSTANCE, job="j", cluster="a", node="n"))
    assert instance is not None
    assert Keyring.of_token(instance, "j-s0").of_kind(K.ORCHESTRATOR) == owner.of_kind(K.ORCHESTRATOR)
    with pytest.raises(Unsealable):
        Keyring.of_token(instance, "j-s0").open(for_gateways, b"")


def test_a_request_arrives_as_it_was_and_shows_nothing_on_its_way() -> None:
    request = DoorRequest(token=TOKEN, action="job.read", job="j")
    data = said(ring(AGENT), request)
    assert TOKEN.encode() not in data
    opened, _ = codec.decode(of(K.GATEWAY).opened(subjects.DOOR, data), DoorRequest)
    assert opened == request
    plain = codec.encode(request, SENDER, "1-1")
    assert of(K.GATEWAY).opened(subjects.DOOR, plain) == plain


def test_an_overheard_token_opens_nothing_in_another_message() -> None:
    overheard = msgpack.unpackb(said(ring(AGENT), DoorRequest(token=TOKEN, action="job.read", job="j")))
    gateway = of(K.GATEWAY)
    for change in ({"action": "job.cancel"}, {"job": "k"}):
        body = {**overheard["body"], **change}
        with pytest.raises(Unsealable):
            gateway.opened(subjects.DOOR, msgpack.packb({**overheard, "body": body}))
    with pytest.raises(Unsealable):
        gateway.opened(subjects.DOOR, msgpack.packb({**overheard, "id": "2-1"}))
    with pytest.raises(Unsealable):  # Type 3's schema has a token, too
        of(K.AUTHORIZER).opened(subjects.ACCESS, msgpack.packb(overheard))
    assert gateway.opened(subjects.DOOR, msgpack.packb(overheard))


def test_damaged_seals_and_keys_are_one_line_each() -> None:
    gateway = of(K.GATEWAY)
    sealed = gateway.seal(TOKEN, gateway.of_kind(K.GATEWAY), b"")
    for wrong in (sealed[:-4], sealed[:40], "sealed1.", "sealed1.?", sealed.replace("A", "B")):
        with pytest.raises(BadMessage):
            gateway.open(wrong, b"x")
    for key in ("", "zz", "ab", "00" * 31):
        with pytest.raises(BadMessage):
            gateway.seal(TOKEN, key, b"")


def test_every_secret_of_every_message_has_somebody_to_be_sealed_to() -> None:
    """A new field that is marked secret is a request's, whose receiver has a key, or is sealed by hand."""
    by_hand = {
        LinkSecret.wire_type,  # kept sealed
        "service.pseudonym_key",  # likewise
        "access.user.answer",  # told within a `SealedAnswer`
        "mesh.unreadable_value",  # bytes of buckets' values, in which secrets are sealed already
    }
    requests = {
        row.schema.wire_type
        for row in subjects.SUBJECTS
        if row.reply is not None and (set(row.receivers) <= {*KINDS, K.CLUSTER})
    }
    marked = {name for name, cls in MESSAGE_TYPES.items() if "." in name and secrets_of(cls)}
    assert AccessRequest.wire_type in marked
    assert marked <= requests | by_hand
