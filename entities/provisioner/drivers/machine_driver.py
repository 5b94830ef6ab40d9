"""What a driver of machines does."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class MachineDriver(Protocol):
    """Orders, lists and releases machines of one pool. Each call has a time limit of its own."""

    @property
    def idempotent(self) -> bool:
        """Whether a second order of a name, also by another leader at the same time, is no second machine."""

    async def order(self, machine: str) -> None:
        """Orders one machine, whose node is to have this name.

        Raises:
            Refused: there is no such machine, and there will be none.
            Unavailable: there may be one, now or later.
        """

    async def release(self, machine: str) -> None:
        """Gives a machine back; again is no error, nor is a machine that is not there.

        Raises:
            Unavailable: it may still be there.
        """

    async def machines(self) -> frozenset[str]:
        """The names of all machines that are there, or on their way.

        Raises:
            Unavailable: nobody knows.
        """


@runtime_checkable
class GangDriver(Protocol):
    """What a driver does besides where something admits machines: it can have several admitted together."""

    async def order_in_gang(self, machine: str, gang: str, size: int) -> None:
        """Orders a machine as `order` does; it is to be admitted with the others of its gang, or not at all.

        Args:
            machine: its name.
            gang: the name that all of them share.
            size: how many they are.

        Raises:
            Refused: there is no such machine, and there will be none.
            Unavailable: there may be one, now or later.
        """
