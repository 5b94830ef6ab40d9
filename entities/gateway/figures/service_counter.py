"""Counts of what this gateway answers, by service and version. No clock of its own, and no I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from entities.gateway.generation.path_choice import UNKNOWN, KnownLoad
from entities.gateway.generation.session import GenerationSession
from entities.gateway.generation.session_machine import SessionState
from schemas.errors import DmscError, errors_below
from schemas.services.figures import FIRST_TOKEN_S, MOST_VERSIONS, VersionFigures
from schemas.services.generation import Generation
from schemas.telemetry import SessionLoad

REFUSED = frozenset({"full", "unavailable", "service_full"})
"""Outcomes of requests for which there was no room, or nobody."""
KNOWN = REFUSED | {"context_length_exceeded"} | {each.code for each in errors_below(DmscError)}
"""Outcomes that are counted by name. Any other is `failed`: its name may be made up by whoever asks, or by a
model's code, and each name is a series of the metrics for ever."""
KEPT = 1_000
"""Versions with counts; of more, those that are asked nothing and were asked longest ago are dropped."""

Key = tuple[str, str]


@dataclass(slots=True)
class VersionCount:
    """The counts of one version, and its answers under way."""

    job: str
    requests: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    prompt_tokens: int = 0
    first_token: list[int] = field(default_factory=lambda: [0] * (len(FIRST_TOKEN_S) + 1))
    first_token_s: float = 0.0
    open: dict[int, GenerationSession] = field(default_factory=dict)
    predicting: int = 0
    silent: set[int] = field(default_factory=set)
    """Of those under way, the sessions whose first token is still to be counted."""


class ServiceCounter:
    """Counts sessions and predictions.

    Args:
        loads: What instances said of themselves, by SID.
        members: The SIDs of a job's instances.
        fresh_s: What an instance said of its load counts for so long, seconds: it speaks with each answer's
            pieces, and a dead one says no more.
    """

    def __init__(
        self,
        loads: Mapping[str, KnownLoad],
        members: Callable[[str], Iterable[str]] = lambda job: (),
        fresh_s: float = 10.0,
    ) -> None:
        self._loads = loads
        self._fresh_s = fresh_s
        self._members = members
        self._versions: dict[Key, VersionCount] = {}
        self._told: dict[Key, tuple[VersionFigures, float]] = {}
        """What was told last of each version, and when it was another one before."""

    # --- what happens -------------------------------------------------------------------------------------
    def session(self, session: GenerationSession) -> None:
        """A session begins at this gateway, or goes on here."""
        generation = session.generation
        count = self._of(generation)
        count.open[generation.session] = session
        if generation.fence == 1:  # its beginning is that of the request
            count.prompt_tokens += len(generation.prompt)
            count.silent.add(generation.session)
        session.on_end(lambda tokens: self._ended(count, session, tokens))

    def _ended(self, count: VersionCount, session: GenerationSession, tokens: int) -> None:
        self._look_at(count, session)
        number, finish = session.generation.session, session.finished
        count.silent.discard(number)
        if count.open.get(number) is session:
            del count.open[number]
        count.tokens += tokens
        if finish is None or finish.ended == "fenced":
            return  # whoever goes on with it counts it
        if finish.ended == "failed":
            code = finish.failure.partition(":")[0]
            count.requests[code if code in KNOWN else "failed"] += 1
        else:
            count.requests["cancelled" if finish.ended == "cancelled" else "ok"] += 1

    @contextmanager
    def prediction(self, generation: Generation) -> Iterator[None]:
        """A request for tensors, for the length of the block; errors of this project are counted by code."""
        count = self._of(generation)
        count.predicting += 1
        outcome = "cancelled"
        try:
            yield
            outcome = "ok"
        except DmscError as error:
            outcome = error.code if error.code in KNOWN else "failed"
            raise
        finally:
            count.predicting -= 1
            count.requests[outcome] += 1

    def _of(self, generation: Generation) -> VersionCount:
        key = (generation.service, generation.version)
        count = self._versions.pop(key, None)
        if count is None or (count.job != generation.job and not count.open):
            count = VersionCount(generation.job)  # a version of that name was removed, and is another one now
        self._versions[key] = count
        if len(self._versions) > KEPT:
            idle = next(
                (each for each, kept in self._versions.items() if not (kept.open or kept.predicting)), key
            )
            if idle != key:
                del self._versions[idle]
                self._told.pop(idle, None)
        return count

    @staticmethod
    def _look_at(count: VersionCount, session: GenerationSession) -> None:
        number = session.generation.session
        if number not in count.silent:
            return
        history = session.machine.history
        at = next((at for at, state in history if state is SessionState.DECODING), None)
        if at is not None:
            taken_s = max(0.0, at - history[0][0])
            count.first_token[bisect_left(FIRST_TOKEN_S, taken_s)] += 1
            count.first_token_s += taken_s
            count.silent.discard(number)

    # --- what is told -------------------------------------------------------------------------------------
    def figures(self, now: float) -> Iterator[VersionFigures]:
        """All versions as they are now. `now`: seconds of the clock of `KnownLoad.at`."""
        for key in self._versions:
            yield self._figures(key, now)

    def changed(self, now: float, again_from: float | None = None) -> tuple[VersionFigures, ...]:
        """The versions that are others than they were told, at most `MOST_VERSIONS`; they count as told now.

        Args:
            now: Seconds of the clock of `KnownLoad.at`, which only advances.
            again_from: Tell those again, too, that changed since then or have an answer under way: for
                whoever listens only now, or takes silence for this gateway's end.
        """
        found: list[VersionFigures] = []
        for key in reversed(self._versions):
            figures, (told, at) = self._figures(key, now), self._told.get(key, (None, now))
            if figures != told:
                at = now
            elif again_from is None or (at < again_from and not figures.sessions):
                continue
            found.append(figures)
            self._told[key] = (figures, at)
            if len(found) == MOST_VERSIONS:
                break
        return tuple(found)

    def _figures(self, key: Key, now: float) -> VersionFigures:
        count = self._versions[key]
        for number in tuple(count.silent):
            if (session := count.open.get(number)) is not None:
                self._look_at(count, session)
        return VersionFigures(
            service=key[0],
            version=key[1],
            job=count.job,
            requests=dict(sorted(count.requests.items())),
            refused=sum(times for outcome, times in count.requests.items() if outcome in REFUSED),
            tokens=count.tokens + sum(len(each.machine.answer) for each in count.open.values()),
            prompt_tokens=count.prompt_tokens,
            first_token=tuple(count.first_token),
            first_token_s=round(count.first_token_s, 6),
            sessions=len(count.open) + count.predicting,
            waiting=sum(not each.machine.answer for each in count.open.values()),
            loads=self._loads_of(count, now),
        )

    def _loads_of(self, count: VersionCount, now: float) -> dict[str, SessionLoad]:
        known = {sid: self._loads[sid] for sid in self._members(count.job) if sid in self._loads}
        fresh = {sid: load for sid, load in known.items() if now - load.at <= self._fresh_s}
        return {sid: load.said for sid, load in fresh.items() if load.said != UNKNOWN}
