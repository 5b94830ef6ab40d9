"""The ledger of one phase of a build: which units are planned, bound to a node agent, done, committed. Pure.

    planned → bound → done → committed
       ↑        │       │
       └────────┴───────┘   lost, failed, or done once and to be compared

A unit is committed once. Each event gives at most one `Effect`, which says what its caller has to do; nobody
else decides what a failure means. A ledger that is made anew of the committed results, as a new leader does,
goes on where the former one was: bindings and failures are not part of what decides the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from schemas.data_set.units import UnitOrder, UnitPhase, UnitResult
from schemas.errors import IllegalTransition, Unavailable, errors_below

UNREADABLE_ATTEMPTS = 3
"""A unit that can't be read is tried twice elsewhere, too."""
LOST_ATTEMPTS = 100
"""Processes of one unit that may be lost, before the build is given up. A loss says nothing about the unit,
unless it is what kills them."""
BROKEN_ATTEMPTS = 5
"""Processes of one unit that may end by themselves without a result, or make no progress."""
COMPARED_EVERY = 50
"""Every so manieth unit with functions of users is computed twice, and its results compared."""

UNREADABLE_CODES = frozenset({"bad_data"})
BROKEN_CODES = frozenset({"internal", "no_progress", "refused", "conflict"})
LOST_CODES = frozenset({*(error.code for error in errors_below(Unavailable)), *BROKEN_CODES})


class UnitState(StrEnum):
    PLANNED = "planned"
    BOUND = "bound"
    DONE = "done"
    COMMITTED = "committed"


UNIT_TRANSITIONS: dict[UnitState, frozenset[UnitState]] = {
    UnitState.PLANNED: frozenset({UnitState.BOUND, UnitState.COMMITTED}),
    UnitState.BOUND: frozenset({UnitState.PLANNED, UnitState.DONE, UnitState.COMMITTED}),
    UnitState.DONE: frozenset({UnitState.PLANNED, UnitState.COMMITTED}),
    UnitState.COMMITTED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class CommitUnit:
    """Write this result: its row is created once. `skipped`: why the unit is left out."""

    unit: str
    result: UnitResult
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class StopBuild:
    """The build fails; `reason` is one line for the user."""

    reason: str
    code: str


Effect = CommitUnit | StopBuild | None


@dataclass(slots=True)
class Unit:
    """One unit. `attempt` counts bindings; `avoided` are agents on which it failed, in order."""

    key: str
    order: UnitOrder
    state: UnitState = UnitState.PLANNED
    agent: str = ""
    attempt: int = 0
    avoided: list[str] = field(default_factory=list)
    unreadable: int = 0
    losses: int = 0
    broken: int = 0
    result: UnitResult | None = None
    skipped: str = ""

    def move(self, state: UnitState) -> None:
        if state not in UNIT_TRANSITIONS[self.state]:
            where = f"unit {self.order.index} of {self.order.phase}"
            raise IllegalTransition(f"{where}: {self.state} → {state} (attempt {self.attempt})")
        self.state = state


class UnitLedger:
    """The units of one phase, in order of index.

    Args:
        phase: the phase.
        orders: key → order, in order of index.
        committed: key → result and why it was skipped, of units whose rows are there.
        skips: whether a unit that can't be read is left out.
        functions: the user's functions that these units run, in words; empty: there are none.
    """

    def __init__(
        self,
        phase: UnitPhase,
        orders: Mapping[str, UnitOrder],
        committed: Mapping[str, tuple[UnitResult, str]],
        *,
        skips: bool = False,
        functions: str = "",
    ) -> None:
        self.phase = phase
        self._skips = skips
        self._functions = functions
        self.units = {key: Unit(key, order) for key, order in orders.items()}
        self.reused = 0
        for key, (result, skipped) in committed.items():
            if key in self.units:
                self.commit(key, result, skipped)
                self.reused += 1

    # --- what there is --------------------------------------------------------------------------------------
    @property
    def complete(self) -> bool:
        return all(unit.state is UnitState.COMMITTED for unit in self.units.values())

    @property
    def left(self) -> int:
        """How many units are not committed."""
        return sum(unit.state is not UnitState.COMMITTED for unit in self.units.values())

    def planned(self) -> Iterator[Unit]:
        """Units that wait for a node, in order; those that a node has failed come last."""
        waiting = [unit for unit in self.units.values() if unit.state is UnitState.PLANNED]
        return iter(sorted(waiting, key=lambda unit: (bool(unit.avoided), unit.order.index)))

    def bound(self, agent: str | None = None) -> list[Unit]:
        """Units that are worked on; by this agent."""
        return [
            unit
            for unit in self.units.values()
            if unit.state is UnitState.BOUND and agent in (None, unit.agent)
        ]

    def results(self) -> list[UnitResult]:
        """The results in order of index, without units that were left out."""
        units = self.units.values()
        return [unit.result for unit in units if unit.result is not None and not unit.skipped]

    def skipped(self) -> list[int]:
        """Indexes of the units that were left out."""
        return [unit.order.index for unit in self.units.values() if unit.skipped]

    # --- what happens ---------------------------------------------------------------------------------------
    def bind(self, key: str, agent: str) -> Unit:
        """An agent gets the unit."""
        unit = self.units[key]
        unit.move(UnitState.BOUND)
        unit.agent = agent
        unit.attempt += 1
        return unit

    def done(self, key: str, agent: str, result: UnitResult) -> Effect:
        """The agent has given a result; that of an earlier binding counts as well, because units are pure."""
        unit = self.units.get(key)
        if unit is None or (unit.state is not UnitState.BOUND and unit.state is not UnitState.COMMITTED):
            return None
        if wrong := misfit(unit.order, result):
            return self.failed(key, agent, "internal", wrong)
        if unit.result is not None:
            if unit.skipped:
                return None
            if unit.result != result:
                return self._impure(unit)
        if unit.state is UnitState.COMMITTED:
            return None
        first = unit.result is None
        unit.result = result
        unit.move(UnitState.DONE)
        if first and self._functions and unit.order.index % COMPARED_EVERY == 0 and self.phase == "records":
            self._plan_again(unit, agent)
            return None
        return CommitUnit(key, result)

    def failed(self, key: str, agent: str, code: str, text: str) -> Effect:
        """An attempt has failed. `text`: one line."""
        unit = self.units.get(key)
        if unit is None or unit.state is not UnitState.BOUND or unit.agent != agent:
            return None
        if code in UNREADABLE_CODES:
            unit.unreadable += 1
            if unit.unreadable < UNREADABLE_ATTEMPTS:
                self._plan_again(unit, agent)
                return None
            if self._skips and self.phase == "records":
                unit.move(UnitState.DONE)
                return CommitUnit(key, UnitResult(phase=self.phase, index=unit.order.index), text)
            return StopBuild(self._about(unit, text), code)
        if code in LOST_CODES:
            unit.losses += 1
            unit.broken += code in BROKEN_CODES
            if unit.losses < LOST_ATTEMPTS and unit.broken < BROKEN_ATTEMPTS:
                self._plan_again(unit, agent)
                return None
            return StopBuild(self._about(unit, f"{text}; {unit.losses} attempts ended so"), code)
        return StopBuild(self._about(unit, text), code)

    def unbind(self, agent: str) -> list[Unit]:
        """The agent has left, or its order was withdrawn: its units go elsewhere."""
        units = self.bound(agent)
        for unit in units:
            self._plan_again(unit, agent)
        return units

    def commit(self, key: str, result: UnitResult, skipped: str = "") -> Effect:
        """The unit's row is there, with this result: written now, or found."""
        unit = self.units[key]
        if unit.state is UnitState.COMMITTED:
            return (
                None if (unit.result, bool(unit.skipped)) == (result, bool(skipped)) else self._impure(unit)
            )
        if unit.result is not None and not skipped and unit.result != result:
            return self._impure(unit)
        unit.move(UnitState.COMMITTED)
        unit.result, unit.skipped, unit.agent = result, skipped, ""
        return None

    def _plan_again(self, unit: Unit, agent: str) -> None:
        unit.move(UnitState.PLANNED)
        unit.agent = ""
        if agent in unit.avoided:
            unit.avoided.remove(agent)
        unit.avoided.append(agent)

    def _impure(self, unit: Unit) -> StopBuild:
        what = self._functions or "one of its steps"
        text = f"gave two results for the same input: {what} is not a pure function"
        return StopBuild(f"unit {unit.order.index} of {self.phase} {text}{_place(unit.order)}", "bad_model")

    def _about(self, unit: Unit, text: str) -> str:
        return f"unit {unit.order.index} of {self.phase}: {text}"


def misfit(order: UnitOrder, result: UnitResult) -> str:
    """Why this can't be the order's result, whoever made it; empty if it can."""
    if (result.phase, result.index) != (order.phase, order.index):
        return f"its process gave a result of unit {result.index} of {result.phase}"
    if result.units and order.phase != "plan":
        return f"its process gave a plan as the result of {order.phase}"
    return ""


def _place(order: UnitOrder) -> str:
    if order.unit is None:
        return ""
    more = f" and {len(order.unit.files) - 1} more" if len(order.unit.files) > 1 else ""
    return f" ({order.unit.files[0]}{more})"


# --- which node -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class AgentLoad:
    """A node agent that may take units.

    `room`: units that it takes at a time: its free slots, and 1 if it has none. `working`: units of all
    builds there. `unit_s`: mean time of a unit of this phase there, None if none has ended.
    """

    agent: str
    room: int
    working: int
    unit_s: float | None = None


def choose_agent(unit: Unit, agents: Sequence[AgentLoad], usual_s: float) -> str | None:
    """The agent on which the unit is expected to end first; None: all have as many units as they take.

    Expected is (units there + 1) ÷ room × mean time there; an agent of which nothing is known counts as
    usual, `usual_s`. Agents on which the unit failed come last, and of them the one that failed longest ago.

    Args:
        unit: the unit.
        agents: the agents that may have it.
        usual_s: mean time of a unit over all agents, s.
    """
    free = [load for load in agents if load.working < load.room]
    if not free:
        return None

    def rank(load: AgentLoad) -> tuple[int, float, str]:
        failed = unit.avoided.index(load.agent) + 1 if load.agent in unit.avoided else 0
        mean_s = usual_s if load.unit_s is None else load.unit_s
        return failed, (load.working + 1) / load.room * mean_s, load.agent

    best = min(free, key=rank)
    if (
        unit.unreadable
        and best.agent in unit.avoided
        and any(load.agent not in unit.avoided for load in agents)
    ):
        return None  # one that has not tried to read it is busy, and soon free
    return best.agent
