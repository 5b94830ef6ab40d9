"""What of a mesh goes over the network in the clear, in one line: `dmsc up --bind` and `dmsc doctor` say it.

docs/security.md has the same line, and a test that it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

ALWAYS = "tensors between instances, and /metrics"
WITHOUT_TLS = "messages and HTTP with all tokens in them"
REMEDY_OF_TENSORS = "keep those on a network of their own, or under WireGuard"


def in_the_clear(addresses: Iterable[str]) -> str:
    """Empty where nothing leaves this machine.

    Args:
        addresses: URLs of the bus's servers and of the gateways; hosts of nodes.
    """
    urls = [urlsplit(address if "//" in address else f"//{address}") for address in addresses]
    far = [url for url in urls if not _is_here(url.hostname or "")]
    if not far:
        return ""
    if any(url.scheme in ("nats", "http") for url in far):
        return f"{WITHOUT_TLS}, {ALWAYS}: --tls encrypts the former; {REMEDY_OF_TENSORS}"
    return f"{ALWAYS}, with TLS, too: {REMEDY_OF_TENSORS}"


def _is_here(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
