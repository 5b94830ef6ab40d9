"""Who takes over a lost owner's microbatches (DESIGN §5 rules 1–3). Pure.

Every living instance has acknowledged the fence and told what it holds, so the picture is whole: nothing
of the lost will be accepted any more, and what a living instance owns stays its own. A microbatch of stage
s is a hole if nobody living owns it there, and nobody will bring it there by itself: its owner at s − 1 had
bound it to a lost instance, or is a hole itself while a later stage has it already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from entities.orchestrator.transaction.step_ledger import Inconsistent
from schemas.step import HeldHop, Member, MicrobatchState, PathUpdate

IDLE = MicrobatchState.IDLE
"""Assigned or queued, not arrived: its owner still needs the input."""

Held = Mapping[Member, Sequence[HeldHop]]


@dataclass(kw_only=True)
class PathRepair:
    """Path updates by instance. `owners` first, and acknowledged: then their neighbours may offer.

    Otherwise a new owner could be offered a microbatch before it knows that its way on is fixed, bind it
    elsewhere, and two instances of the next stage would own it.
    """

    owners: dict[Member, list[PathUpdate]] = field(default_factory=dict)
    neighbours: dict[Member, list[PathUpdate]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # stages (−1: data) that nobody living serves
    replayed: list[tuple[int, int]] = field(default_factory=list)  # (stage, microbatch)


@dataclass(slots=True)
class _Owner:
    """An instance on a microbatch's path; without a `hop` it was chosen just now."""

    member: Member
    hop: HeldHop | None

    @property
    def needs_input(self) -> bool:
        return self.hop is None or self.hop.state == IDLE


def repair_paths(
    stages: Sequence[Sequence[Member]],
    data: Sequence[Member],
    held: Held,
    microbatches: int,
    *,
    dispatched: bool,
) -> PathRepair:
    """The updates that bring every microbatch of the open step back on a path of living instances.

    Args:
        stages: living members by stage, standbys too.
        data: living data instances.
        held: what each of them said it holds, after the fence.
        microbatches: M of the step.
        dispatched: every microbatch was handed to a data instance before anybody answered; else one that
            no data instance names waits for the round after that.

    Raises:
        Inconsistent: two living instances of a stage own the same microbatch.
    """
    owners = [_owners(members, held, stage) for stage, members in enumerate(stages)]
    sources = _owners(data, held, -1)
    living = {member for members in stages for member in members}
    load: Counter[Member] = Counter({member: len(hops) for member, hops in held.items()})
    found = PathRepair()
    for number in range(microbatches):
        path = [stage_owners.get(number) for stage_owners in owners]
        source = sources.get(number)
        holes = _holes(path, source, living, dispatched=dispatched)
        unserved = {stage for stage in holes if not (stages[stage] if stage >= 0 else data)}
        if unserved:
            found.waiting |= unserved
            continue
        chain: dict[int, _Owner] = {-1: source} if source is not None else {}
        chain |= {stage: owner for stage, owner in enumerate(path) if owner is not None}
        for stage, bound_to in holes.items():
            candidates = stages[stage] if stage >= 0 else data
            chosen = bound_to or min(candidates, key=lambda member: (load[member], candidates.index(member)))
            load[chosen] += 1
            chain[stage] = _Owner(chosen, None)
            if stage >= 0:
                found.replayed.append((stage, number))
        _connect(number, chain, found)
    return found


def _owners(members: Sequence[Member], held: Held, stage: int) -> dict[int, _Owner]:
    found: dict[int, _Owner] = {}
    for member in members:
        for hop in held.get(member, ()):
            if hop.microbatch in found:
                raise Inconsistent(
                    f"microbatch {hop.microbatch} of stage {stage} is held "
                    f"by {found[hop.microbatch].member.sid} and {member.sid}"
                )
            found[hop.microbatch] = _Owner(member, hop)
    return found


def _holes(
    path: Sequence[_Owner | None], source: _Owner | None, living: set[Member], *, dispatched: bool
) -> dict[int, Member | None]:
    """Stages (−1: data) where the microbatch needs a new owner, first to last, and who that must be.

    It must be whoever the owner before is bound to already, if that one lives: an earlier mending chose
    it, and was overtaken before it was told.
    """
    deepest = max((stage for stage, owner in enumerate(path) if owner is not None), default=-1)
    holes: dict[int, Member | None] = {}
    if source is None and not dispatched:
        return {}  # it may have been handed out after its data instance answered, and be anywhere by now
    if source is None and (path[0] is None or path[0].needs_input):
        holes[-1] = None
    before = source
    for stage, owner in enumerate(path):
        if owner is None:
            bound_to = before.hop.downstream if before is not None and before.hop is not None else None
            if before is None:
                if stage > deepest:
                    break  # whoever takes over before it binds it on, like any other
                bound_to = None
            elif bound_to is None:
                break  # not bound yet
            elif bound_to not in living:
                bound_to = None
            elif stage > deepest:
                break  # on its way to somebody living
            holes[stage] = bound_to
        before = owner
    return holes


def _connect(number: int, chain: Mapping[int, _Owner], found: PathRepair) -> None:
    """Tells both ends of every hop on the path about each other, unless they know already.

    That they don't may be because one was chosen just now, or because an earlier mending was overtaken by
    another loss before it was told to all.
    """
    upstream: dict[int, Member] = {}
    downstream: dict[int, _Owner] = {}
    for stage, after in chain.items():
        before = chain.get(stage - 1)
        if before is None:
            continue
        known = before.hop is not None and before.hop.downstream == after.member
        if known and after.hop is not None and after.hop.upstream == before.member:
            continue
        upstream[stage] = before.member
        downstream[stage - 1] = after
    for stage, owner in chain.items():
        next_owner = downstream.get(stage)
        dispatch = stage < 0 and owner.hop is None
        if next_owner is None and stage not in upstream and not dispatch:
            continue
        update = PathUpdate(
            microbatch=number,
            upstream=upstream.get(stage),
            downstream=next_owner.member if next_owner is not None else None,
            offer=next_owner is not None and next_owner.needs_input,
        )
        part = found.owners if stage >= 0 and owner.needs_input else found.neighbours
        part.setdefault(owner.member, []).append(update)
