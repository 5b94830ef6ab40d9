"""Who is at the other end of a new connection: a challenge that only members of the job can answer.

The job's secret comes to each instance with the order that starts it, from the orchestrator through its node
agent. On a new group each member sends every other a nonce and gets the HMAC-SHA256 of both nonces, the
group's name and the prover's rank back. The secret itself does not go over the link. What this does not give:
the tensors that follow are neither encrypted nor signed, so that whoever can change packets on the way can
still change them (docs/security.md).
"""

from __future__ import annotations

import hashlib
import hmac
import os
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from schemas.cluster import InstanceStart

NONCE_TAG, PROOF_TAG = 2**31 - 4, 2**31 - 3
"""Behind all tags of transfers (`link_table.LAST_TAG`), beside that of a release (`gloo.RELEASE_TAG`)."""
NONCE_BYTES = 32


class AuthenticatedGroup(Protocol):
    """As much of a gloo group as a proof needs."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: Any, dstRank: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: Any, srcRank: int, tag: int) -> dist.Work: ...


def secret_of(start: InstanceStart) -> bytes | None:
    """The job's secret out of an order to start; None where there is none, so that nobody is asked."""
    return bytes.fromhex(start.link_secret) if start.link_secret else None


def proof(secret: bytes, name: str, prover: int, nonce: bytes, challenge: bytes) -> bytes:
    """What the member `prover` answers to `challenge`, having sent `nonce` itself; 32 bytes."""
    said = [b"dmsc link", name.encode(), prover.to_bytes(4, "big"), nonce, challenge]
    framed = b"".join(len(each).to_bytes(4, "big") + each for each in said)
    return hmac.new(secret, framed, hashlib.sha256).digest()


def unproven(group: AuthenticatedGroup, secret: bytes, name: str, timeout: timedelta) -> list[int]:
    """The ranks that can't prove that they are members. Blocks; not for the event loop's thread.

    Raises:
        RuntimeError: of gloo, where somebody went away or said nothing in time. The group is useless then.
    """
    me = group.rank()
    peers = [rank for rank in range(group.size()) if rank != me]
    nonce = os.urandom(NONCE_BYTES)
    nonces = _exchange(group, peers, dict.fromkeys(peers, nonce), NONCE_TAG, timeout)
    mine = {peer: proof(secret, name, me, nonce, nonces[peer]) for peer in peers}
    answers = _exchange(group, peers, mine, PROOF_TAG, timeout)
    return [
        peer
        for peer in peers
        if nonces[peer] == nonce  # our own, sent back
        or not hmac.compare_digest(answers[peer], proof(secret, name, peer, nonces[peer], nonce))
    ]


def _exchange(
    group: AuthenticatedGroup, peers: list[int], said: dict[int, bytes], tag: int, timeout: timedelta
) -> dict[int, bytes]:
    """Sends each peer its 32 bytes; what they sent."""
    going: list[tuple[dist.Work, Tensor]] = []
    coming: dict[int, tuple[dist.Work, Tensor]] = {}
    for peer in peers:
        out = torch.frombuffer(bytearray(said[peer]), dtype=torch.uint8)
        going.append((group.send([out], peer, tag), out))
        into = torch.empty(NONCE_BYTES, dtype=torch.uint8)
        coming[peer] = (group.recv([into], peer, tag), into)
    for work, _ in (*coming.values(), *going):
        work.wait(timeout)
    return {peer: bytes(into.numpy().tobytes()) for peer, (_, into) in coming.items()}
