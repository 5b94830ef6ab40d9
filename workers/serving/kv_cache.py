"""Keys and values of sessions, in blocks under a budget in bytes. It is a cache: what is dropped is computed
again from the session's rows, to the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.serving.exact_arithmetic import KEYS


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """One call of attention in a pass through a stage.

    Attributes:
        layer: Name of the layer that makes it.
        key_heads: Heads of keys and values.
        key_width: Numbers of a key, per head.
        value_width: Numbers of a value, per head.
    """

    layer: str
    key_heads: int
    key_width: int
    value_width: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key and value, float32."""
        return 4 * self.key_heads * (self.key_width + self.value_width)


class KvCache:
    """Keys and values by session and site of attention.

    A session's memory is reserved as a whole when it is admitted, so that no running session ever finds the
    cache full; it is taken as its rows come, in blocks of `KEYS` tokens.

    Args:
        sites: The stage's calls of attention, in order.
        budget_bytes: For all keys and values together.
    """

    def __init__(self, sites: Sequence[AttentionSite], budget_bytes: int) -> None:
        self.sites = tuple(sites)
        self.budget_bytes = budget_bytes
        self.block_bytes = KEYS * sum(site.token_bytes for site in self.sites)
        self._reserved: dict[str, int] = {}
        self._tensors: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._valid: dict[str, int] = {}

    @property
    def blocks(self) -> int:
        """Blocks that the budget holds; a stage without attention needs none, and never is full."""
        return self.budget_bytes // self.block_bytes if self.block_bytes else 1 << 40

    @property
    def free_blocks(self) -> int:
        """Blocks that are not reserved."""
        return self.blocks - sum(self._reserved.values())

    @property
    def used_bytes(self) -> int:
        """Bytes that sessions' keys and values take now."""
        return sum(k.nbytes + v.nbytes for own in self._tensors.values() for k, v in own)

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a session of this many tokens needs, prompt and answer together."""
        return -(-tokens // KEYS)

    def reserve(self, session: str, tokens: int) -> bool:
        """Reserves what a session needs; it may be called again with more.

        Returns:
            Whether there was room; if not, nothing has changed.
        """
        needed = self.blocks_of(tokens)
        had = self._reserved.get(session, 0)
        if needed - had > self.free_blocks:
            return False
        self._reserved[session] = max(needed, had)
        return True

    def reserved(self, session: str) -> bool:
        """Whether the session has a reservation."""
        return session in self._reserved

    def tokens(self, session: str) -> int:
        """Rows whose keys and values are there, from position 0 on: the position that may come next."""
        return self._valid.get(session, 0)

    def truncate(self, session: str, tokens: int) -> None:
        """Forgets all positions from `tokens` on: they will be computed again."""
        if session in self._valid:
            self._valid[session] = min(self._valid[session], tokens)

    def drop(self, session: str) -> None:
        """Frees all that a session has. Idempotent."""
        for table in (self._reserved, self._tensors, self._valid):
            table.pop(session, None)

    def room(self, session: str, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """The session's tensors with room for `tokens` positions, whole blocks.

        Returns:
            Of each site, keys (key heads, positions, key width) and values (key heads, positions, value
            width), float32. They are written in place; positions that were never written are zero.
        """
        own = self._tensors.get(session)
        positions = self.blocks_of(tokens) * KEYS
        if own is None:
            own = self._tensors[session] = [
                (
                    torch.zeros(site.key_heads, positions, site.key_width),
                    torch.zeros(site.key_heads, positions, site.value_width),
                )
                for site in self.sites
            ]
        elif own and own[0][0].shape[1] < positions:
            positions = max(positions, min(2 * own[0][0].shape[1], self._most_positions(session)))
            own[:] = [(_longer(keys, positions), _longer(values, positions)) for keys, values in own]
        return own

    def wrote(self, session: str, first: int, rows: int) -> None:
        """Positions `first` … `first + rows - 1` are there now."""
        self._valid[session] = first + rows

    def _most_positions(self, session: str) -> int:
        return self._reserved.get(session, 0) * KEYS


def _longer(tensor: Tensor, positions: int) -> Tensor:
    heads, had, width = tensor.shape
    longer = tensor.new_zeros(heads, positions, width)
    longer[:, :had] = tensor
    return longer
