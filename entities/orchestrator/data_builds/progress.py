"""How far a phase of a build is, how fast it goes, and how long it will take. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict

from entities.orchestrator.data_builds.unit_ledger import UnitLedger, UnitState
from schemas.data_set.builds import PhaseProgress

FRESH = 0.3
"""Weight of the newest time in a mean: high follows changes of a node, low is steadier."""


class UnitTimes:
    """Mean times of a phase's units, by agent, in seconds."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}
        self._all = 0.0
        self._count = 0

    def take(self, agent: str, seconds: float) -> None:
        before = self._of.get(agent)
        self._of[agent] = seconds if before is None else before + FRESH * (seconds - before)
        self._count += 1
        self._all += (seconds - self._all) / self._count

    def of(self, agent: str) -> float | None:
        return self._of.get(agent)

    @property
    def usual_s(self) -> float:
        """The mean over all units; 1 before any has ended."""
        return self._all if self._count else 1.0

    @property
    def mean_s(self) -> float:
        """The mean over all units; 0 before any has ended."""
        return self._all


def progress_of(ledger: UnitLedger, times: UnitTimes) -> PhaseProgress:
    """The phase's progress by its ledger, without failures, which the build's record counts."""
    states = Counter(unit.state for unit in ledger.units.values())
    dropped: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    sums: defaultdict[str, int] = defaultdict(int)
    for unit in ledger.units.values():
        result = unit.result
        if unit.state is not UnitState.COMMITTED or result is None:
            continue
        dropped.update(result.dropped)
        kept.update(result.kept)
        sums["rows"] += result.rows_in
        sums["tokens"] += sum(result.tokens.values())
        sums["bytes"] += 0 if unit.order.unit is None else unit.order.unit.bytes
    return PhaseProgress(
        phase=ledger.phase,
        units=len(ledger.units),
        committed=states[UnitState.COMMITTED],
        reused=ledger.reused,
        working=states[UnitState.BOUND],
        skipped=len(ledger.skipped()),
        rows_in=sums["rows"],
        kept=dict(sorted(kept.items())),
        dropped={reason: count for reason, count in sorted(dropped.items()) if count},
        bytes_in=sums["bytes"],
        tokens=sums["tokens"],
        unit_s=times.mean_s,
    )


def pace(progress: PhaseProgress, begun_rows: int, elapsed_s: float) -> tuple[float, float | None]:
    """Rows per second of a phase, and the seconds that are left of it, None as long as nothing is known.

    Args:
        progress: its present progress.
        begun_rows: rows that were committed when this leader took it up.
        elapsed_s: time since then, s.
    """
    if elapsed_s <= 0:
        return 0.0, None
    rows_per_s = max(0, progress.rows_in - begun_rows) / elapsed_s
    own = progress.committed - progress.reused
    return rows_per_s, progress.left * elapsed_s / own if own > 0 else None
