"""Ports of this machine: is one free, and which instead."""

from __future__ import annotations

import socket


def is_free(host: str, port: int) -> bool:
    """Whether something could listen there now. Connections still closing do not count as taken."""
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
    """`count` different ports that are free now; given out in turn, so they stay free a while."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probes = [socket.socket(family, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def choose(host: str, asked: int | None, default: int, count: int, option: str) -> tuple[list[int], str]:
    """`count` ports to listen on, and a remark if they are not the usual ones.

    Args:
        host: the address to listen on.
        asked: what the user asked for (the first of them); 0: any; None: `default` if free.
        default: the usual port.
        count: how many; they follow each other where that is possible.
        option: the option's name, for the error.

    Raises:
        BadInput: the port asked for is taken or can't be one.
    """
    from schemas.errors import BadInput

    if asked == 0:
        return any_free(host, count), ""
    first = default if asked is None else asked
    if not 0 < first <= 65536 - count:
        raise BadInput(f"{option} {first}: must be within 1-{65536 - count}")
    wanted = list(range(first, first + count))
    taken = [port for port in wanted if not is_free(host, port)]
    if not taken:
        return wanted, ""
    if asked is not None:
        remedy = "stop what listens there or choose another"
        raise BadInput(
            f"{option} {asked}: port {taken[0]} is taken on {host}; {remedy} ({option} 0: any free one)"
        )
    found = any_free(host, count)
    return found, f"port {taken[0]} is taken, using {', '.join(map(str, found))}"
