"""Tokens that expire: signed by one key in one way, held against PyJWT; expired, revoked and foreign ones."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import SigningKey

from entities.authorizer.access import user_tokens
from entities.authorizer.access.authentication import UnknownUser, User, Users, recognise
from entities.authorizer.access.user_tokens import Claims, TokenRefused, issue, load_key, read
from schemas.access import Revocation, UserRecord
from schemas.errors import BadInput
from schemas.signals import Role

KEY = SigningKey(bytes(range(32)))
NOW = 1_000_000.0
CLAIMS = Claims(subject="ruth", id="t1", issued_at=NOW, expires_at=NOW + 60)
TOKEN = issue(KEY, CLAIMS)
RUTH = UserRecord(name="ruth", role=Role.RESEARCHER, created_at=NOW, created_by="admin")


def users(*revocations: Revocation, known: bool = True) -> Users:
    return Users(
        records={"ruth": RUTH} if known else {},
        revoked_tokens={one.id: one for one in revocations if one.kind == "token"},
        revoked_users={one.id: one for one in revocations if one.kind == "user"},
        key=KEY.verify_key,
    )


def why(found: User | UnknownUser) -> str:
    assert isinstance(found, UnknownUser)
    assert "\n" not in found.reason
    assert TOKEN not in found.reason
    return found.reason


def test_a_token_is_read_as_it_was_issued_and_any_library_reads_it_too() -> None:
    assert read(KEY.verify_key, TOKEN, NOW + 1) == CLAIMS
    jwt = pytest.importorskip("jwt", reason="PyJWT is not installed")
    public = ed25519.Ed25519PublicKey.from_public_bytes(bytes(KEY.verify_key)).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    lenient = {"verify_exp": False, "verify_iat": False}
    said = jwt.decode(TOKEN, public, algorithms=["EdDSA"], issuer="dmsc", options=lenient)
    assert said == {"iss": "dmsc", "sub": "ruth", "jti": "t1", "iat": NOW, "exp": NOW + 60}


def test_who_it_is_comes_from_the_record_and_not_from_the_token() -> None:
    found = recognise(users(), TOKEN, NOW + 1)
    assert isinstance(found, User)
    assert (found.name, found.role, found.token_id) == ("ruth", Role.RESEARCHER, "t1")


def test_an_expired_token() -> None:
    assert why(recognise(users(), TOKEN, NOW + 60)) == "this token of ruth has expired; ask for a new one"


def test_a_revoked_token_and_a_revoked_user() -> None:
    one = Revocation(kind="token", id="t1", user="ruth", at=NOW + 1, by="olga", reason="laptop lost")
    assert why(recognise(users(one), TOKEN, NOW + 2)) == (
        "this token of ruth was revoked by olga (laptop lost); ask for a new one"
    )
    everything = Revocation(kind="user", id="ruth", user="ruth", at=NOW + 1, by="olga")
    assert "was revoked by olga" in why(recognise(users(everything), TOKEN, NOW + 2))
    later = issue(KEY, Claims(subject="ruth", id="t2", issued_at=NOW + 1.5, expires_at=NOW + 60))
    assert isinstance(recognise(users(everything), later, NOW + 2), User), "what came after it counts"


def test_a_user_who_is_gone() -> None:
    found = recognise(users(known=False), TOKEN, NOW + 1)
    assert why(found) == "there is no user ruth any more"
    assert isinstance(found, UnknownUser)
    assert found.missing


def test_another_meshs_token_replayed_here() -> None:
    foreign = issue(SigningKey(bytes(32)), CLAIMS)
    assert why(recognise(users(), foreign, NOW + 1)) == "this token is not one of this mesh's"


def _b64(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


@pytest.mark.parametrize("header", ['{"alg":"none"}', '{"alg":"HS256","typ":"JWT"}', '{"alg":"EdDSA"}'])
def test_what_a_token_says_of_its_algorithm_is_not_obeyed(header: str) -> None:
    body = TOKEN.split(".")[1]
    for signature in ("", TOKEN.split(".")[2]):
        forged = f"{_b64(header)}.{body}.{signature}"
        assert "not one of this mesh's" in why(recognise(users(), forged, NOW + 1))


def test_a_changed_claim_is_not_signed() -> None:
    header, body, signature = TOKEN.split(".")
    said = json.loads(base64.urlsafe_b64decode(body + "=="))
    forged = f"{header}.{_b64(json.dumps({**said, 'sub': 'admin'}))}.{signature}"
    with pytest.raises(TokenRefused):
        read(KEY.verify_key, forged, NOW + 1)


@given(
    st.text(max_size=200)
    | st.text("eyJ.abc=_-", max_size=80).map(lambda text: f"{user_tokens.HEADER}.{text}")
)
def test_nonsense_is_refused_and_never_an_error(token: str) -> None:
    assert isinstance(recognise(users(), token, NOW), UnknownUser)


def test_a_key_file_is_private_and_never_quoted(tmp_path: Path) -> None:
    file = tmp_path / "user_key"
    with pytest.raises(BadInput, match=r"No such file.*key that signs"):
        load_key(file)
    file.write_text("zz" * 32)
    file.chmod(0o644)
    with pytest.raises(BadInput, match="others may read it"):
        load_key(file)
    file.chmod(0o600)
    with pytest.raises(BadInput, match="64 hexadecimal digits") as caught:
        load_key(file)
    assert "zz" not in caught.value.text
    file.write_text(bytes(KEY).hex() + "\n")
    assert load_key(file) == KEY
