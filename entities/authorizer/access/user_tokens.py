"""User tokens: JSON web tokens (RFC 7519) signed with the mesh's Ed25519 key (`EdDSA`, RFC 8037).

There is one algorithm and one header, byte for byte: the algorithm that a token names is compared, never
obeyed. (PyJWT does the same and more; its import takes 250 ms and 13 MB, PyNaCl's 40 ms and 1.3 MB. The tests
compare the two.)
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from schemas.base import is_token
from schemas.errors import BadInput

ISSUER = "dmsc"
MOST_CHARACTERS = 4096


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


HEADER = _encode(b'{"alg":"EdDSA","typ":"JWT"}')


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """The claims of a token. Times are seconds since the epoch."""

    subject: str
    id: str
    issued_at: float
    expires_at: float


class TokenRefused(Exception):
    """The token is not valid; the text says why, for the user who sent it."""


def is_signed(token: str) -> bool:
    """Whether this looks like a JSON web token, not like a plain token of the users' file."""
    return token.startswith("eyJ") and token.count(".") == 2


def issue(key: SigningKey, claims: Claims) -> str:
    """Sign the claims; return the token."""
    body = {
        "iss": ISSUER,
        "sub": claims.subject,
        "jti": claims.id,
        "iat": claims.issued_at,
        "exp": claims.expires_at,
    }
    content = f"{HEADER}.{_encode(json.dumps(body, separators=(',', ':')).encode())}"
    return f"{content}.{_encode(key.sign(content.encode()).signature)}"


def read(key: VerifyKey, token: str, now: float, *, skew_s: float = 30.0) -> Claims:
    """The claims of a valid token that this mesh's key has signed; raises `TokenRefused` otherwise.

    The clock of the authorizer that issued the token may be ahead of ours by `skew_s`.
    """
    header, _, rest = token.partition(".")
    body, _, signature = rest.partition(".")
    if len(token) > MOST_CHARACTERS or header != HEADER:
        raise TokenRefused("this token is not one of this mesh's")
    try:
        key.verify(f"{header}.{body}".encode(), _decode(signature))
        body_claims = json.loads(_decode(body))
        claims = Claims(
            subject=str(body_claims["sub"]),
            id=str(body_claims["jti"]),
            issued_at=float(body_claims["iat"]),
            expires_at=float(body_claims["exp"]),
        )
    except (BadSignatureError, ValueError, binascii.Error, KeyError, TypeError):
        # so does the token of another mesh, which was signed with another key
        raise TokenRefused("this token is not one of this mesh's") from None
    if body_claims.get("iss") != ISSUER or not is_token(claims.id):
        raise TokenRefused("this token is not one of this mesh's")
    if now >= claims.expires_at:
        raise TokenRefused(f"this token of {claims.subject} has expired; ask for a new one")
    if claims.issued_at > now + skew_s:
        raise TokenRefused(f"this token of {claims.subject} is from the future; are the clocks right?")
    return claims


def load_key(path: Path) -> SigningKey:
    """The signing key in a file. Raises `BadInput` with one line, which never quotes the key."""
    try:
        text = path.read_text(encoding="ascii").strip()
        mode = path.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "unreadable"
        raise BadInput(
            f"{path}: {why}; it holds the key that signs users' tokens (`dmsc up` makes one)"
        ) from None
    if mode:
        raise BadInput(f"{path}: others may read it; it signs users' tokens: chmod 600 {path}")
    try:
        seed = bytes.fromhex(text)
        return SigningKey(seed)
    except Exception:
        raise BadInput(f"{path}: must be 64 hexadecimal digits, the seed of an Ed25519 key") from None
