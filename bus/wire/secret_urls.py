"""What `secret://USER/NAME` stands for in this process: handed to it with its orders.

Only what opens a URL, or builds a model, asks here; records, logs and errors have the name.
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
"""What may stand behind `#`: credentials, and where they count. Whatever else a file system takes, another
host for example, would lead past the rules of what jobs may name."""

LEAST_CHARACTERS = 4
"""Of what is looked for in a text: shorter ones stand everywhere."""

_known: dict[str, str] = {}


def learn(values: str) -> None:
    """`values`: a JSON object of `USER/NAME` and URL, as an order carries it; empty: none."""
    if values:
        _known.update(json.loads(values))


def forget(*names: str) -> None:
    """These are not needed any more."""
    for name in names:
        _known.pop(name, None)


def resolved(url: str) -> tuple[str, dict[str, Any]]:
    """The URL to open, and options for its file system; others than secrets as they are.

    Raises:
        BadInput: a secret that this process was not given.
    """
    if not url.startswith(SCHEME):
        return url, {}
    value, rest = _looked_up(url)
    if "://" not in value:
        raise BadInput(f"{url} stands for no URL; store one under that name")
    address, _, text = value.partition("#")
    options = dict(parse_qsl(text))
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise BadInput(f"{url}: option {unknown[0]!r} behind #; there are {', '.join(sorted(OPTIONS))}")
    return below(address, rest), options


def filled(args: dict[str, Any]) -> dict[str, Any]:
    """A model's arguments with what the secrets in them stand for.

    Raises:
        BadInput: a secret that this process was not given.
    """

    def value_of(place: str, key: str, text: str) -> str:
        if not text.startswith(SCHEME):
            return text
        value, rest = _looked_up(text)
        return below(value, rest)

    return with_texts(args, value_of)


def _looked_up(reference: str) -> tuple[str, str]:
    """The value, and what is named below it."""
    found = split_reference(reference)
    value = _known.get(f"{found[0]}/{found[1]}") if found is not None else None
    if found is None or value is None:
        raise BadInput(f"{reference}: only the job's own processes can open it; fetch it from there yourself")
    return value, found[2]


def hidden(text: str) -> str:
    """A library's complaint without the values: it may quote what it could not open."""
    for name, value in _known.items():
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
        *(one for _, one in parse_qsl(query + "&" + options)),
    ]
    return [part for part in parts if len(part) >= LEAST_CHARACTERS]
