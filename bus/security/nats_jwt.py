"""NATS's keys and signed claims: nkeys, xkeys and JWTs, none of which nats-py encodes.

An nkey is an ed25519 key in base32 behind a letter that says what it is for; an xkey is the same for
curve25519. A JWT here is signed with an nkey (`alg` is `ed25519-nkey`). The server reads such JWTs, and the
chains of `bus.security.credentials` consist of them.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import nkeys
from nacl.exceptions import BadSignatureError, CryptoError
from nacl.public import Box, PrivateKey, PublicKey
from nacl.signing import SigningKey, VerifyKey

from schemas.errors import BadInput, Refused

CURVE_PREFIX = 23 << 3
SEALED = b"xkv1"
"""The mark in front of data that the server has encrypted (version 1 of its format): mark, nonce, box."""
NONCE_BYTES = 24
REMEMBERED = 4_096
"""How many verified claims and how many public keys are cached: a node agent's come again with each of its
instances."""
CORRESPONDENTS = 64
"""How many servers' shared keys are cached."""
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}


class SigningKeys:
    """A pair of ed25519 keys from its seed (`SA…` of an account, `SU…` of a user)."""

    __slots__ = ("_key", "public", "seed")

    def __init__(self, seed: str) -> None:
        """
        Raises:
            BadInput: the text is no seed or is damaged.
        """
        try:
            prefix, raw = nkeys.decode_seed(seed.encode())
            self._key = SigningKey(bytes(raw))
            checks = nkeys.encode_seed(bytes(raw), prefix).decode() == seed
        except (nkeys.NkeysError, ValueError, IndexError, TypeError, binascii.Error):
            checks = False
        if not checks:
            raise BadInput("not the seed of a key, or not all of it")
        self.seed = seed
        self.public = _encoded(prefix, bytes(self._key.verify_key))

    @classmethod
    def account(cls) -> SigningKeys:
        return cls(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_ACCOUNT).decode())

    @classmethod
    def user(cls) -> SigningKeys:
        return cls(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode())

    def sign(self, data: bytes) -> bytes:
        return bytes(self._key.sign(data).signature)


class SealingKeys:
    """A pair of curve25519 keys for data between the server and the authorizer (auth callout)."""

    __slots__ = ("_boxes", "_key", "public", "seed")

    def __init__(self, seed: str) -> None:
        """
        Args:
            seed: 64 hexadecimal digits.

        Raises:
            BadInput: the text is no such seed.
        """
        self._boxes: dict[str, Box] = {}
        try:
            self._key = PrivateKey(bytes.fromhex(seed))
        except (ValueError, TypeError, CryptoError):
            raise BadInput("not the seed of a sealing key") from None
        self.seed = seed
        self.public = _encoded(CURVE_PREFIX, bytes(self._key.public_key))

    @classmethod
    def generate(cls) -> SealingKeys:
        return cls(os.urandom(32).hex())

    def open(self, data: bytes, sender: str) -> bytes:
        """Decrypts data from `sender`, a public xkey.

        Raises:
            Refused: the data was not sealed for us by `sender`.
        """
        if not data.startswith(SEALED):
            raise Refused("not sealed")
        nonce, rest = data[len(SEALED) : len(SEALED) + NONCE_BYTES], data[len(SEALED) + NONCE_BYTES :]
        try:
            return self._box(sender).decrypt(rest, nonce)
        except (CryptoError, ValueError, TypeError):
            raise Refused("sealed by or for somebody else") from None

    def seal(self, data: bytes, receiver: str) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return SEALED + nonce + self._box(receiver).encrypt(data, nonce).ciphertext

    def _box(self, other: str) -> Box:
        """The box with the key that both ends share.

        Raises:
            ValueError, CryptoError: `other` is no public xkey.
        """
        box = self._boxes.get(other)
        if box is None:
            if len(self._boxes) >= CORRESPONDENTS:
                self._boxes.clear()
            box = self._boxes[other] = Box(self._key, PublicKey(raw_public(other)))
        return box


def encode(claims: Mapping[str, Any], keys: SigningKeys, *, nats: str = "") -> str:
    """A signed JWT of these claims with a new `jti`; `nats` is the claim of that name as JSON text."""
    more = f',"nats":{nats}' if nats else ""
    text = f'{to_json(claims)[:-1]}{more},"jti":"{os.urandom(16).hex()}"}}'
    signed_part = f"{_HEAD}.{to_base64(text.encode())}"
    return f"{signed_part}.{to_base64(keys.sign(signed_part.encode()))}"


def decode(token: str) -> Mapping[str, Any]:
    """The claims of a JWT that its own `iss` has signed; the caller decides whether to trust `iss`.

    Raises:
        Refused: this is no JWT, or another key has signed it.
    """
    return _decoded(token)


def decode_once(token: str) -> dict[str, Any]:
    """Like `decode`, but without caching, for a token that will hardly come again."""
    try:
        head, body, signature = token.split(".")
        claims = json.loads(from_base64(body))
        if (head != _HEAD and json.loads(from_base64(head)) != _HEADER) or not isinstance(claims, dict):
            raise Refused("not a JWT of NATS's kind")
        verify(claims["iss"], f"{head}.{body}".encode(), from_base64(signature))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Refused("not a JWT") from None
    return claims


@lru_cache(maxsize=REMEMBERED)
def _decoded(token: str) -> Mapping[str, Any]:
    return MappingProxyType(decode_once(token))


def verify(public: str, data: bytes, signature: bytes) -> None:
    """Checks the signature of `data` against the key `public`.

    Raises:
        Refused: the signature is not by the owner of `public`.
    """
    try:
        _verify_key(public).verify(data, signature)
    except (BadSignatureError, ValueError, TypeError, CryptoError):
        raise Refused("its signature is not that of the key that it names") from None


@lru_cache(maxsize=REMEMBERED)
def _verify_key(public: str) -> VerifyKey:
    return VerifyKey(raw_public(public))


def raw_public(text: str) -> bytes:
    """The 32 bytes of a public key.

    Raises:
        ValueError: the text is no public key.
    """
    if not isinstance(text, str):
        raise ValueError("not a public key")
    data = base64.b32decode(text + "=" * (-len(text) % 8))
    if len(data) != 35 or _checksum(data[:-2]) != data[-2:]:
        raise ValueError("not a public key")
    return data[1:-2]


def to_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_base64(text: str) -> bytes:
    """Decodes base64url without padding.

    Raises:
        ValueError: the text is not base64url.
    """
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


def _encoded(prefix: int, raw: bytes) -> str:
    body = bytes([prefix]) + raw
    return base64.b32encode(body + _checksum(body)).decode().rstrip("=")


def _checksum(body: bytes) -> bytes:
    """The CRC-16/XMODEM that nkeys have behind the key."""
    return binascii.crc_hqx(body, 0).to_bytes(2, "little")


to_json = json.JSONEncoder(separators=(",", ":")).encode
_HEAD = to_base64(json.dumps(_HEADER, separators=(",", ":")).encode())
