"""The notice of what a mesh sends unencrypted over the network; `dmsc up --bind` and `dmsc doctor` print it.

docs/security.md contains the same line; a test checks that.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

ALWAYS = "tensors between instances, and /metrics"
WITHOUT_TLS = "messages and HTTP with all tokens in them"
REMEDY_OF_TENSORS = "keep those on a network of their own, or under WireGuard"


def in_the_clear(addresses: Iterable[str]) -> str:
    """Return the notice in one line; empty if nothing leaves this machine.

    Args:
        addresses: URLs of the bus's servers and of the gateways, and hosts of nodes.
    """
    urls = [urlsplit(address if "//" in address else f"//{address}") for address in addresses]
    remote = [url for url in urls if not _is_loopback(url.hostname or "")]
    if not remote:
        return ""
    if any(url.scheme in ("nats", "http") for url in remote):
        return f"{WITHOUT_TLS}, {ALWAYS}: --tls encrypts the former; {REMEDY_OF_TENSORS}"
    return f"{ALWAYS}, with TLS, too: {REMEDY_OF_TENSORS}"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
