"""Ports of this machine: tests whether they are free, and chooses others."""

from __future__ import annotations

import socket


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Connections that are still closing do not count."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def any_free(host: str, count: int = 1) -> list[int]:
    """Return `count` different free ports. The kernel assigns ports in turn, so they stay free a while."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probes = [socket.socket(family, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def choose(host: str, requested: int | None, default: int, count: int, option: str) -> tuple[list[int], str]:
    """Choose `count` ports to listen on; also return a remark if they are not the usual ones.

    Args:
        host: The address to listen on.
        requested: The first port that the user requested; 0: any; None: `default` if it is free.
        default: The usual first port.
        count: How many ports; they are consecutive if possible.
        option: The option's name, for the error.

    Raises:
        BadInput: A requested port is taken or out of range.
    """
    from schemas.errors import BadInput

    if requested == 0:
        return any_free(host, count), ""
    first = default if requested is None else requested
    if not 0 < first <= 65536 - count:
        raise BadInput(f"{option} {first}: must be within 1-{65536 - count}")
    numbers = list(range(first, first + count))
    taken = [port for port in numbers if not is_free(host, port)]
    if not taken:
        return numbers, ""
    if requested is not None:
        remedy = "stop what listens there or choose another"
        raise BadInput(
            f"{option} {requested}: port {taken[0]} is taken on {host}; {remedy} ({option} 0: any free one)"
        )
    others = any_free(host, count)
    return others, f"port {taken[0]} is taken, using {', '.join(map(str, others))}"


def port_or_off(text: str, option: str) -> int | None:
    """The number of an option that takes a port, 0 or `off`; None: off. Raises `BadInput`."""
    from schemas.errors import BadInput

    if text == "off":
        return None
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise BadInput(f"{option} {text}: a port, 0 for any free one, or off")
    return int(text)
