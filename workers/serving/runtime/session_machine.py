"""The sessions of one instance: bound, computed, handed on, asked for, ended. Pure (ADR-0144).

An owner of a stage keeps the rows that it gives to the next owner, from the session's first on, and a cursor:
how many of them the next owner has. All recovery is that cursor going back: a new next owner gets them from
the first on, one that lacks some asks for them, and a row whose token does not come is sent again. An owner
computes each row once, whoever sends it how often, so that repetitions cost nothing but their way.

Nothing here has a clock, a tensor or a socket: `now` is given in seconds of any clock that only advances.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from schemas.errors import BadInput
from schemas.services.generation import (
    BindSession,
    EndSession,
    GeneratedToken,
    RowsNeeded,
    SessionBound,
)
from schemas.step import Member
from schemas.telemetry import SessionLoad
from workers.serving.runtime.session_table import (
    BLOCK_ROWS,
    AskForRows,
    BoundSession,
    ForgetSession,
    PublishAgain,
    SentRows,
    ServingLimits,
    SessionEffect,
    WaveRows,
    blocks_of,
)
from workers.serving.runtime.wave_choice import choose_wave

MOST_MISSED = 4096
"""Sessions that are remembered because rows came before their binding."""


class SessionMachine:
    """All sessions of an instance.

    Args:
        me: This instance.
        job: The version's job.
        limits: What it takes on.
    """

    def __init__(self, me: Member, job: str, limits: ServingLimits) -> None:
        self.limits = limits
        self._me, self._job = me, job
        self._sessions: dict[int, BoundSession] = {}
        self._missed: dict[int, tuple[int, int]] = {}
        self._effects: list[SessionEffect] = []
        self._waves = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session: int) -> BoundSession | None:
        """The session of this number; None: it is not bound."""
        return self._sessions.get(session)

    def effects(self) -> list[SessionEffect]:
        """What is to be done since the last call, in order."""
        taken, self._effects = self._effects, []
        return taken

    def load(self, wave_ms: float = 0.0) -> SessionLoad:
        """How much there is to do, and room for how much more."""
        return SessionLoad(
            sessions=len(self._sessions),
            most_sessions=self.limits.sessions,
            free_rows=max(0, self._free_blocks()) * BLOCK_ROWS,
            rows=self.limits.blocks * BLOCK_ROWS,
            wave_ms=round(wave_ms, 3),
        )

    def _free_blocks(self) -> int:
        return self.limits.blocks - sum(each.blocks for each in self._sessions.values())

    # --- orders of the gateway ----------------------------------------------------------------------------
    def follow(self) -> None:
        """Has no cache from now on, because another stage has none; see `BindSession.whole`.

        Sessions that it has are forgotten: their gateways bind them again.
        """
        self.limits = replace(self.limits, whole=True)
        for session in list(self._sessions.values()):
            self._forget(session)

    def bind(self, order: BindSession, now: float) -> SessionBound:
        """Works for a session from now on, or on another path. Idempotent.

        Raises:
            BadInput: The order can't be obeyed by anybody: its path or its tokens are wrong.
        """
        self._check(order)
        if order.path[self.limits.stage] != self._me:
            return self._answer(order, "fenced", f"this is {self._me.sid} {self._me.incarnation}")
        known = self._sessions.get(order.session)
        if known is not None and (order.fence, order.attempt) < known.key:
            return self._answer(order, "fenced", f"fence {known.order.fence}, attempt {known.order.attempt}")
        if self.limits.whole and not order.whole:  # it can't go on from rows that it does not have
            return self._answer(order, "uncached", f"{self._me.sid} has no cache: bind the session as whole")
        if known is None:
            refusal = self._refusal(order)
            if refusal is not None:
                return refusal
            self._begin(order, now)
        else:
            self._rebind(known, order, now)
        return self._answer(order, "bound")

    def _check(self, order: BindSession) -> None:
        limits = self.limits
        if len(order.path) != limits.stages:
            raise BadInput(f"a path of {len(order.path)} owners, but the version has {limits.stages} stages")
        if not 0 < order.prompt_tokens <= len(order.tokens):
            raise BadInput(f"session {order.session} has {len(order.tokens)} tokens, and no prompt of them")
        worst = max(order.tokens)
        if min(order.tokens) < 0 or (limits.vocabulary and worst >= limits.vocabulary):
            raise BadInput(f"token {worst} is none of the model's {limits.vocabulary} tokens")

    def _refusal(self, order: BindSession) -> SessionBound | None:
        limits, tokens = self.limits, order.prompt_tokens + order.most_tokens
        if tokens > limits.context:
            text = f"{order.prompt_tokens} tokens of prompt and {order.most_tokens} of answer"
            return self._answer(order, "too_long", f"{text}, but at most {limits.context} in all")
        if blocks_of(tokens) > limits.blocks:
            text = f"{tokens} tokens need more than all room, which is for {limits.blocks * BLOCK_ROWS}"
            return self._answer(order, "too_long", text)
        if len(self._sessions) >= limits.sessions:
            return self._answer(order, "full", f"{len(self._sessions)} sessions")
        if blocks_of(tokens) > self._free_blocks():
            free = max(0, self._free_blocks()) * BLOCK_ROWS
            return self._answer(order, "full", f"room for {free} tokens, but {tokens} are needed")
        return None

    def _begin(self, order: BindSession, now: float) -> None:
        session = BoundSession(order, list(order.tokens), order.prompt_tokens, touched=now)
        goes_on = len(order.tokens) > order.prompt_tokens
        if goes_on:  # owners behind this one have all rows but the last, or ask for them
            session.rebuilt = len(order.tokens) - 1
            session.cursor = 0 if self.limits.whole else session.rebuilt
        self._sessions[order.session] = session
        self._feed(session, now)
        missed = self._missed.pop(order.session, None)
        if missed == session.key:
            self._ask(session, now)

    def _rebind(self, session: BoundSession, order: BindSession, now: float) -> None:
        before = session.order
        again = (order.fence, order.attempt) == session.key
        lacking = len(order.tokens)
        session = self._take_tokens(session, order.tokens)
        session.touched = now
        if again:
            self._feed(session, now)
            return
        session.order = order
        session.asked = (-1, now)
        if not self.limits.is_last:
            following = self.limits.stage + 1
            moved = before.path[following] != order.path[following]
            back = 0 if moved or self.limits.whole else max(0, session.computed - 1)
            session.cursor = min(session.cursor, back)
        elif lacking < len(session.tokens):
            again_told = range(lacking, len(session.tokens))
            self._effects.append(PublishAgain(tuple(self._known_token(session, at) for at in again_told)))
        self._feed(session, now)

    def _take_tokens(self, session: BoundSession, tokens: Sequence[int]) -> BoundSession:
        """Learns tokens of the answer. Where they are others than here, those of the gateway count.

        Only without exact arithmetic they can be: then what was computed of the others is dropped, and the
        session is another one for the wave that is under way.
        """
        same = min(len(tokens), len(session.tokens))
        other = next((at for at in range(same) if tokens[at] != session.tokens[at]), None)
        if other is not None:
            left = 0 if self.limits.whole else other
            session = self._sessions[session.number] = replace(
                session,
                tokens=list(tokens),
                sampled={at: each for at, each in session.sampled.items() if at < other},
                available=min(session.available, left),
                computed=min(session.computed, left),
                cursor=min(session.cursor, left),
                finished=False,
            )
            self._effects.append(ForgetSession(session.number, left))
        elif len(tokens) > len(session.tokens):
            session.tokens += tokens[len(session.tokens) :]
        return session

    def _feed(self, session: BoundSession, now: float) -> None:
        """The first stage has a row for each token that is not the last possible one."""
        if self.limits.is_first and not session.finished:
            session.available = min(len(session.tokens), session.most_tokens - 1)
            session.pause_s = self.limits.repeat_s
            session.repeat_at = now + session.pause_s

    def end(self, order: EndSession) -> bool:
        """Forgets a session; an older writer than its own ends nothing. Returns whether it was there."""
        session = self._sessions.get(order.session)
        if session is None or order.fence < session.order.fence:
            return False
        self._forget(session)
        return True

    def _forget(self, session: BoundSession) -> None:
        del self._sessions[session.number]
        self._effects.append(ForgetSession(session.number))

    def _answer(self, order: BindSession, outcome: str, text: str = "") -> SessionBound:
        session = self._sessions.get(order.session) if outcome == "bound" else None
        known = session is not None and (self.limits.is_first or self.limits.is_last)
        return SessionBound(
            session=order.session,
            outcome=outcome,
            cached=session.computed if session is not None else 0,
            tokens=tuple(session.tokens[session.prompt_tokens :]) if session is not None and known else (),
            load=self.load(),
            text=text,
        )

    # --- rows from upstream -------------------------------------------------------------------------------
    def arrived(self, item: SentRows, now: float) -> int | None:
        """Rows of a session have come.

        Returns:
            How many of them, from the first on, are here already; the rest is to be kept, behind those that
            came before. None: all are dropped.
        """
        session = self._sessions.get(item.session)
        if session is None or (item.fence, item.attempt) > session.key:
            self._missed[item.session] = (item.fence, item.attempt)
            while len(self._missed) > MOST_MISSED:
                del self._missed[next(iter(self._missed))]
            return None
        if (item.fence, item.attempt) < session.key:
            return None
        session.touched = now
        end = item.first + item.rows
        if self.limits.whole:
            if item.first:  # of a sender that has a cache: the rest of this history is not here
                self._ask(session, now)
                return None
            if end <= session.available:
                self._repeated(session, end)
                return None
            session.available = end
            return 0
        if item.first > session.available:
            self._ask(session, now)
            return None
        if end <= session.available:
            self._repeated(session, end)
            return None
        skipped = session.available - item.first
        session.available = end
        return skipped

    def _repeated(self, session: BoundSession, end: int) -> None:
        """Somebody waits for what came of the row before `end`: it goes on its way once more."""
        if end > session.computed:
            return  # it is still to be computed
        if not self.limits.is_last:
            session.cursor = 0 if self.limits.whole else min(session.cursor, max(0, end - 1))
        elif end < len(session.tokens) and end >= session.prompt_tokens:
            self._effects.append(PublishAgain((self._known_token(session, end),)))

    def _known_token(self, session: BoundSession, position: int) -> GeneratedToken:
        sampled = session.sampled.get(position)
        if sampled is not None:
            return sampled.model_copy(update={"fence": session.order.fence})
        return GeneratedToken(
            session=session.number,
            fence=session.order.fence,
            position=position,
            token=session.tokens[position],
            ends=self.ends(session, position, session.tokens[position]),
        )

    def _ask(self, session: BoundSession, now: float) -> None:
        if self.limits.is_first:
            return
        rows, at = session.asked
        if rows == session.available and now < at + self.limits.ask_again_s:
            return
        session.asked = (session.available, now)
        order = RowsNeeded(
            job=self._job,
            session=session.number,
            fence=session.order.fence,
            attempt=session.order.attempt,
            first=0 if self.limits.whole else session.available,
            member=self._me,
        )
        self._effects.append(AskForRows(session.order.path[self.limits.stage - 1], order))

    # --- waves --------------------------------------------------------------------------------------------
    def take_wave(self) -> list[WaveRows]:
        """What is to be computed now; empty: nothing. Call `computed` before the next."""
        wave = choose_wave(self._sessions.values(), self.limits)
        if wave:
            self._waves += 1
        for item in wave:
            item.session.served = self._waves
        return wave

    def computed(self, item: WaveRows, now: float) -> bool:
        """An item of a wave was computed.

        Returns:
            Whether it counts: its session may have ended or gone back meanwhile.
        """
        session = item.session
        if self._sessions.get(session.number) is not session:
            return False
        if not self.limits.whole and item.first != session.computed:
            return False
        if item.first + item.rows > session.available:
            return False
        session.computed = item.first + item.rows
        session.touched = now
        if self.limits.is_first:
            session.repeat_at = max(session.repeat_at, now + session.pause_s)
        return True

    def ends(self, session: BoundSession, position: int, token: int) -> str:
        """Why a token at a position is the last one; empty: it is not."""
        if token in session.order.sampling.stop_tokens:
            return "stop"
        return "length" if position + 1 >= session.most_tokens else ""

    def sampled(self, session: BoundSession, token: GeneratedToken, now: float) -> None:
        """The last stage has a token, or the reason why there is none."""
        session.touched = now
        session.finished = bool(token.ends or token.error)
        if token.error:
            return
        session.sampled[token.position] = token
        if token.position == len(session.tokens):
            session.tokens.append(token.token)
        self._feed(session, now)

    def heard(self, owner: Member, tokens: Iterable[GeneratedToken], now: float) -> None:
        """First stage: the last one has published tokens."""
        for token in tokens:
            session = self._sessions.get(token.session)
            if session is None or session.order.path[-1] != owner or token.fence != session.order.fence:
                continue
            session.touched = now
            if token.error:
                session.finished = True
            elif token.position == len(session.tokens):
                session.tokens.append(token.token)
                session.finished = bool(token.ends)
                self._feed(session, now)
            elif token.position > len(session.tokens):  # an earlier one was lost
                session.cursor = min(session.cursor, len(session.tokens) - 1)

    def failed(self, session: BoundSession, error: str, now: float) -> GeneratedToken:
        """A session's rows can't be computed here; returns what its gateway is to be told."""
        session.finished = True
        session.touched = now
        return GeneratedToken(
            session=session.number,
            fence=session.order.fence,
            position=len(session.tokens),
            token=0,
            error=error[:500],
        )

    # --- rows for downstream ------------------------------------------------------------------------------
    def receivers(self) -> set[Member]:
        """Next owners that are to be sent something."""
        if self.limits.is_last:
            return set()
        following = self.limits.stage + 1
        return {each.order.path[following] for each in self._sessions.values() if _unsent(each)}

    def outgoing(self, receiver: Member, most_rows: int) -> list[SentRows]:
        """What this owner is to be sent now; it counts as sent unless `unsent` says otherwise.

        Without a cache a hop has one session: histories are of different lengths.
        """
        following = self.limits.stage + 1
        chosen: list[SentRows] = []
        for session in self._sessions.values():
            if most_rows <= 0 or (self.limits.whole and chosen):
                break
            if session.order.path[following] != receiver or not _unsent(session):
                continue
            first = 0 if self.limits.whole else session.cursor
            rows = session.computed - first if self.limits.whole else min(most_rows, session.computed - first)
            chosen.append(SentRows(session.number, *session.key, first, rows))
            session.cursor = first + rows
            most_rows -= rows
        return chosen

    def unsent(self, items: Iterable[SentRows]) -> None:
        """These rows did not get there."""
        for item in items:
            session = self._sessions.get(item.session)
            if session is not None and session.key == (item.fence, item.attempt):
                session.cursor = min(session.cursor, item.first)

    def needed(self, order: RowsNeeded) -> None:
        """The next owner lacks rows."""
        session = self._sessions.get(order.session)
        if session is None or session.key != (order.fence, order.attempt) or self.limits.is_last:
            return
        if session.order.path[self.limits.stage + 1] == order.member:
            session.cursor = min(session.cursor, order.first)

    # --- time ---------------------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Repeats what has no answer, and forgets sessions that nobody cares for."""
        for session in list(self._sessions.values()):
            if now >= session.touched + self.limits.patience_s:
                self._forget(session)
            elif self._waits_for_token(session) and now >= session.repeat_at:
                session.cursor = min(session.cursor, 0 if self.limits.whole else session.computed - 1)
                session.pause_s = min(2 * session.pause_s, self.limits.repeat_most_s)
                session.repeat_at = now + session.pause_s

    def _waits_for_token(self, session: BoundSession) -> bool:
        limits = self.limits
        waits = limits.is_first and not limits.is_last and not session.finished
        return waits and session.available == session.computed > 0


def _unsent(session: BoundSession) -> bool:
    return session.computed > session.cursor and not session.finished
