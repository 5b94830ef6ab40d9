"""Chains of identity: what holds, what does not, and what is said then."""

from __future__ import annotations

import time

import pytest

from bus.security import nats_jwt
from bus.security.credentials import (
    BETWEEN,
    Credential,
    check,
    delegate,
    issue,
    new_root,
    present,
    root_public,
)
from bus.security.identity import Identity
from bus.security.nats_jwt import SealingKeys, SigningKeys
from dmsc.state import identities
from schemas.envelope import EntityKind as K
from schemas.errors import BadInput, Refused

AGENT = Identity(name="a-n", kind=K.CLUSTER, cluster="a", node="n")
INSTANCE = Identity(name="j-s0-r0", kind=K.INSTANCE, cluster="a", node="n", job="j")
NOW = 1_000_000.0


def test_a_chain_proves_its_last_identity_until_its_first_end() -> None:
    root = new_root()
    token = delegate(issue(root, AGENT, lifetime_s=50.0, now=NOW), INSTANCE, lifetime_s=100.0, now=NOW)
    assert token is not None
    shown = present(token, "j-s0-r0", K.INSTANCE)
    checked = check(shown.chain, "nonce", shown.sign("nonce").decode(), root_public(root), NOW)
    assert checked.identity == INSTANCE
    assert checked.expires_at == NOW + 50
    for nonce, now, why in (("another", NOW, "key"), ("", NOW, "nonce"), ("nonce", NOW + 51, "expired")):
        with pytest.raises(Refused, match=why):
            check(shown.chain, nonce, shown.sign("nonce").decode(), root_public(root), now)
    with pytest.raises(Refused, match="not from this mesh"):
        check(shown.chain, "nonce", shown.sign("nonce").decode(), root_public(new_root()), NOW)
    one = shown.chain.split(BETWEEN)[1]
    with pytest.raises(Refused, match="not from this mesh"):
        check(one, "nonce", shown.sign("nonce").decode(), root_public(root), NOW)


def test_a_damaged_credential_is_one_clear_line_and_none_of_its_text() -> None:
    token = issue(new_root(), AGENT)
    for text in (token[:-9], token + "xx", "dmsc_id_", "dmsc_id_e30"):
        with pytest.raises(BadInput, match=r"^the credential for the bus is damaged: copy all of it$"):
            Credential.parse(text)
    with pytest.raises(BadInput, match="not the seed of a key"):
        SigningKeys("SU" + "A" * 56)


def test_a_process_of_several_entities_shows_each_ones_own() -> None:
    root = new_root()
    services = identities.entities(("orchestrator", "gateway"), ("a", "b"))
    both = identities.own(root, services)
    assert both is not None
    for one in services:
        shown = present(both, one.name, one.kind)
        now = check(shown.chain, "n", shown.sign("n").decode(), root_public(root), time.time())
        assert now.identity == one
    with pytest.raises(BadInput, match="none of the credentials for the bus is for router-a"):
        present(both, "router-a", K.ROUTER)


def test_an_authorizer_of_a_chosen_name_is_still_called_like_one() -> None:
    (second,) = identities.entities(("authorizer",), (), identities.CalledEntities(authorizer="authorizer-2"))
    assert second.name == "authorizer-2"
    with pytest.raises(BadInput, match=r"^--name 'aam': authorizers are called authorizer or authorizer-…"):
        identities.entities(("authorizer",), (), identities.CalledEntities(authorizer="aam"))


def test_leave_to_join_is_narrowed_to_who_joins() -> None:
    leave = issue(new_root(), Identity(name="join-a", kind=K.CLUSTER, cluster="a", node="*"))
    own = identities.own(leave, (AGENT,))
    assert own is not None
    assert Credential.parse(own).identity == AGENT
    assert identities.own(own, (AGENT,)) == own
    with pytest.raises(BadInput, match=r"that of cluster join-a, and this is b-n: make one with"):
        identities.own(leave, (identities.agent("b", "n"),))


def test_a_plain_token_is_handed_on_as_it_is() -> None:
    assert delegate("secret", INSTANCE) == "secret"
    assert delegate(None, INSTANCE) is None
    assert identities.own("dmsc:secret", (AGENT,)) == "dmsc:secret"


@pytest.mark.parametrize("name", ["", "a.b", "*", ">", "a b", "a\n", "ä", "x" * 121])
def test_no_name_stands_for_more_than_one(name: str) -> None:
    with pytest.raises(BadInput, match="is not one token"):
        Identity(name=name, kind=K.CLIENT)


def test_a_modules_name_is_read_from_its_file(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text('class One(Policy):\n    name = "bold"\nraise SystemExit\n')
    assert identities.module(str(file)).module == "bold"
    assert identities.module(f"{file}:One").module == "bold"
    assert identities.module("transience").module == "transience"
    file.write_text('class One(Policy):\n    name = "bo" + "ld"\n')
    assert identities.module(str(file)).module == "*"


def test_seals_open_for_the_receiver_alone() -> None:
    server, aam, other = SealingKeys.generate(), SealingKeys.generate(), SealingKeys.generate()
    sealed = server.seal(b"question", aam.public)
    assert aam.open(sealed, server.public) == b"question"
    for keys, data in ((other, sealed), (aam, b"xkv1short"), (aam, b"question")):
        with pytest.raises(Refused):
            keys.open(data, server.public)


def test_signed_claims_are_read_as_written() -> None:
    keys = SigningKeys.user()
    token = nats_jwt.encode({"iss": keys.public, "a": 1}, keys)
    assert nats_jwt.decode(token)["a"] == 1
    head, body, signature = token.split(".")
    for bad in (f"{head}.{body}.{signature[:-4]}AAAA", f"{head}.{body}x.{signature}", "a.b", ""):
        with pytest.raises(Refused):
            nats_jwt.decode(bad)
