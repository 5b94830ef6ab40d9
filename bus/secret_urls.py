"""What `secret://USER/NAME` stands for in this process: handed to it with its orders.

Only what opens a URL asks here; records, logs and errors have the name.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl

from schemas.errors import BadInput
from schemas.secrets import SCHEME, below, split_reference

OPTIONS = frozenset(
    {"key", "secret", "token", "username", "user", "password", "passphrase", "account_name", "account_key",
     "sas_token", "region", "endpoint_url"}
)  # fmt: skip
"""What may stand behind `#`: credentials, and where they count. Whatever else a file system takes, another
host for example, would lead past the rules of what jobs may name."""

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
    found = split_reference(url)
    value = _known.get(f"{found[0]}/{found[1]}") if found is not None else None
    if found is None or value is None:
        raise BadInput(f"{url}: only the job's own processes can open it; fetch it from there yourself")
    address, _, text = value.partition("#")
    options = dict(parse_qsl(text))
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise BadInput(f"{url}: option {unknown[0]!r} behind #; there are {', '.join(sorted(OPTIONS))}")
    return below(address, found[2]), options


def hidden(text: str) -> str:
    """A library's complaint without the values: it may quote what it could not open."""
    for name, value in _known.items():
        address = value.partition("#")[0]
        for part in (value, address, address.partition("://")[2]):
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
    return [part for part in parts if len(part) > 3]
