"""The values of `secret://USER/NAME` references in this process, which its orders carried.

Only code that opens a URL or builds a model asks for them; records, logs and errors hold the name.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl

from schemas.errors import BadInput
from schemas.secrets import SCHEME, below, split_reference, with_texts

OPTIONS = frozenset(
    {
        "key",
        "secret",
        "token",
        "username",
        "user",
        "password",
        "passphrase",
        "account_name",
        "account_key",
        "sas_token",
        "region",
        "endpoint_url",
    }
)
"""The options that may follow `#`: credentials, and where they are valid. Other options of a file system,
another host for example, would bypass the rules of what jobs may name."""

LEAST_CHARACTERS = 4
"""The shortest secret that is searched for in texts; shorter ones would match everywhere."""

_values: dict[str, str] = {}


def learn(values: str) -> None:
    """Stores the values of an order: a JSON object of `USER/NAME` and URL, or an empty text."""
    if values:
        _values.update(json.loads(values))


def forget(*names: str) -> None:
    """Removes values that are no longer needed."""
    for name in names:
        _values.pop(name, None)


def resolved(url: str) -> tuple[str, dict[str, Any]]:
    """The URL to open and the options for its file system; a URL that is no secret is returned as it is.

    Raises:
        BadInput: this process was not given the secret, or its value is no usable URL.
    """
    if not url.startswith(SCHEME):
        return url, {}
    value, rest = _value_and_rest(url)
    if "://" not in value:
        raise BadInput(f"{url} stands for no URL; store one under that name")
    address, _, text = value.partition("#")
    options = dict(parse_qsl(text))
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise BadInput(f"{url}: option {unknown[0]!r} behind #; there are {', '.join(sorted(OPTIONS))}")
    return below(address, rest), options


def filled(args: dict[str, Any]) -> dict[str, Any]:
    """A model's arguments with the values of the secrets in them.

    Raises:
        BadInput: this process was not given a secret.
    """

    def value_of(place: str, key: str, text: str) -> str:
        if not text.startswith(SCHEME):
            return text
        value, rest = _value_and_rest(text)
        return below(value, rest)

    return with_texts(args, value_of)


def _value_and_rest(reference: str) -> tuple[str, str]:
    """The value of a secret, and the path below it in the reference."""
    parts = split_reference(reference)
    value = _values.get(f"{parts[0]}/{parts[1]}") if parts is not None else None
    if parts is None or value is None:
        raise BadInput(f"{reference}: only the job's own processes can open it; fetch it from there yourself")
    return value, parts[2]


def hidden(text: str) -> str:
    """An error text of a library without secret values; a library may quote what it could not open."""
    for name, value in _values.items():
        address = value.partition("#")[0]
        for part in (value, address, address.partition("://")[2]):
            if len(part) >= LEAST_CHARACTERS:
                text = text.replace(part, f"{SCHEME}{name}")
        for part in _secret_parts(value):
            text = text.replace(part, "***")
    return text


def _secret_parts(value: str) -> list[str]:
    address, _, options = value.partition("#")
    address, _, query = address.partition("?")
    user_part = address.partition("://")[2].partition("/")[0].rpartition("@")[0]
    parts = [
        user_part,
        user_part.partition(":")[2],
        query,
        *(option for _, option in parse_qsl(query + "&" + options)),
    ]
    return [part for part in parts if len(part) >= LEAST_CHARACTERS]
