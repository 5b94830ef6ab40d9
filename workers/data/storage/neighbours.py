"""The caches of other nodes, as those who read and keep blocks see them: whoever is connected, if anybody."""

from __future__ import annotations

from typing import Protocol


class NeighbourLine(Protocol):
    """A way to other nodes (`workers.stage.neighbour_blocks`). Not to be called on the event loop."""

    def ask(self, key: str, block_length: int) -> bytes | None:
        """The file of a block that another node keeps; None at once if none is known to."""
        ...

    def refuse(self, key: str) -> None:
        """What came for this key was no such block: whoever sent it is not asked again."""
        ...

    def kept(self, key: str) -> None:
        """This block was kept here."""
        ...


class Neighbours:
    """Passes everything on to the line that is connected; without one, nobody has a neighbour."""

    def __init__(self) -> None:
        self._line: NeighbourLine | None = None
        self.wanted = False
        """Whether this process reads anything from a store."""

    def connect(self, line: NeighbourLine | None) -> None:
        """From now on this line is used; None: none."""
        self._line = line

    def ask(self, key: str, block_length: int) -> bytes | None:
        return None if self._line is None else self._line.ask(key, block_length)

    def refuse(self, key: str) -> None:
        if self._line is not None:
            self._line.refuse(key)

    def kept(self, key: str) -> None:
        if self._line is not None:
            self._line.kept(key)
