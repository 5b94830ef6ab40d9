"""Late binding: which instance of the next stage gets this microbatch (DESIGN §2, §5 rule 1).

The router hands out weights and what it measured; the owner of a microbatch chooses when it is about to send,
by what it knows best: how much of its own work is still open at each candidate, what each said of itself when
it last answered, and how long its own transfers take there. The order among candidates is the algorithm's
(`balancers`); windows, fences and weights are kept here, whatever the algorithm.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median

from bus.logs import get_logger
from schemas.data_plane import HopLoad, RouteTable
from schemas.errors import DmscError
from schemas.step import Member
from workers.links.link_quality import LinkCost
from workers.routing.algorithms import balancer
from workers.routing.balancers import UNKNOWN_MS, Balancer, Candidate
from workers.routing.expected_completion import TRIAL_PART

log = get_logger("routing")

ALIKE = 0.15
"""Instances whose service times differ by less than this part from the stage's median count as equal, so that
noise does not tell them apart; and a new figure that differs less from the old one changes nothing."""

SLOWEST_MS = 1e7
"""Almost three hours per microbatch. A report beyond that, or not above 0, is not believed."""

MOST_OPEN = 4096
"""Microbatches that one instance can have open: the most that a step has."""

LINK_PART = 0.1
LINK_MS = 2.0
"""Links whose transfers take longer than the best one's by less than this part of the usual service time, and
by less than this, count as equal to it; once they do not, half of it makes them equal again."""

REVIEW_S = 0.5
"""Links are looked at again this often: they may have changed without any work of this sender."""

GOLDEN = 0.6180339887498949


class _Stage:
    """The candidates of one stage, as its table and their own words have them."""

    def __init__(self, algorithm: str, seed: int) -> None:
        self.algorithm = algorithm
        self.balancer: Balancer = balancer(algorithm, seed)
        self.candidates: dict[str, Candidate] = {}
        self.reported: dict[str, float] = {}  # SID → latest service time, by itself or the router
        self.heard: set[str] = set()  # who said so itself since the last table, which is older then
        self.usual_ms = UNKNOWN_MS
        self.news = 0
        self.told_ms: dict[str, float] = {}  # SID → transfer time, by the router
        self.best_ms = math.inf  # the shortest transfer time; infinite: none is known
        self.best_told_ms = math.inf
        self.linked: set[str] = set()  # whose links are looked at again
        self.reviewed_at = -math.inf

    def effective_ms(self, sid: str) -> float:
        """What a candidate counts with: those near the median, and unknown ones, with the median."""
        found = self.reported.get(sid)
        if found is None or abs(found / self.usual_ms - 1.0) <= ALIKE:
            return self.usual_ms
        return found

    def settle(self) -> None:
        """Takes the median anew, and everybody's place in the order. O(candidates)."""
        self.take_speeds()
        self.balancer.reset(list(self.candidates.values()))

    def take_speeds(self) -> None:
        """Takes the median anew, and what everybody counts with."""
        self.news = 0
        known = [ms for sid, ms in self.reported.items() if sid in self.candidates]
        self.usual_ms = median(known) if known else UNKNOWN_MS
        for sid, candidate in self.candidates.items():
            candidate.service_ms = self.effective_ms(sid)


class Binder:
    """The present tables and this sender's open microbatches. All calls on the event loop.

    Args:
        cluster: the sender's own; preferred between equals.
        place: number of this sender among its like: each begins its turns elsewhere, so that they do not all
            send to the same one first.
        microbatches: of a step; 0: unknown, then nothing is held back at a step's end.
        link_cost: what this sender's own transfers to an instance take; None: nothing went there yet. Without
            it only the router's word counts.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cluster: str,
        *,
        place: int = 0,
        microbatches: int = 0,
        link_cost: Callable[[Member], LinkCost | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._place = place
        self._microbatches = microbatches
        self._link_cost = link_cost
        self._clock = clock
        self._tables: dict[int, RouteTable] = {}
        self._stages: dict[int, _Stage] = {}
        self._outstanding: Counter[str] = Counter()
        self._fenced: set[tuple[str, str]] = set()
        self._turn = 0
        self._highest = -1

    # --- what the router says ---------------------------------------------------------------------------
    def update(self, table: RouteTable) -> None:
        """Takes a newer table of the same router; another router's replaces it whatever its number."""
        held = self._tables.get(table.stage)
        if held is None or held.router != table.router or table.revision >= held.revision:
            self._tables[table.stage] = table
            if table.stage in self._stages:
                self._take(table)

    def forget(self, stage: int) -> None:
        self._tables.pop(stage, None)
        self._stages.pop(stage, None)

    def _take(self, table: RouteTable) -> _Stage:
        stage = self._stages.get(table.stage)
        if stage is None or stage.algorithm != table.algorithm:
            stage = self._stages[table.stage] = self._begin(table.algorithm, stage)
        before, stage.candidates = stage.candidates, {}
        for entry in table.entries:
            sid, incarnation, service_ms = entry.sid, entry.incarnation, entry.service_ms
            if entry.weight <= 0 or (self._fenced and (sid, incarnation) in self._fenced):
                continue
            held = before.get(sid)
            if held is None or held.incarnation != incarnation:
                held = Candidate(sid, incarnation, entry.window)
                stage.reported.pop(sid, None)
                stage.heard.discard(sid)
            held.window, held.weight = entry.window, entry.weight
            stage.told_ms[sid] = entry.link_ms if _believable(entry.link_ms) else 0.0
            held.remote = entry.cluster != self._cluster
            held.outstanding = self._outstanding[sid]
            if service_ms and sid not in stage.heard and _believable(service_ms):
                stage.reported[sid] = service_ms
            stage.candidates[sid] = held
        for sid in stage.reported.keys() - stage.candidates.keys():
            del stage.reported[sid]
        for sid in stage.told_ms.keys() - stage.candidates.keys():
            del stage.told_ms[sid]
        stage.heard.clear()
        self._turns(stage, [held for held in stage.candidates.values() if held.sid not in before])
        stage.take_speeds()
        self._survey(stage, self._clock())
        stage.balancer.reset(list(stage.candidates.values()))
        return stage

    def _begin(self, algorithm: str, before: _Stage | None) -> _Stage:
        try:
            stage = _Stage(algorithm, self._place)
        except DmscError as error:
            log.error("routing algorithm not taken", algorithm=algorithm, error=error.text)
            return before or _Stage("expected-completion", self._place)
        if before is not None:
            stage.candidates, stage.reported = before.candidates, before.reported
            stage.told_ms = before.told_ms
        return stage

    def _turns(self, stage: _Stage, new: list[Candidate]) -> None:
        """Newcomers come first, in the order of their names, begun at this sender's own place."""
        new.sort(key=lambda one: one.sid)
        begin, now = int(math.modf(self._place * GOLDEN)[0] * len(new)), self._clock()
        for index, candidate in enumerate(new):
            candidate.used = (index - begin) % len(new) - len(new)
            candidate.used_at = now

    # --- what is bound, and comes back ------------------------------------------------------------------
    def bind(self, stage: int, microbatch: int | None = None, waiting: int = 1) -> Member | None:
        """Chooses the next hop at `stage` and counts it as open; None: wait for a window or a table.

        Args:
            stage: the next one.
            microbatch: which one is to be bound: the numbers tell how far the step is. None, as for a
                validation: the end of the step is no matter.
            waiting: microbatches that this sender has and has not bound, this one included.
        """
        held = self._stages.get(stage)
        if held is None:
            table = self._tables.get(stage)
            if table is None:
                return None
            held = self._take(table)
        remaining: int | None = None
        if microbatch is not None and self._microbatches:
            if microbatch > self._highest:
                self._highest = microbatch
            remaining = waiting + max(0, self._microbatches - 1 - self._highest)
        now = self._clock()
        if now - held.reviewed_at >= REVIEW_S:
            self._review(held, now)
        chosen = held.balancer.choose(now, remaining)
        if chosen is None:
            return None
        self._outstanding[chosen.sid] += 1
        self._turn += 1
        chosen.used, chosen.used_at = self._turn, now
        chosen.outstanding += 1
        begins_at = chosen.free_at if chosen.free_at > now else now
        chosen.free_at = begins_at + chosen.paced_ms / 1e3
        self._weigh_link(held, chosen, now)
        held.balancer.changed(chosen)
        return chosen.member

    def assigned(self, member: Member) -> None:
        """The orchestrator bound a microbatch to `member`; no window holds that back (DESIGN §6, Flow)."""
        self._outstanding[member.sid] += 1
        self._touched(member.sid)

    def returned(self, sid: str, load: HopLoad | None = None) -> None:
        """A microbatch came back from `sid`: its window has room again. `load`: what it said with it."""
        outstanding = self._outstanding[sid]
        if outstanding > 0:
            self._outstanding[sid] = outstanding - 1
        self._touched(sid, load)

    def heard(self, member: Member, load: HopLoad) -> None:
        """`member` answered an offer, and told how it is."""
        for stage in self._stages.values():
            candidate = stage.candidates.get(member.sid)
            if candidate is not None and candidate.incarnation == member.incarnation:
                self._update(stage, candidate, load)

    def _known(self, sid: str) -> Iterable[tuple[_Stage, Candidate]]:
        return [(one, one.candidates[sid]) for one in self._stages.values() if sid in one.candidates]

    def _touched(self, sid: str, load: HopLoad | None = None) -> None:
        for stage in self._stages.values():
            candidate = stage.candidates.get(sid)
            if candidate is not None:
                self._update(stage, candidate, load)

    def _update(self, stage: _Stage, candidate: Candidate, load: HopLoad | None) -> None:
        outstanding = candidate.outstanding = self._outstanding[candidate.sid]
        if load is not None:
            elsewhere = min(load.open, MOST_OPEN) - outstanding
            candidate.elsewhere = elsewhere if elsewhere > 0 else 0
            self._measured(stage, candidate, load.service_ms)
        now = self._clock()
        self._weigh_link(stage, candidate, now)
        candidate.free_at = now + candidate.done_ms / 1e3
        stage.balancer.changed(candidate)

    def _measured(self, stage: _Stage, candidate: Candidate, service_ms: float) -> None:
        if not 0.0 < service_ms <= SLOWEST_MS:  # as `_believable`, without the call
            return
        sid = candidate.sid
        stage.heard.add(sid)
        held = stage.reported.get(sid)
        if held is not None and abs(service_ms / held - 1.0) <= ALIKE / 2:
            return
        stage.reported[sid] = service_ms
        stage.news += 1
        if len(stage.reported) == 1 or stage.news > len(stage.candidates):
            stage.settle()
        else:
            candidate.service_ms = stage.effective_ms(sid)

    # --- links ------------------------------------------------------------------------------------------
    def _survey(self, stage: _Stage, now: float) -> None:
        """With a new table: the best link, and every other one beside it. O(candidates)."""
        own: set[str] = set()
        if self._link_cost is not None:
            own = {sid for sid, held in stage.candidates.items() if self._own(held) is not None}
        told = (ms for sid, ms in stage.told_ms.items() if ms > 0 and sid not in own)
        stage.best_told_ms = min(told, default=math.inf)
        stage.linked = own
        self._find_best(stage, now)
        for candidate in stage.candidates.values():
            self._weigh_link(stage, candidate, now)

    def _review(self, stage: _Stage, now: float) -> None:
        """The links that matter, again: own ones, 64 at most, and those by which somebody is farther away."""
        for candidate in self._find_best(stage, now):
            before = (candidate.link_ms, candidate.wire_ms)
            self._weigh_link(stage, candidate, now)
            if before != (candidate.link_ms, candidate.wire_ms):
                stage.balancer.changed(candidate)

    def _find_best(self, stage: _Stage, now: float) -> list[Candidate]:
        """The best link anew; returns whose links matter."""
        stage.reviewed_at, stage.best_ms = now, stage.best_told_ms
        if not stage.linked:
            return []
        linked = [stage.candidates[sid] for sid in stage.linked if sid in stage.candidates]
        if self._link_cost is None:
            return linked
        for candidate in linked:
            own = self._own(candidate)
            if own is not None:
                stage.best_ms = min(stage.best_ms, own.transfer_ms)
        return linked

    def _own(self, candidate: Candidate) -> LinkCost | None:
        own = self._link_cost(candidate.member) if self._link_cost is not None else None
        return own if own is not None and _believable(own.transfer_ms) else None

    def _weigh_link(self, stage: _Stage, candidate: Candidate, now: float) -> None:
        """How much longer transfers to it take than to the best: by own ones, else by the router; of an
        unknown link nothing bad is thought. One that is shunned is measured less, and may have recovered: as
        with slow instances, it is tried again when that costs little beside the time since its last use."""
        own = self._own(candidate) if self._link_cost is not None else None
        if own is not None:
            transfer_ms, candidate.wire_ms = own.transfer_ms, own.wire_ms
            stage.best_ms = min(stage.best_ms, transfer_ms)
            stage.linked.add(candidate.sid)
        else:
            transfer_ms, candidate.wire_ms = stage.told_ms.get(candidate.sid) or stage.best_ms, 0.0
        longer_ms = transfer_ms - stage.best_ms if stage.best_ms < math.inf else 0.0
        if longer_ms <= LINK_MS / 2:  # alike in any case, as most are
            candidate.link_ms = 0.0
            return
        alike_ms = max(ALIKE * stage.best_ms, LINK_PART * stage.usual_ms, LINK_MS)
        if longer_ms <= (alike_ms / 2 if candidate.link_ms > 0 else alike_ms):
            candidate.link_ms = 0.0
            return
        candidate.link_ms = max(0.0, longer_ms - TRIAL_PART * (now - candidate.used_at) * 1e3)
        stage.linked.add(candidate.sid)

    # --- boundaries -----------------------------------------------------------------------------------------
    def next_step(self) -> None:
        """A step ended: how far it was counts no more. Open counts are zero by then, or it was aborted."""
        self._highest = -1

    def reset(self) -> None:
        """An abort: nothing of this sender is open anywhere any more."""
        self._highest = -1
        open_at, self._outstanding = [sid for sid, n in self._outstanding.items() if n], Counter()
        for sid in open_at:
            for _, candidate in self._known(sid):
                candidate.elsewhere = 0
            self._touched(sid)

    def fence(self, member: Member) -> None:
        """Never choose this incarnation again, even while an old table still names it."""
        if (member.sid, member.incarnation) in self._fenced:
            return
        self._fenced.add((member.sid, member.incarnation))
        self._outstanding.pop(member.sid, None)  # its successor under the same name owes nothing
        for stage, candidate in self._known(member.sid):
            if candidate.incarnation == member.incarnation:
                del stage.candidates[member.sid]
                stage.settle()
            else:
                self._touched(member.sid)

    @property
    def open(self) -> int:
        return self._outstanding.total()


def _believable(service_ms: float) -> bool:
    """Not NaN, not infinite, not negative, not absurd. 0 is what an instance says that measured nothing."""
    return 0.0 < service_ms <= SLOWEST_MS
