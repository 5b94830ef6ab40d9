"""Late binding: which instance of the next stage gets this microbatch (DESIGN §2, §5 rule 1).

The router hands out weights; the owner of a microbatch chooses when it is about to send, by what it
knows best: how much of its own work is still open at each candidate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from schemas.data_plane import RouteEntry, RouteTable
from schemas.step import Member


def choose(
    entries: Sequence[RouteEntry], outstanding: Mapping[str, int], sent: Mapping[str, int], cluster: str
) -> RouteEntry | None:
    """The entry with the least expected wait, (outstanding + 1) / weight, among those with a free window.

    Args:
        entries: the route table's candidates; weight 0 is a standby and never chosen.
        outstanding: microbatches of this sender still open at each SID.
        sent: microbatches sent to each SID in this step; settles ties, so that equals share equally.
        cluster: the sender's own; preferred between equals.

    Returns:
        The chosen entry, or None when every window is full: the microbatch waits here.
    """
    open_entries = [
        entry for entry in entries if entry.weight > 0 and outstanding.get(entry.sid, 0) < entry.window
    ]
    if not open_entries:
        return None
    return min(
        open_entries,
        key=lambda entry: (
            (outstanding.get(entry.sid, 0) + 1) / entry.weight,
            (sent.get(entry.sid, 0) + 1) / entry.weight,
            entry.cluster != cluster,
            entry.sid,
        ),
    )


class Binder:
    """The present tables and this sender's open microbatches. All calls on the event loop."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._tables: dict[int, RouteTable] = {}
        self._outstanding: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._fenced: set[tuple[str, str]] = set()

    def update(self, table: RouteTable) -> None:
        """Takes a newer table of the same router; another router's replaces it whatever its number."""
        held = self._tables.get(table.stage)
        if held is None or held.router != table.router or table.revision >= held.revision:
            self._tables[table.stage] = table

    def forget(self, stage: int) -> None:
        self._tables.pop(stage, None)

    def bind(self, stage: int) -> Member | None:
        """Chooses the next hop at `stage` and counts it as open; None: wait for a window or a table."""
        table = self._tables.get(stage)
        if table is None:
            return None
        entries = [entry for entry in table.entries if (entry.sid, entry.incarnation) not in self._fenced]
        entry = choose(entries, self._outstanding, self._sent, self._cluster)
        if entry is None:
            return None
        self._outstanding[entry.sid] += 1
        self._sent[entry.sid] += 1
        return Member(sid=entry.sid, incarnation=entry.incarnation)

    def assigned(self, member: Member) -> None:
        """The orchestrator bound a microbatch to `member`; no window holds that back (DESIGN §6, Flow)."""
        self._outstanding[member.sid] += 1
        self._sent[member.sid] += 1

    def returned(self, sid: str) -> None:
        """A microbatch came back from `sid`: its window has room again."""
        if self._outstanding[sid] > 0:
            self._outstanding[sid] -= 1

    def next_step(self) -> None:
        """A step ended: its tie-breaking counts go. Open counts are zero by then, or the step was aborted."""
        self._sent.clear()

    def reset(self) -> None:
        """An abort: nothing of this sender is open anywhere any more."""
        self._outstanding.clear()
        self._sent.clear()

    def fence(self, member: Member) -> None:
        """Never choose this incarnation again, even while an old table still names it."""
        if (member.sid, member.incarnation) not in self._fenced:
            self._fenced.add((member.sid, member.incarnation))
            self._outstanding.pop(member.sid, None)  # its successor under the same name owes nothing

    @property
    def open(self) -> int:
        return self._outstanding.total()
