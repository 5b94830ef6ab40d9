"""Mutual authentication on a new connection: a challenge that only members of the job can answer.

Each instance gets the job's secret with the order that starts it, from the orchestrator through its node
agent. On a new group each member sends every other member a nonce and gets back the HMAC-SHA256 of both
nonces, the group's name and the prover's rank. The secret itself does not go over the link. The tensors that
follow are neither encrypted nor signed, so an attacker who can change packets in transit can still change
them (docs/security.md).
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
"""Tags above those of transfers (`link_table.LAST_TAG`), next to that of a release (`gloo.RELEASE_TAG`)."""
NONCE_BYTES = 32


class AuthenticatedGroup(Protocol):
    """The part of a gloo group that authentication needs."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: Any, dstRank: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: Any, srcRank: int, tag: int) -> dist.Work: ...


def secret_of(start: InstanceStart) -> bytes | None:
    """The job's secret from a start order; None: it has none, and peers are not authenticated."""
    return bytes.fromhex(start.link_secret) if start.link_secret else None


def proof(secret: bytes, name: str, prover: int, nonce: bytes, challenge: bytes) -> bytes:
    """The answer of rank `prover`, which has sent `nonce` itself, to `challenge`; 32 bytes."""
    parts = [b"dmsc link", name.encode(), prover.to_bytes(4, "big"), nonce, challenge]
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, framed, hashlib.sha256).digest()


def unproven(group: AuthenticatedGroup, secret: bytes, name: str, timeout: timedelta) -> list[int]:
    """The ranks that can't prove to be members. Blocks; not for the event loop's thread.

    Raises:
        RuntimeError: From gloo: a peer went away or sent nothing in time. The group is useless then.
    """
    me = group.rank()
    peers = [rank for rank in range(group.size()) if rank != me]
    nonce = os.urandom(NONCE_BYTES)
    nonces = _exchange(group, peers, dict.fromkeys(peers, nonce), NONCE_TAG, timeout)
    own_proofs = {peer: proof(secret, name, me, nonce, nonces[peer]) for peer in peers}
    answers = _exchange(group, peers, own_proofs, PROOF_TAG, timeout)
    return [
        peer
        for peer in peers
        if nonces[peer] == nonce  # a replay of our own nonce
        or not hmac.compare_digest(answers[peer], proof(secret, name, peer, nonces[peer], nonce))
    ]


def _exchange(
    group: AuthenticatedGroup, peers: list[int], outgoing: dict[int, bytes], tag: int, timeout: timedelta
) -> dict[int, bytes]:
    """Sends each peer its 32 bytes; returns the 32 bytes that each peer sent."""
    sends: list[tuple[dist.Work, Tensor]] = []
    receives: dict[int, tuple[dist.Work, Tensor]] = {}
    for peer in peers:
        out = torch.frombuffer(bytearray(outgoing[peer]), dtype=torch.uint8)
        sends.append((group.send([out], peer, tag), out))
        into = torch.empty(NONCE_BYTES, dtype=torch.uint8)
        receives[peer] = (group.recv([into], peer, tag), into)
    for work, _ in (*receives.values(), *sends):
        work.wait(timeout)
    return {peer: bytes(into.numpy().tobytes()) for peer, (_, into) in receives.items()}
