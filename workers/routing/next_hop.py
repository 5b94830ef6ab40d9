"""Late binding: which instance of the next stage gets this microbatch (DESIGN §2, §5 rule 1).

The router publishes weights and measurements. The owner of a microbatch chooses when it is about to send,
with fresher knowledge: how many of its own microbatches are open at each candidate, what each candidate last
reported about itself, and how long the owner's own transfers there take. The algorithm orders the candidates
(`balancers`); windows, fences and weights are handled here, for every algorithm.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from bus.logs import get_logger
from schemas.data_plane import HopLoad, RouteTable
from schemas.errors import DmscError
from schemas.limits import ALIKE, MOST_MS
from schemas.step import Member
from workers.links.link_quality import LinkCost
from workers.routing.admission import AdmissionPace
from workers.routing.algorithms import balancer
from workers.routing.balancers import UNMEASURED, Balancer, Candidate
from workers.routing.expected_completion import TRIAL_PART

log = get_logger("routing")

MOST_OPEN = 4096
"""Most microbatches that one instance can have open: the most that a step can have."""

MOST_DEALT = 64
"""Most candidates that are ranked anew for each step, which costs a sort of them."""

GOLDEN = 0.6180339887498949


@dataclass(frozen=True, kw_only=True)
class BinderConfig:
    """When a link counts as equal to the best one, and how often that is reviewed.

    A link is slower if its transfers take longer by more than `link_part` of the usual service time and by
    more than `link_ms`. A slower link becomes equal again at half of that.
    """

    link_part: float = 0.1
    link_ms: float = 2.0
    review_s: float = 0.5
    """Seconds between reviews of the links, which may change without any transfer of this sender."""


class _Stage:
    """The candidates of one stage, from its table and their own reports."""

    def __init__(self, algorithm: str, seed: int) -> None:
        self.algorithm = algorithm
        self.balancer: Balancer = balancer(algorithm, seed)
        self.candidates: dict[str, Candidate] = {}
        self.reported: dict[str, float] = {}  # SID → latest service time, from itself or the router
        self.self_reported: set[str] = set()  # SIDs whose own report is newer than the table
        self.usual_ms = UNMEASURED
        self.news = 0
        self.router_ms: dict[str, float] = {}  # SID → transfer time, from the router
        self.best_ms = math.inf  # the shortest transfer time; infinite: none is known
        self.best_router_ms = math.inf
        self.linked: set[str] = set()  # SIDs whose links are reviewed
        self.reviewed_at = -math.inf
        self.dealt = -1  # the step for which the candidates were ranked

    def effective_ms(self, sid: str) -> float:
        """The service time used for a candidate: the median, if its own is near that or unknown."""
        reported_ms = self.reported.get(sid)
        if reported_ms is None or abs(reported_ms / self.usual_ms - 1.0) <= ALIKE:
            return self.usual_ms
        return reported_ms

    def settle(self) -> None:
        """Computes the median again and sorts all candidates by it. O(candidates)."""
        self.take_speeds()
        self.balancer.reset(list(self.candidates.values()))

    def take_speeds(self) -> None:
        """Computes the median again, and each candidate's service time from it."""
        self.news = 0
        reports_ms = [ms for sid, ms in self.reported.items() if sid in self.candidates]
        self.usual_ms = median(reports_ms) if reports_ms else UNMEASURED
        for sid, candidate in self.candidates.items():
            candidate.service_ms = self.effective_ms(sid)


class Binder:
    """Binds one sender's microbatches, by the present tables. All calls on the event loop.

    Args:
        cluster: The sender's own; preferred between equals.
        place: Number of this sender among its replicas: each begins its turns elsewhere, so that they do not
            all send to the same candidate first.
        microbatches: Microbatches per step; 0: unknown, then slow candidates are used until a step's end.
        link_cost: Cost of this sender's own transfers to an instance; it returns None if there were none yet.
            Without it only the router's figures are used.
        clock: Seconds, monotonic.
        config: How links are compared.
    """

    def __init__(
        self,
        cluster: str,
        *,
        place: int = 0,
        microbatches: int = 0,
        link_cost: Callable[[Member], LinkCost | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        config: BinderConfig = BinderConfig(),
    ) -> None:
        self._cluster = cluster
        self._place = place
        self._microbatches = microbatches
        self._link_cost = link_cost
        self._clock = clock
        self._config = config
        self._tables: dict[int, RouteTable] = {}
        self._stages: dict[int, _Stage] = {}
        self._outstanding: Counter[str] = Counter()
        self._fenced: set[tuple[str, str]] = set()
        self._paces: dict[int, AdmissionPace] = {}  # of the stages whose rate is limited
        self._turn = 0
        self._step = 0
        self._highest = -1

    # --- route tables -----------------------------------------------------------------------------------
    def update(self, table: RouteTable) -> None:
        """Takes a newer table of the same router, or any table of another router."""
        present = self._tables.get(table.stage)
        if present is None or present.router != table.router or table.revision >= present.revision:
            self._tables[table.stage] = table
            self._limit(table.stage, table.admitted_per_s)
            if table.stage in self._stages:
                self._take(table)

    def _limit(self, stage: int, per_s: float) -> None:
        pace = self._paces.get(stage)
        if per_s <= 0:
            self._paces.pop(stage, None)
        elif pace is None:
            self._paces[stage] = AdmissionPace(per_s, self._clock())
        else:
            pace.change(per_s, self._clock())

    def pause_s(self, stage: int) -> float:
        """How long the stage's admission rate holds the next microbatch back; 0: it does not."""
        pace = self._paces.get(stage)
        return 0.0 if pace is None else pace.pause_s(self._clock())

    def forget(self, stage: int) -> None:
        self._tables.pop(stage, None)
        self._stages.pop(stage, None)
        self._paces.pop(stage, None)

    def _take(self, table: RouteTable) -> _Stage:
        stage = self._stages.get(table.stage)
        if stage is None or stage.algorithm != table.algorithm:
            stage = self._stages[table.stage] = self._begin(table.algorithm, stage)
        before, stage.candidates = stage.candidates, {}
        for entry in table.entries:
            sid, incarnation, service_ms = entry.sid, entry.incarnation, entry.service_ms
            if entry.weight <= 0 or (self._fenced and (sid, incarnation) in self._fenced):
                continue
            candidate = before.get(sid)
            if candidate is None or candidate.incarnation != incarnation:
                candidate = Candidate(sid, incarnation, entry.window)
                stage.reported.pop(sid, None)
                stage.self_reported.discard(sid)
            candidate.window, candidate.weight = entry.window, entry.weight
            stage.router_ms[sid] = entry.link_ms if _believable(entry.link_ms) else 0.0
            candidate.remote = entry.cluster != self._cluster
            candidate.outstanding = self._outstanding[sid]
            if service_ms and sid not in stage.self_reported and _believable(service_ms):
                stage.reported[sid] = service_ms
            stage.candidates[sid] = candidate
        for sid in stage.reported.keys() - stage.candidates.keys():
            del stage.reported[sid]
        for sid in stage.router_ms.keys() - stage.candidates.keys():
            del stage.router_ms[sid]
        stage.self_reported.clear()
        new = [candidate for candidate in stage.candidates.values() if candidate.sid not in before]
        self._give_turns(new)
        stage.take_speeds()
        self._survey(stage, self._clock())
        stage.balancer.reset(list(stage.candidates.values()))
        return stage

    def _begin(self, algorithm: str, before: _Stage | None) -> _Stage:
        try:
            stage = _Stage(algorithm, self._place)
        except DmscError as error:
            log.error("routing algorithm not usable", algorithm=algorithm, error=error.text)
            return before or _Stage("expected-completion", self._place)
        if before is not None:
            stage.candidates, stage.reported = before.candidates, before.reported
            stage.router_ms = before.router_ms
        return stage

    def _give_turns(self, new: list[Candidate]) -> None:
        """Puts new candidates first, in the order of their SIDs, beginning at this sender's own place."""
        new.sort(key=lambda candidate: candidate.sid)
        begin, now = int(math.modf(self._place * GOLDEN)[0] * len(new)), self._clock()
        for index, candidate in enumerate(new):
            candidate.used = candidate.rank = (index - begin) % len(new) - len(new)
            candidate.used_at = now

    def _deal(self, stage: _Stage, microbatch: int) -> None:
        """Ranks equals before this sender's first microbatch of a step.

        Senders see one another's microbatches only in the reports of those whom they sent to. If each took
        its own turns, several would take the same turns, and one of three equals would get half of a step,
        step after step. All of them count from the microbatch's number instead, which no two share.
        """
        stage.dealt, count = self._step, len(stage.candidates)
        if count > MOST_DEALT:
            return
        begin = self._step * self._microbatches + microbatch
        for index, sid in enumerate(sorted(stage.candidates)):
            candidate = stage.candidates[sid]
            candidate.rank = (index - begin) % count - count
            stage.balancer.changed(candidate)

    # --- binding and return -----------------------------------------------------------------------------
    def bind(self, stage: int, microbatch: int | None = None, waiting: int = 1) -> Member | None:
        """Chooses the next hop at `stage` and counts it as open.

        None: wait for a window, for a table, or for `pause_s` seconds.

        Args:
            stage: Number of the next stage.
            microbatch: Number of the microbatch, which tells how far the step is. None, as for a validation:
                the end of the step does not matter.
            waiting: Microbatches that this sender has not bound yet, this one included.
        """
        state = self._stages.get(stage)
        if state is None:
            table = self._tables.get(stage)
            if table is None:
                return None
            state = self._take(table)
        now, pace = self._clock(), self._paces.get(stage)
        if pace is not None and pace.pause_s(now) > 0:
            return None
        remaining: int | None = None
        if microbatch is not None and self._microbatches:
            if microbatch > self._highest:
                self._highest = microbatch
            remaining = waiting + max(0, self._microbatches - 1 - self._highest)
            if state.dealt != self._step:
                self._deal(state, microbatch)
        if now - state.reviewed_at >= self._config.review_s:
            self._review(state, now)
        chosen = state.balancer.choose(now, remaining)
        if chosen is None:
            return None
        if pace is not None:
            pace.admit(now)
        self._outstanding[chosen.sid] += 1
        self._turn += 1
        chosen.used = chosen.rank = self._turn
        chosen.used_at = now
        chosen.outstanding += 1
        begins_at = chosen.free_at if chosen.free_at > now else now
        chosen.free_at = begins_at + chosen.paced_ms / 1e3
        self._weigh_link(state, chosen, now)
        state.balancer.changed(chosen)
        return chosen.member

    def assigned(self, member: Member) -> None:
        """Counts a microbatch that the orchestrator bound to `member` despite windows (DESIGN §6, Flow)."""
        self._outstanding[member.sid] += 1
        self._update_all(member.sid)

    def returned(self, sid: str, load: HopLoad | None = None) -> None:
        """Frees a place in the window of `sid`, which returned a microbatch; `load`: its report with it."""
        outstanding = self._outstanding[sid]
        if outstanding > 0:
            self._outstanding[sid] = outstanding - 1
        self._update_all(sid, load)

    def load_reported(self, member: Member, load: HopLoad) -> None:
        """Takes the load that `member` reported with its answer to an offer."""
        for stage in self._stages.values():
            candidate = stage.candidates.get(member.sid)
            if candidate is not None and candidate.incarnation == member.incarnation:
                self._update(stage, candidate, load)

    def _candidates_of(self, sid: str) -> Iterable[tuple[_Stage, Candidate]]:
        return [(stage, stage.candidates[sid]) for stage in self._stages.values() if sid in stage.candidates]

    def _update_all(self, sid: str, load: HopLoad | None = None) -> None:
        for stage in self._stages.values():
            candidate = stage.candidates.get(sid)
            if candidate is not None:
                self._update(stage, candidate, load)

    def _update(self, stage: _Stage, candidate: Candidate, load: HopLoad | None) -> None:
        outstanding = candidate.outstanding = self._outstanding[candidate.sid]
        if load is not None:
            elsewhere = min(load.open, MOST_OPEN) - outstanding
            candidate.elsewhere = elsewhere if elsewhere > 0 else 0
            self._take_service_time(stage, candidate, load.service_ms)
        now = self._clock()
        self._weigh_link(stage, candidate, now)
        candidate.free_at = now + candidate.done_ms / 1e3
        stage.balancer.changed(candidate)

    def _take_service_time(self, stage: _Stage, candidate: Candidate, service_ms: float) -> None:
        if not 0.0 < service_ms <= MOST_MS:  # `_believable`, inlined in a hot path
            return
        sid = candidate.sid
        stage.self_reported.add(sid)
        before_ms = stage.reported.get(sid)
        if before_ms is not None and abs(service_ms / before_ms - 1.0) <= ALIKE / 2:
            return
        stage.reported[sid] = service_ms
        stage.news += 1
        if len(stage.reported) == 1 or stage.news > len(stage.candidates):
            stage.settle()
        else:
            candidate.service_ms = stage.effective_ms(sid)

    # --- links ------------------------------------------------------------------------------------------
    def _survey(self, stage: _Stage, now: float) -> None:
        """After a new table: finds the best link and compares all others with it. O(candidates)."""
        own: set[str] = set()
        if self._link_cost is not None:
            candidates = stage.candidates.items()
            own = {sid for sid, candidate in candidates if self._own_cost(candidate) is not None}
        router_ms = (ms for sid, ms in stage.router_ms.items() if ms > 0 and sid not in own)
        stage.best_router_ms = min(router_ms, default=math.inf)
        stage.linked = own
        self._find_best(stage, now)
        for candidate in stage.candidates.values():
            self._weigh_link(stage, candidate, now)

    def _review(self, stage: _Stage, now: float) -> None:
        """Compares links again: this sender's own, at most 64, and those that count as slower."""
        for candidate in self._find_best(stage, now):
            before = (candidate.link_ms, candidate.wire_ms)
            self._weigh_link(stage, candidate, now)
            if before != (candidate.link_ms, candidate.wire_ms):
                stage.balancer.changed(candidate)

    def _find_best(self, stage: _Stage, now: float) -> list[Candidate]:
        """Finds the best link again; returns the candidates whose links are reviewed."""
        stage.reviewed_at, stage.best_ms = now, stage.best_router_ms
        if not stage.linked:
            return []
        linked = [stage.candidates[sid] for sid in stage.linked if sid in stage.candidates]
        if self._link_cost is None:
            return linked
        for candidate in linked:
            own = self._own_cost(candidate)
            if own is not None:
                stage.best_ms = min(stage.best_ms, own.transfer_ms)
        return linked

    def _own_cost(self, candidate: Candidate) -> LinkCost | None:
        own = self._link_cost(candidate.member) if self._link_cost is not None else None
        return own if own is not None and _believable(own.transfer_ms) else None

    def _weigh_link(self, stage: _Stage, candidate: Candidate, now: float) -> None:
        """Sets how much longer transfers to a candidate take than over the best link.

        Own transfers count first, then the router's figures; an unknown link counts as the best. A slower
        link is used and measured less, and may have recovered: like a slow instance, it is tried again when
        that costs little compared with the time since its last use.
        """
        own = self._own_cost(candidate) if self._link_cost is not None else None
        if own is not None:
            transfer_ms, candidate.wire_ms = own.transfer_ms, own.wire_ms
            stage.best_ms = min(stage.best_ms, transfer_ms)
            stage.linked.add(candidate.sid)
        else:
            transfer_ms, candidate.wire_ms = stage.router_ms.get(candidate.sid) or stage.best_ms, 0.0
        longer_ms = transfer_ms - stage.best_ms if stage.best_ms < math.inf else 0.0
        if longer_ms <= self._config.link_ms / 2:  # equal in any case, like most links
            candidate.link_ms = 0.0
            return
        config = self._config
        alike_ms = max(ALIKE * stage.best_ms, config.link_part * stage.usual_ms, config.link_ms)
        if longer_ms <= (alike_ms / 2 if candidate.link_ms > 0 else alike_ms):
            candidate.link_ms = 0.0
            return
        candidate.link_ms = max(0.0, longer_ms - TRIAL_PART * (now - candidate.used_at) * 1e3)
        stage.linked.add(candidate.sid)

    # --- boundaries -----------------------------------------------------------------------------------------
    def next_step(self, step: int) -> None:
        """Begins a step: forgets how far the ended one was.

        Open counts are zero by then, or the step was aborted.
        """
        self._step, self._highest = step, -1

    def reset(self) -> None:
        """After an abort: no microbatch of this sender is open anywhere any more."""
        self._highest = -1
        open_at, self._outstanding = [sid for sid, n in self._outstanding.items() if n], Counter()
        for sid in open_at:
            for _, candidate in self._candidates_of(sid):
                candidate.elsewhere = 0
            self._update_all(sid)

    def fence(self, member: Member) -> None:
        """Never chooses this incarnation again, even while an old table still names it."""
        if (member.sid, member.incarnation) in self._fenced:
            return
        self._fenced.add((member.sid, member.incarnation))
        self._outstanding.pop(member.sid, None)  # its successor under the same SID has nothing open
        for stage, candidate in self._candidates_of(member.sid):
            if candidate.incarnation == member.incarnation:
                del stage.candidates[member.sid]
                stage.settle()
            else:
                self._update_all(member.sid)

    @property
    def open(self) -> int:
        return self._outstanding.total()


def _believable(service_ms: float) -> bool:
    """Whether a time is above 0 and not absurd, infinite or NaN; 0 means that nothing was measured."""
    return 0.0 < service_ms <= MOST_MS
