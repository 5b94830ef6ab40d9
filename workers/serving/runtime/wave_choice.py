"""Which rows of which sessions one instance computes next. Pure.

Sessions with one row waiting come first: somebody reads their tokens as they come. What is computed anew
after a loss gets at most half of the rest while prompts wait, and prompts share what is left. Among equals
whoever waited longest comes first. No company changes a bit, so all this is free to choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.serving.runtime.session_table import BLOCK_ROWS, BoundSession, ServingLimits, WaveRows

REBUILD_SHARE = 0.5
"""Of a wave's rows, those that may be computed anew while others wait."""


def choose_wave(sessions: Iterable[BoundSession], limits: ServingLimits) -> list[WaveRows]:
    """The next wave; empty: nobody waits.

    Args:
        sessions: All sessions.
        limits: What a wave may hold.
    """
    sessions = list(sessions)
    waiting = sorted((each for each in sessions if _waits(each)), key=lambda each: each.served)
    if limits.whole:
        return _whole_histories(waiting, limits)
    single = [each for each in waiting if each.available - each.computed == 1]
    several = [each for each in waiting if each.available - each.computed > 1]
    chosen = [_rows(each, 1, limits) for each in single[: _fair_share(sessions, limits)]]
    rebuilding = [each for each in several if each.computed < each.rebuilt]
    prompts = [each for each in several if each.computed >= each.rebuilt]
    left = limits.wave_rows - len(chosen)
    share = int(left * REBUILD_SHARE) if prompts or chosen else left
    chosen += _chunks(rebuilding, max(share, 1) if left else 0, limits)
    left = limits.wave_rows - sum(each.rows for each in chosen)
    return chosen + _chunks(prompts, left, limits)


def _fair_share(sessions: Sequence[BoundSession], limits: ServingLimits) -> int:
    """Single rows of a wave. The first stage leaves some for a second wave, so that no stage waits."""
    if not limits.is_first or limits.is_last:
        return limits.wave_rows
    answering = sum(not each.finished and each.available - each.computed <= 1 for each in sessions)
    return min(limits.wave_rows, -(-answering // limits.stages))


def _waits(session: BoundSession) -> bool:
    return session.available > session.computed and not session.finished


def _chunks(sessions: Sequence[BoundSession], rows: int, limits: ServingLimits) -> list[WaveRows]:
    """Shares rows among sessions; what one leaves goes to those behind it."""
    chosen: list[WaveRows] = []
    for index, session in enumerate(sessions):
        if rows <= 0:
            break
        share = max(min(rows, BLOCK_ROWS), rows // (len(sessions) - index))
        chosen.append(_rows(session, min(share, limits.chunk_rows), limits))
        rows -= chosen[-1].rows
    return chosen


def _rows(session: BoundSession, most: int, limits: ServingLimits) -> WaveRows:
    first = session.computed
    rows = min(most, session.available - first)
    aligned = (first + rows) // BLOCK_ROWS * BLOCK_ROWS
    if first < aligned < first + rows and first + rows < session.available:
        rows = aligned - first  # attention is cut there anyway
    return WaveRows(session, first, rows, session.wanted(first, rows) if limits.is_last else 0)


def _whole_histories(waiting: Sequence[BoundSession], limits: ServingLimits) -> list[WaveRows]:
    chosen: list[WaveRows] = []
    rows = 0
    for session in waiting:
        if chosen and rows + session.available > limits.wave_rows:
            break
        rows += session.available
        wanted = session.wanted(0, session.available) if limits.is_last else 0
        chosen.append(WaveRows(session, 0, session.available, wanted))
    return chosen
