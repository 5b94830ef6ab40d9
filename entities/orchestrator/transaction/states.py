"""All states of the step machine, and every legal transition between them. Pure.

The machine's state is the product of a few state variables. Each `StateVariable` has an enum of states, and
one method for each transition. The method's table says where the transition leads from each state; from a
state that the table does not list it is illegal, and raises `IllegalTransition`. A state that leads to itself
is legal, and nothing happens. `scripts/generate_protocol.py` draws the tables in `docs/step-transaction.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, Generic, TypeVar

from schemas.errors import IllegalTransition
from schemas.step import Phase

S = TypeVar("S", bound=StrEnum)


class StateVariable(Generic[S]):
    """One state variable. `subject` names it in errors."""

    __slots__ = ("state",)
    state: S

    def __init__(self, state: S) -> None:
        self.state = state

    @property
    def subject(self) -> str:
        return type(self).__name__.removesuffix("Lifecycle").lower()


L = TypeVar("L", bound=StateVariable[Any])


def transition(
    table: Mapping[S, S], *, unchanged: Iterable[S] = ()
) -> Callable[[Callable[[L], None]], Callable[[L], None]]:
    """Makes a transition of a method that has only a docstring: what has happened when it is called.

    Args:
        table: the next state for each state that the transition leaves.
        unchanged: the other states in which it is legal: nothing happens.
    """
    following = {**table, **{state: state for state in unchanged}}

    def decorate(method: Callable[[L], None]) -> Callable[[L], None]:
        @functools.wraps(method)
        def enter(variable: L) -> None:
            target = following.get(variable.state)
            if target is None:
                raise IllegalTransition(
                    f"{variable.subject}: {method.__name__} is not legal while {variable.state}"
                )
            variable.state = target

        enter.table = following  # type: ignore[attr-defined]  # read by `transitions`
        return enter

    return decorate


def transitions(variable: type[StateVariable[Any]]) -> dict[str, Mapping[StrEnum, StrEnum]]:
    """The tables of a state variable by the names of its transitions."""
    return {name: method.table for name, method in vars(variable).items() if hasattr(method, "table")}


# --- the step -----------------------------------------------------------------------------------------------
class PhaseLifecycle(StateVariable[Phase]):
    """The phase of the open step. `schemas.step.PHASES` has the same table without names."""

    __slots__ = ()

    @transition({Phase.CLOSED: Phase.GATHERING})
    def open_step(self) -> None:
        """The shell opens a step: the first one, or the one after a boundary."""

    @transition({Phase.GATHERING: Phase.GATHERING})
    def open_attempt(self) -> None:
        """The step begins again with a higher attempt, after a restart."""

    @transition({Phase.GATHERING: Phase.DECIDING})
    def decide_step(self) -> None:
        """All members have voted, and the ledger is consistent."""

    @transition({Phase.DECIDING: Phase.COMMITTING})
    def record_decision(self) -> None:
        """The decision is in the record: the commit point has passed."""

    @transition({Phase.COMMITTING: Phase.GATHERING})
    def open_next_step(self) -> None:
        """All members have applied the decision, and the next step goes on."""

    @transition({Phase.COMMITTING: Phase.CLOSED})
    def close_step(self) -> None:
        """All members have applied the decision, and the shell wants a boundary here."""


class ProgressState(StrEnum):
    """Whether the job goes on from step to step."""

    RUNNING = "running"
    PAUSING = "pausing"
    RESTARTING = "restarting"


class ProgressLifecycle(StateVariable[ProgressState]):
    """Whether the job goes on from step to step.

    Pausing: a boundary follows the present commit. Restarting: members are forgetting the open attempt.
    """

    __slots__ = ()

    @transition({ProgressState.RESTARTING: ProgressState.RUNNING}, unchanged=[ProgressState.RUNNING])
    def run(self) -> None:
        """A step is opened. It has an attempt of its own, so a restart at the boundary is not waited for."""

    @transition({ProgressState.RUNNING: ProgressState.PAUSING})
    def pause(self) -> None:
        """The decision is recorded, and the shell wants a boundary before the next step."""

    @transition({ProgressState.PAUSING: ProgressState.RUNNING})
    def reach_boundary(self) -> None:
        """The last step before the boundary is committed."""

    @transition({ProgressState.RUNNING: ProgressState.RESTARTING})
    def begin_restart(self) -> None:
        """All members are ordered to forget the open attempt."""

    @transition({ProgressState.RESTARTING: ProgressState.RUNNING})
    def end_restart(self) -> None:
        """All living members have forgotten it."""


class DispatchState(StrEnum):
    """How far the gateway is with handing out the open attempt's microbatches."""

    PENDING = "pending"
    DISPATCHED = "dispatched"
    TORN = "torn"


class DispatchLifecycle(StateVariable[DispatchState]):
    """How far the gateway is with handing out the open attempt's microbatches.

    Pending: some may not be handed out yet. Torn: a data instance was lost meanwhile, so nobody knows which
    ones were handed out twice; the step begins again as soon as membership may change.
    """

    __slots__ = ()

    @transition(
        {DispatchState.DISPATCHED: DispatchState.PENDING, DispatchState.TORN: DispatchState.PENDING},
        unchanged=[DispatchState.PENDING],
    )
    def renew_dispatch(self) -> None:
        """A step or an attempt begins."""

    @transition({DispatchState.DISPATCHED: DispatchState.TORN}, unchanged=[DispatchState.TORN])
    def renew_torn_dispatch(self) -> None:
        """A step or an attempt begins, and one of its data instances is already lost."""

    @transition(
        {DispatchState.PENDING: DispatchState.DISPATCHED},
        unchanged=[DispatchState.DISPATCHED, DispatchState.TORN],
    )
    def finish_dispatch(self) -> None:
        """The gateway has handed out all microbatches."""

    @transition(
        {DispatchState.PENDING: DispatchState.TORN},
        unchanged=[DispatchState.DISPATCHED, DispatchState.TORN],
    )
    def lose_data_instance(self) -> None:
        """A data instance is lost. Once all is handed out, a fence round finds what it had."""


# --- fences -------------------------------------------------------------------------------------------------
class FencingState(StrEnum):
    """Whether a fence round is open, and whether another one is due."""

    QUIET = "quiet"
    DUE = "due"
    OPEN = "open"
    OPEN_AND_DUE = "open and due"


class FencingLifecycle(StateVariable[FencingState]):
    """Whether a fence round is open, and whether another one is due.

    One that is due opens as soon as membership may change. If the last one could not repair all paths, it
    opens once the rest is dispatched or the stage has a member again.
    """

    __slots__ = ()

    @transition(
        {FencingState.QUIET: FencingState.DUE, FencingState.OPEN: FencingState.OPEN_AND_DUE},
        unchanged=[FencingState.DUE, FencingState.OPEN_AND_DUE],
    )
    def require_round(self) -> None:
        """Membership has changed, or the open round can't repair all paths."""

    @transition({FencingState.DUE: FencingState.OPEN, FencingState.OPEN_AND_DUE: FencingState.OPEN})
    def open_round(self) -> None:
        """The fence is ordered at all living members. It supersedes a round that is still open."""

    @transition({FencingState.OPEN: FencingState.QUIET, FencingState.OPEN_AND_DUE: FencingState.DUE})
    def close_round(self) -> None:
        """The last order of the round is acknowledged, or none was needed."""

    @transition(
        {FencingState.OPEN: FencingState.QUIET, FencingState.OPEN_AND_DUE: FencingState.DUE},
        unchanged=[FencingState.QUIET, FencingState.DUE],
    )
    def abandon_round(self) -> None:
        """A step or an attempt begins or ends: answers of an open round count no more."""


class RoundState(StrEnum):
    """What an open fence round waits for."""

    FENCING = "fencing"
    ASSIGNING_OWNERS = "assigning owners"
    ASSIGNING_NEIGHBOURS = "assigning neighbours"


class RoundLifecycle(StateVariable[RoundState]):
    """What an open fence round waits for.

    Fencing: living members acknowledge the fence, and report what they have. Assigning: new owners, and then
    their neighbours, acknowledge the repaired paths.
    """

    __slots__ = ()

    @transition({RoundState.FENCING: RoundState.ASSIGNING_OWNERS})
    def assign_owners(self) -> None:
        """All have answered, and lost microbatches have new owners."""

    @transition(
        {
            RoundState.FENCING: RoundState.ASSIGNING_NEIGHBOURS,
            RoundState.ASSIGNING_OWNERS: RoundState.ASSIGNING_NEIGHBOURS,
        }
    )
    def assign_neighbours(self) -> None:
        """No new owner has to acknowledge its paths any more."""


# --- stages -------------------------------------------------------------------------------------------------
class GroupState(StrEnum):
    """A stage's reduction group."""

    FORMING = "forming"
    FORMED = "formed"
    PREPARING = "preparing"
    BROKEN = "broken"
    CONDEMNED = "condemned"
    VACANT = "vacant"
    LOST = "lost"


WORKING = (GroupState.FORMING, GroupState.FORMED, GroupState.PREPARING)
FAILED = (GroupState.BROKEN, GroupState.CONDEMNED)
EMPTY = (GroupState.VACANT, GroupState.LOST)


class GroupLifecycle(StateVariable[GroupState]):
    """A stage's reduction group.

    Broken: it failed, and is built again in a moment. Condemned: it failed again with the same members; one
    of them was named, and its loss is awaited. Vacant: no member lives. Lost: the shell was asked for new
    ones.
    """

    __slots__ = ()

    @transition(dict.fromkeys(GroupState, GroupState.FORMING))
    def form(self) -> None:
        """A new generation begins, and its members build the group."""

    @transition(
        dict.fromkeys((GroupState.FORMING, *FAILED), GroupState.FORMED),
        unchanged=[GroupState.FORMED, GroupState.PREPARING],
    )
    def complete(self) -> None:
        """All members have built the group. Where the order was repeated, a failure may have come first."""

    @transition({GroupState.FORMED: GroupState.PREPARING})
    def prepare(self) -> None:
        """All microbatches of the stage are in members' sums: the members all-reduce and vote."""

    @transition({GroupState.PREPARING: GroupState.FORMED})
    def rest(self) -> None:
        """The next step begins with the same group."""

    @transition(dict.fromkeys(WORKING, GroupState.BROKEN), unchanged=[GroupState.BROKEN])
    def fail(self) -> None:
        """The group could not be built, or its reduction broke."""

    @transition(dict.fromkeys(WORKING, GroupState.CONDEMNED), unchanged=[GroupState.CONDEMNED])
    def condemn(self) -> None:
        """It failed too often with the same members: one of them can't stay."""

    @transition(dict.fromkeys((*WORKING, *FAILED), GroupState.VACANT), unchanged=EMPTY)
    def vacate(self) -> None:
        """A new generation begins, and it has no member."""

    @transition({GroupState.VACANT: GroupState.LOST})
    def report_loss(self) -> None:
        """The shell is asked to bring the stage back."""

    @transition(dict.fromkeys(EMPTY, GroupState.VACANT))
    def forget_report(self) -> None:
        """The members that the shell brought are lost, too: it has to be asked again."""


class NewcomerState(StrEnum):
    """How far a newcomer is with its stage's state."""

    WAITING = "waiting"
    FOLLOWING = "following"
    LAST_REDO = "last redo"
    PAUSED = "paused"
    SLOW = "slow"
    WHOLE = "whole state"
    SLOW_PAUSED = "slow and paused"


class NewcomerLifecycle(StateVariable[NewcomerState]):
    """How far a newcomer is with its stage's state.

    Waiting: nobody sends it anything. Following: it is sent a snapshot, then redos. Last redo and whole
    state: its stage does not prepare meanwhile. Slow: it waits to be sent the whole state. Paused: a transfer
    failed, and is tried again in a moment. A newcomer joins from one of the two states that hold its stage
    up; it may be lost in each state.
    """

    __slots__ = ()

    @transition({NewcomerState.WAITING: NewcomerState.FOLLOWING})
    def follow(self) -> None:
        """A member is ordered to send it a snapshot, and then its redos."""

    @transition({NewcomerState.FOLLOWING: NewcomerState.LAST_REDO})
    def await_last_redo(self) -> None:
        """It is at most one step behind: its stage waits for it."""

    @transition({NewcomerState.LAST_REDO: NewcomerState.FOLLOWING, NewcomerState.WHOLE: NewcomerState.SLOW})
    def reach_version(self) -> None:
        """It has the state that its stage waited for. If it can't join now, it tries again."""

    @transition({NewcomerState.FOLLOWING: NewcomerState.SLOW})
    def fall_behind(self) -> None:
        """It can't keep up with its source."""

    @transition({NewcomerState.SLOW: NewcomerState.WHOLE})
    def receive_whole_state(self) -> None:
        """A member is ordered to send it the whole state."""

    @transition(
        {
            NewcomerState.FOLLOWING: NewcomerState.WAITING,
            NewcomerState.LAST_REDO: NewcomerState.WAITING,
            NewcomerState.WHOLE: NewcomerState.SLOW,
        }
    )
    def lose_source(self) -> None:
        """Its source is lost, and its stage has another member."""

    @transition(
        {
            NewcomerState.FOLLOWING: NewcomerState.PAUSED,
            NewcomerState.LAST_REDO: NewcomerState.SLOW_PAUSED,
            NewcomerState.WHOLE: NewcomerState.SLOW_PAUSED,
        }
    )
    def fail_transfer(self) -> None:
        """Its transfer failed. If its stage waited in vain, it is sent the whole state next time."""

    @transition({NewcomerState.PAUSED: NewcomerState.WAITING, NewcomerState.SLOW_PAUSED: NewcomerState.SLOW})
    def resume(self) -> None:
        """The moment after a failed transfer is over."""


STATE_VARIABLES: Mapping[str, type[StateVariable[Any]]] = {
    "phase": PhaseLifecycle,
    "progress": ProgressLifecycle,
    "dispatch": DispatchLifecycle,
    "fencing": FencingLifecycle,
    "fence round": RoundLifecycle,
    "reduction group": GroupLifecycle,
    "newcomer": NewcomerLifecycle,
}
"""The state variables, in the order of the documentation."""
