"""Which sessions join the next wave, and with how many rows (ADR-0132). Pure: no clock, no tensors.

A wave is one pass through the stages for some rows of some sessions. Decoding sessions come first, each with
one row; then what is computed again after a loss, up to its share; the rest of the budget goes to prompts.
Among equals whoever waited longest comes first. Since no company changes a bit, all this is free to choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

ALIGNED = 64
"""Chunks end at multiples of this many rows where they can: attention cuts there anyway."""


class WaveKind(StrEnum):
    """Why a session's rows are in a wave.

    `PREFILL`: rows of the prompt. `DECODE`: the row of the newest token. `REBUILD`: rows that were computed
    before and whose keys and values are lost; nothing behind this stage needs them again.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    REBUILD = "rebuild"


@dataclass(frozen=True, kw_only=True, slots=True)
class WaveLimits:
    """What a wave may hold.

    Attributes:
        rows: Rows of a wave. More: a higher throughput of prompts. Fewer: shorter waits between tokens.
        sessions: Sessions of a wave.
        in_flight: Waves at a time: as many as there are stages keeps all of them busy.
        rebuild_share: Part of the rows that may be recomputed while others wait, 0 to 1.
        decode_share: Part of the rows that decoding may take while prompts wait, above 0, up to 1.

    Raises:
        ValueError: A limit is out of its range.
    """

    rows: int = 256
    sessions: int = 64
    in_flight: int = 1
    rebuild_share: float = 0.5
    decode_share: float = 0.75

    def __post_init__(self) -> None:
        if min(self.rows, self.sessions, self.in_flight) < 1:
            raise ValueError("rows, sessions and in_flight must be at least 1")
        if not 0 < self.rebuild_share <= 1 or not 0 < self.decode_share <= 1:
            raise ValueError("rebuild_share and decode_share must be above 0, up to 1")

    def rebuild_rows(self, others_wait: bool) -> int:
        """Rows of a wave that may be recomputed ones."""
        return max(1, int(self.rows * self.rebuild_share)) if others_wait else self.rows


@dataclass(frozen=True, slots=True)
class WaveItem:
    """A session's part of a wave.

    Attributes:
        session: The session.
        position: Of its first row.
        tokens: The tokens of its rows.
        kind: Why it is there.
        answers: Whether the row behind it is not known: the last stage is to sample it.
    """

    session: str
    position: int
    tokens: tuple[int, ...]
    kind: WaveKind
    answers: bool


@dataclass(frozen=True, slots=True)
class Wave:
    """A wave, numbered from 1 on; `items` is never empty."""

    number: int
    items: tuple[WaveItem, ...]

    @property
    def rows(self) -> int:
        """Rows of all sessions together."""
        return sum(len(item.tokens) for item in self.items)


@dataclass(slots=True)
class _Session:
    tokens: list[int]
    sent: int = 0
    """Rows that are in a wave, or were."""
    rebuilt: int = 0
    """Rows before this position were computed before."""
    served: int = 0
    waves: set[int] = field(default_factory=set)
    answering: bool = False
    """Whether a wave in flight samples its next token."""

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.sent


class WaveMachine:
    """The sessions of one path of stages, as the stage sees them that starts the waves.

    Args:
        limits: What a wave may hold.
        cached: Whether the stages keep keys and values. Without, each wave has a session's whole history.
    """

    def __init__(self, limits: WaveLimits, *, cached: bool = True) -> None:
        self.limits, self.cached = limits, cached
        self._sessions: dict[str, _Session] = {}
        self._waves: dict[int, Wave] = {}
        self._number = 0

    @property
    def sessions(self) -> tuple[str, ...]:
        """Sessions that are neither finished nor cancelled, in order of admission."""
        return tuple(self._sessions)

    @property
    def in_flight(self) -> tuple[Wave, ...]:
        """Waves whose end was not reported, in order."""
        return tuple(self._waves.values())

    @property
    def rows_waiting(self) -> int:
        """Rows that are in no wave yet: how busy the path is."""
        return sum(session.pending for session in self._sessions.values())

    def tokens(self, session: str) -> tuple[int, ...]:
        """Prompt and answer so far.

        Raises:
            KeyError: There is no such session.
        """
        return tuple(self._sessions[session].tokens)

    def admit(self, session: str, tokens: Sequence[int]) -> bool:
        """A session begins, or goes on elsewhere with the tokens it has so far.

        Returns:
            Whether it is new here; one that is known is left as it is.

        Raises:
            ValueError: It has no token at all.
        """
        if not tokens:
            raise ValueError(f"session {session} has no tokens")
        if session in self._sessions:
            return False
        self._sessions[session] = _Session(list(tokens), served=self._number)
        return True

    def end(self, session: str) -> bool:
        """A session is finished or cancelled: it joins no wave any more, and what comes for it is dropped.

        Returns:
            Whether it was known.
        """
        return self._sessions.pop(session, None) is not None

    def returned(self, number: int, sampled: Mapping[str, int]) -> tuple[str, ...]:
        """A wave went through the last stage.

        Args:
            number: The wave's number; one that is not in flight is ignored.
            sampled: Session → its next token, of the items that answer. A session that is left out gets its
                token with a later wave.

        Returns:
            Sessions that went on by a token.
        """
        wave = self._waves.pop(number, None)
        grown: list[str] = []
        for item in wave.items if wave else ():
            session = self._sessions.get(item.session)
            if session is None or number not in session.waves:
                continue
            session.waves.discard(number)
            if not item.answers:
                continue
            session.answering = False
            behind = item.position + len(item.tokens)
            if item.session not in sampled:
                session.sent = min(session.sent, behind - 1)
            elif behind == len(session.tokens):
                session.tokens.append(sampled[item.session])
                if not self.cached:
                    session.sent = 0
                grown.append(item.session)
        return tuple(grown)

    def broken(self, number: int) -> None:
        """A wave was lost on its way: its rows, and those of its sessions behind them, are sent again."""
        wave = self._waves.pop(number, None)
        for item in wave.items if wave else ():
            session = self._sessions.get(item.session)
            if session is not None and number in session.waves:
                session.waves.clear()
                session.answering = False
                session.sent = min(session.sent, item.position)

    def lost_rows(self, session: str, rows_left: int = 0) -> None:
        """This stage has lost a session's keys and values from `rows_left` on; they are computed again."""
        known = self._sessions.get(session)
        if known is None or not self.cached:
            return
        known.rebuilt = max(known.rebuilt, known.sent)
        known.sent = min(known.sent, rows_left)

    def next_wave(self) -> Wave | None:
        """The next wave; None: as many as may be are in flight, or nobody waits."""
        if len(self._waves) >= self.limits.in_flight:
            return None
        items = self._chosen()
        if not items:
            return None
        self._number += 1
        wave = Wave(self._number, tuple(items))
        self._waves[wave.number] = wave
        for item in items:
            session = self._sessions[item.session]
            session.sent = item.position + len(item.tokens)
            session.served = wave.number
            session.waves.add(wave.number)
            session.answering = session.answering or item.answers
        return wave

    def _chosen(self) -> list[WaveItem]:
        waiting = sorted(
            (name for name, session in self._sessions.items() if session.pending and not session.answering),
            key=lambda name: self._sessions[name].served,
        )
        if not self.cached:
            return self._whole_histories(waiting)
        rebuilding = [name for name in waiting if self._rebuilds(name)]
        decoding = [name for name in waiting if not self._rebuilds(name) and self._decodes(name)]
        prompts = [name for name in waiting if not self._rebuilds(name) and not self._decodes(name)]
        limits = self.limits
        most = int(limits.rows * limits.decode_share) if prompts or rebuilding else limits.rows
        decoding = decoding[: min(max(1, most), self._fair_share())]
        items = [self._item(name, 1) for name in decoding]
        left = limits.rows - len(items)
        others_wait = bool(items or prompts)
        items += self._chunks(rebuilding, min(left, limits.rebuild_rows(others_wait)), len(items))
        left = limits.rows - sum(len(item.tokens) for item in items)
        return items + self._chunks(prompts, left, len(items))

    def _rebuilds(self, name: str) -> bool:
        return self._sessions[name].sent < self._sessions[name].rebuilt

    def _decodes(self, name: str) -> bool:
        session = self._sessions[name]
        return session.pending == 1 and session.sent > 0 and not session.waves

    def _fair_share(self) -> int:
        """Decoding sessions of one wave, so that each wave in flight has its part of them."""
        decoding = sum(1 for session in self._sessions.values() if session.sent >= len(session.tokens) - 1)
        return min(self.limits.sessions, max(1, -(-decoding // self.limits.in_flight)))

    def _chunks(self, names: Sequence[str], rows: int, sessions: int) -> list[WaveItem]:
        """Shares rows among sessions: what one leaves goes to those behind it."""
        names = names[: max(0, self.limits.sessions - sessions)]
        items: list[WaveItem] = []
        for index, name in enumerate(names):
            if rows <= 0:
                break
            share = max(min(rows, ALIGNED), rows // (len(names) - index))
            items.append(self._item(name, share))
            rows -= len(items[-1].tokens)
        return items

    def _item(self, name: str, most: int) -> WaveItem:
        session = self._sessions[name]
        begin = session.sent
        rebuilds = begin < session.rebuilt
        rows = min(most, (session.rebuilt if rebuilds else len(session.tokens)) - begin)
        if rows == most and (begin + rows) // ALIGNED * ALIGNED > begin:
            rows = (begin + rows) // ALIGNED * ALIGNED - begin
        kind = WaveKind.REBUILD if rebuilds else WaveKind.PREFILL
        if not rebuilds and self._decodes(name):
            kind = WaveKind.DECODE
        answers = not rebuilds and begin + rows == len(session.tokens)
        return WaveItem(name, begin, tuple(session.tokens[begin : begin + rows]), kind, answers)

    def _whole_histories(self, waiting: Sequence[str]) -> list[WaveItem]:
        items: list[WaveItem] = []
        rows = 0
        for name in waiting[: self.limits.sessions]:
            tokens = tuple(self._sessions[name].tokens)
            if items and rows + len(tokens) > self.limits.rows:
                break
            rows += len(tokens)
            items.append(WaveItem(name, 0, tokens, WaveKind.PREFILL, answers=True))
        return items


class RebuildQueue:
    """Rows that a stage behind the first has to compute again, from what its neighbour upstream has kept.

    Live waves go on meanwhile: beside each, at most the share of rows that `WaveLimits` gives. A session that
    waits here joins no live wave of this stage.
    """

    def __init__(self, limits: WaveLimits) -> None:
        self._limits = limits
        self._ranges: dict[str, tuple[int, int]] = {}

    @property
    def rows_waiting(self) -> int:
        """Rows that are still to be computed."""
        return sum(end - first for first, end in self._ranges.values())

    def waits(self, session: str) -> bool:
        """Whether some of a session's rows are still to be computed."""
        return session in self._ranges

    def add(self, session: str, first: int, end: int) -> None:
        """Rows `first` … `end - 1` of a session are lost."""
        if end > first:
            self._ranges[session] = (first, end)

    def drop(self, session: str) -> None:
        """A session has ended. Idempotent."""
        self._ranges.pop(session, None)

    def take(self, live_rows: int) -> list[tuple[str, int, int]]:
        """(session, first, end) of what is to be computed now; the caller computes all of it.

        Args:
            live_rows: Rows of the live wave beside it; 0: none waits, so that the whole budget is free.
        """
        left = min(self._limits.rebuild_rows(bool(live_rows)), max(1, self._limits.rows - live_rows))
        taken: list[tuple[str, int, int]] = []
        for session, (first, end) in list(self._ranges.items()):
            if left <= 0:
                break
            until = min(end, first + left)
            if until < end and until // ALIGNED * ALIGNED > first:
                until = until // ALIGNED * ALIGNED
            taken.append((session, first, until))
            left -= until - first
            if until == end:
                del self._ranges[session]
            else:
                self._ranges[session] = (until, end)
        return taken
