"""Whose route tables a sender goes by: those of its cluster's router, or of one that serves it as a guest.

Pure; `entities.presence.service_area` decides which router that is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.data_plane import RouteTable


@dataclass(slots=True)
class TableChoice:
    """Of one sender. Of a stage's tables that are for its `cluster` the one that was written last counts.

    A dead router's tables stay in the bucket. Whoever takes its place writes later, and so does the router
    itself when it is back.
    """

    cluster: str
    serving: str = ""
    """The cluster whose router serves this sender."""
    _tables: dict[int, dict[str, tuple[int, RouteTable]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.serving = self.serving or self.cluster

    def take(self, table: RouteTable, revision: int) -> RouteTable | None:
        """Takes a table as of the bucket's `revision`.

        Returns:
            The table of that stage to go by, if that is another one now.
        """
        tables = self._tables.setdefault(table.stage, {})
        before = self._newest(tables)
        if self.cluster == table.cluster or self.cluster in table.guests:
            tables[table.cluster] = revision, table
        else:
            tables.pop(table.cluster, None)
        after = self._newest(tables)
        if after is None or after is before:
            return None
        self.serving = after.cluster
        return after

    @staticmethod
    def _newest(tables: dict[str, tuple[int, RouteTable]]) -> RouteTable | None:
        return max(tables.values(), key=lambda entry: entry[0], default=(0, None))[1]
