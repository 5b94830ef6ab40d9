"""User tokens: JSON web tokens (RFC 7519) signed with the mesh's Ed25519 key (`EdDSA`, RFC 8037).

One algorithm, one header, byte for byte: what a token says of its own algorithm is compared, never obeyed.
(PyJWT does the same and more; its import takes 250 ms and 13 MB where PyNaCl takes 40 ms and 1.3 MB. The
tests hold the two against each other.)
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
SKEW_S = 30.0
"""A token may come from an authorizer whose clock is this much ahead."""


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


HEADER = _encoded(b'{"alg":"EdDSA","typ":"JWT"}')


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """What a token says. Times are seconds since the epoch."""

    subject: str
    id: str
    issued_at: float
    expires_at: float


class TokenRefused(Exception):
    """The token opens nothing; the text says why, in words for whoever sent it."""


def looks_like_one(token: str) -> bool:
    """Whether this is meant to be a JSON web token (and not a plain one of the users' file)."""
    return token.startswith("eyJ") and token.count(".") == 2


def issue(key: SigningKey, claims: Claims) -> str:
    """The token."""
    body = {
        "iss": ISSUER,
        "sub": claims.subject,
        "jti": claims.id,
        "iat": claims.issued_at,
        "exp": claims.expires_at,
    }
    signed = f"{HEADER}.{_encoded(json.dumps(body, separators=(',', ':')).encode())}"
    return f"{signed}.{_encoded(key.sign(signed.encode()).signature)}"


def read(key: VerifyKey, token: str, now: float) -> Claims:
    """The claims of a token that this mesh's key has signed and that lasts. Raises `TokenRefused`."""
    header, _, rest = token.partition(".")
    body, _, signature = rest.partition(".")
    if len(token) > MOST_CHARACTERS or header != HEADER:
        raise TokenRefused("this token is not one of this mesh's")
    try:
        key.verify(f"{header}.{body}".encode(), _decoded(signature))
        said = json.loads(_decoded(body))
        claims = Claims(
            subject=str(said["sub"]),
            id=str(said["jti"]),
            issued_at=float(said["iat"]),
            expires_at=float(said["exp"]),
        )
    except (BadSignatureError, ValueError, binascii.Error, KeyError, TypeError):
        # another mesh's token looks like this as well: it was signed with another key
        raise TokenRefused("this token is not one of this mesh's") from None
    if said.get("iss") != ISSUER or not is_token(claims.id):
        raise TokenRefused("this token is not one of this mesh's")
    if now >= claims.expires_at:
        raise TokenRefused(f"this token of {claims.subject} has expired; ask for a new one")
    if claims.issued_at > now + SKEW_S:
        raise TokenRefused(f"this token of {claims.subject} is from the future; are the clocks right?")
    return claims


def load_key(path: Path) -> SigningKey:
    """The signing key in a file. Raises `BadInput` with one line, which never quotes it."""
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
