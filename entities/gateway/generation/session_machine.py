"""One session as its writer sees it: who works for it, which tokens came, what to do about losses. Pure.

Tokens are numbered by their position, counted from the prompt's first one. Whatever comes twice is dropped,
and what is missing is asked for by binding again: an owner answers with the tokens that it knows. So there is
no other protocol, whoever is killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from schemas.errors import IllegalTransition
from schemas.services.generation import GeneratedToken, Generation, SessionBound
from schemas.step import Member

Path = tuple[Member, ...]


class SessionState(StrEnum):
    QUEUED = "queued"
    """It has no path yet."""
    PREFILLING = "prefilling"
    """A path is chosen, and no token has come."""
    DECODING = "decoding"
    REBUILDING = "rebuilding"
    """An owner was lost, and no token has come since."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    FENCED = "fenced"
    """Another gateway writes it now."""


S = SessionState
OVER = frozenset({S.DONE, S.FAILED, S.CANCELLED, S.FENCED})
SESSION_TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    S.QUEUED: frozenset({S.PREFILLING}) | OVER,
    S.PREFILLING: frozenset({S.DECODING, S.REBUILDING}) | OVER,
    S.DECODING: frozenset({S.REBUILDING}) | OVER,
    S.REBUILDING: frozenset({S.DECODING}) | OVER,
    **{state: frozenset() for state in OVER},
}


@dataclass(frozen=True, kw_only=True)
class SessionTimes:
    """Patience of a session's writer, in seconds."""

    silence_s: float = 1.0  # without a sign of life; then the owners are asked, which costs a message each
    stuck_s: float = 20.0  # the owners answer and nothing proceeds; then another path: longer than any wave
    give_up_s: float = 120.0  # nothing proceeds on any path; then the request fails
    look_s: float = 0.2  # between two looks for a path while a stage has nobody


# --- effects ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ChoosePath:
    """Choose an owner of each stage, none of `avoid`; those of `keep` stay where they are."""

    avoid: frozenset[Member]
    keep: Path


@dataclass(frozen=True, slots=True)
class Bind:
    attempt: int
    path: Path


@dataclass(frozen=True, slots=True)
class Release:
    members: Path


@dataclass(frozen=True, slots=True)
class Recall:
    """Read what the stream of tokens has of this session: tokens with all that was told of them."""


@dataclass(frozen=True, slots=True)
class Deliver:
    token: GeneratedToken


@dataclass(frozen=True, slots=True)
class Finish:
    """The session is over. `failure`: why, as `CODE: TEXT`, if it failed."""

    ended: Literal["stop", "length", "cancelled", "failed", "fenced"]
    failure: str = ""


Effect = ChoosePath | Bind | Release | Recall | Deliver | Finish


@dataclass(slots=True)
class _Progress:
    at: float
    """When a token came, or a cache grew."""
    heard_at: float
    """When any owner said anything."""
    asked_at: float
    moved_at: float
    cached: dict[str, int] = field(default_factory=dict)


class GenerationMachine:
    """The state of one session. Each event returns the effects that the caller carries out, in order.

    `now`: seconds of one clock. `avoid`: whom its first path has to leave out. A machine whose session is
    over answers every event with no effect.
    """

    def __init__(
        self,
        generation: Generation,
        times: SessionTimes = SessionTimes(),
        *,
        now: float = 0.0,
        avoid: frozenset[Member] = frozenset(),
    ) -> None:
        self.state = S.QUEUED
        self.history: list[tuple[float, SessionState]] = [(now, S.QUEUED)]
        self.attempt = -1
        self.path: Path = ()
        self.answer: list[int] = []
        self.is_bound = False
        """Whether all owners of some path have taken the session."""
        self.is_whole = False
        """Whether an owner said that it has no cache: all are bound as whole from then on."""
        self._generation = generation
        self._times = times
        self._first = len(generation.prompt)
        sampling = generation.sampling
        self._detailed = sampling.logprobs is not None or sampling.digests
        self._ahead: dict[int, GeneratedToken] = {}
        self._plain: dict[int, int] = {}
        self._waiting: set[Member] = set()
        self._others = avoid
        self._avoid: set[Member] = set(avoid)
        self._full: set[Member] = set()
        self._look_at: float | None = None
        self._progress = _Progress(now, now, now, now)

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def next_position(self) -> int:
        return self._first + len(self.answer)

    # --- paths --------------------------------------------------------------------------------------------
    def begin(self, now: float) -> list[Effect]:
        """Look for the first path."""
        if self.over or self.path:
            return []
        if not self._generation.most_tokens:
            return self._finish("length", now)
        return [ChoosePath(frozenset(self._avoid), ())]

    def path_found(self, path: Path, now: float) -> list[Effect]:
        """The path that `ChoosePath` asked for."""
        if self.over:
            return []
        left = tuple(member for member in self.path if member not in path and member not in self._avoid)
        self.attempt += 1
        self.path, self._waiting, self._look_at = path, set(path), None
        if self.state is S.QUEUED:
            self._move(S.PREFILLING, now)
        elif self.attempt and self.state is not S.REBUILDING:
            self._move(S.REBUILDING, now)
        progress = self._progress
        progress.asked_at = progress.heard_at = progress.moved_at = now
        progress.cached.clear()
        released: list[Effect] = [Release(left)] if left else []
        return [*released, Bind(self.attempt, path)]

    def no_path(self, why: str, now: float) -> list[Effect]:
        """A stage has nobody who may work for this session now."""
        if self.over:
            return []
        # One that another gateway began is under way: it waits like any whose owners were lost.
        if not self.is_bound and self._generation.fence == 1:
            code = "full" if self._full else "unavailable"
            text = "all instances of a stage are full" if self._full else why
            return self._finish("failed", now, f"{code}: {text}")
        self._look_at = now + self._times.look_s
        return []

    def lost(self, members: Iterable[Member], now: float) -> list[Effect]:
        """These instances are gone, or leave."""
        lost = set(members)
        self._avoid |= lost
        if self.over or lost.isdisjoint(self.path):
            return []
        return self._choose_again(now)

    def _choose_again(self, now: float) -> list[Effect]:
        if self.state in (S.PREFILLING, S.DECODING):
            self._move(S.REBUILDING, now)
        avoid = frozenset(self._avoid | self._full)
        return [ChoosePath(avoid, tuple(each for each in self.path if each not in avoid))]

    # --- what owners say ----------------------------------------------------------------------------------
    def answered(self, member: Member, attempt: int, answer: SessionBound, now: float) -> list[Effect]:
        """An owner's answer to `BindSession`."""
        if self.over:
            return []
        if answer.outcome == "fenced":
            # An answer to an attempt that this machine has left says nothing of the present one.
            return self._finish("fenced", now) if attempt == self.attempt else []
        if attempt != self.attempt:
            return []
        self._progress.heard_at = now
        if answer.outcome == "too_long":
            return self._finish("failed", now, f"context_length_exceeded: {answer.text}")
        if answer.outcome == "full":
            self._full.add(member)
            return self._choose_again(now)
        if answer.outcome == "uncached":  # the version's record does not say so yet
            self.is_whole = True
            return [ChoosePath(frozenset(self._avoid | self._full), self.path)]
        self._waiting.discard(member)
        if not self._waiting:
            self.is_bound = True
            self._full.clear()
            self._avoid -= self._others  # whoever loses an owner from now on may have any
        if answer.cached > self._progress.cached.get(member.sid, 0):
            self._progress.cached[member.sid] = answer.cached
            self._progress.at = now
        return self._known(answer.tokens, now)

    def silent(self, member: Member, attempt: int, now: float) -> list[Effect]:
        """An owner did not answer `BindSession` in time, or nobody listens there."""
        if self.over or attempt != self.attempt:
            return []
        return self.lost((member,), now)

    def tokens(self, tokens: Iterable[GeneratedToken], now: float) -> list[Effect]:
        """Tokens of this session, in any order, however often."""
        effects: list[Effect] = []
        for token in tokens:
            if self.over:
                break
            if token.fence > self._generation.fence:
                return [*effects, *self._finish("fenced", now)]
            self._progress.heard_at = now
            if token.error:
                effects += self._finish("failed", now, token.error)
            elif token.position >= self.next_position:
                self._ahead.setdefault(token.position, token)
                effects += self._deliver(now)
        return effects

    def recalled(self, tokens: Iterable[GeneratedToken], now: float) -> list[Effect]:
        """The stream's tokens, after `Recall`; of what it has lost, only the tokens themselves are known."""
        effects = self.tokens(tokens, now)
        return effects if self.over else effects + self._take_plain(now)

    def _known(self, answer: tuple[int, ...], now: float) -> list[Effect]:
        """Tokens of the answer that an owner knows, without what was told of them."""
        have = len(self.answer)
        self._plain = {self._first + number: token for number, token in enumerate(answer) if number >= have}
        if not self._plain:
            return []
        return [Recall()] if self._detailed else self._take_plain(now)

    def _take_plain(self, now: float) -> list[Effect]:
        plain, self._plain = self._plain, {}
        for position, token in plain.items():
            if position not in self._ahead:
                fence, session = self._generation.fence, self._generation.session
                self._ahead[position] = GeneratedToken(
                    session=session, fence=fence, position=position, token=token
                )
        return self._deliver(now)

    def _deliver(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while not self.over and (token := self._ahead.pop(self.next_position, None)) is not None:
            self.answer.append(token.token)
            ends = token.ends or self._ends(token.token)
            effects.append(Deliver(token.model_copy(update={"ends": ends}) if ends != token.ends else token))
            self._progress.at = now
            if self.state is not S.DECODING:
                if self.state is S.QUEUED:
                    self._move(S.PREFILLING, now)
                self._move(S.DECODING, now)
            if ends:
                effects += self._finish(ends, now)
        return effects

    def _ends(self, token: int) -> Literal["", "stop", "length"]:
        if token in self._generation.sampling.stop_tokens:
            return "stop"
        return "length" if len(self.answer) >= self._generation.most_tokens else ""

    # --- time and ends ------------------------------------------------------------------------------------
    def tick(self, now: float) -> list[Effect]:
        """Time passes."""
        if self.over or (self.state is S.QUEUED and self._look_at is None):
            return []
        progress, times = self._progress, self._times
        if now - progress.at > times.give_up_s:
            text = f"no token for {times.give_up_s:g} s"
            return self._finish("failed", now, f"unavailable: {text}")
        if self._look_at is not None:
            if now < self._look_at:
                return []
            self._look_at = None
            # Who was only silent may be back; who is gone is offered no more.
            self._full.clear()
            self._avoid.clear()
            return self._choose_again(now)
        if now - max(progress.at, progress.moved_at) > times.stuck_s:
            progress.moved_at = now
            return [ChoosePath(frozenset(self._avoid | set(self.path)), ()), *self._ask(now)]
        heard = progress.at if self._ahead else progress.heard_at  # a gap: what was heard was not the next
        if now - max(heard, progress.asked_at) > times.silence_s:
            return self._ask(now)
        return []

    def _ask(self, now: float) -> list[Effect]:
        self._progress.asked_at = now
        return [Bind(self.attempt, self.path)]

    def stop(self, now: float) -> list[Effect]:
        """A text that ends the answer has come."""
        return self._finish("stop", now)

    def cancel(self, now: float) -> list[Effect]:
        """Its client is gone."""
        return self._finish("cancelled", now)

    def fence(self, now: float) -> list[Effect]:
        """Another gateway writes it, or this one anew."""
        return self._finish("fenced", now)

    def _finish(
        self,
        ended: Literal["stop", "length", "cancelled", "failed", "fenced"],
        now: float,
        failure: str = "",
    ) -> list[Effect]:
        if self.over:
            return []
        state = {"cancelled": S.CANCELLED, "failed": S.FAILED, "fenced": S.FENCED}.get(ended, S.DONE)
        self._move(state, now)
        living = tuple(member for member in self.path if member not in self._avoid)
        # A fenced writer orders nobody: the owners work for another one.
        released: list[Effect] = [Release(living)] if living and ended != "fenced" else []
        return [*released, Finish(ended, failure)]

    def _move(self, state: SessionState, now: float) -> None:
        if state not in SESSION_TRANSITIONS[self.state]:
            raise IllegalTransition(
                f"session {self._generation.session}: {self.state} to {state}, after {self.history}"
            )
        self.state = state
        self.history.append((now, state))
