"""How two instances come to the same name for their link without asking each other.

A pair's name is made of both incarnations in sorted order, so it is the same from either side, and the
place in that order is the rank. Behind it stands a number that only grows: whoever finds the link broken
(or evicted) goes on to the next, and an offer on a higher number than mine means that mine is over. Two
sides that open at once thereby open the same link.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.step import Member


@dataclass(frozen=True, slots=True)
class Pair:
    """An unordered pair of incarnations, seen from one of them."""

    name: str
    rank: int

    @classmethod
    def of(cls, me: Member, peer: Member) -> Pair:
        """The pair of `me` and `peer`.

        Raises:
            ValueError: an instance has no link to itself.
        """
        ends = sorted(f"{member.sid}.{member.incarnation}" for member in (me, peer))
        if ends[0] == ends[1]:
            raise ValueError(f"{me.sid} has no tensor link to itself")
        return cls("+".join(ends), ends.index(f"{me.sid}.{me.incarnation}"))

    def link(self, number: int) -> str:
        """The name of this pair's link number `number`."""
        return f"{self.name}+{number}"

    def number(self, link: str) -> int | None:
        """The number in a link's name, or None if it is not a link of this pair."""
        pair, _, number = link.rpartition("+")
        return int(number) if pair == self.name and number.isascii() and number.isdigit() else None
