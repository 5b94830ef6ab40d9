"""Who takes over a lost owner's microbatches (DESIGN §5 rules 1–3). Pure.

Every living instance has acknowledged the fence and said what it holds, so the picture is complete: nothing
from a lost instance will be accepted any more, and what a living instance owns stays its own. A microbatch
has a hole at stage s if no living instance owns it there and none will bring it there without an order:
either its owner at s − 1 had bound it to a lost instance, or s − 1 is a hole itself while a later stage has
the microbatch already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from entities.orchestrator.transaction.step_ledger import Inconsistent
from schemas.step import HeldHop, Member, MicrobatchState, PathUpdate
from schemas.task_graph import is_data

IDLE = MicrobatchState.IDLE
"""The microbatch is assigned or queued, but has not arrived: its owner still needs the input."""

HopReports = Mapping[Member, Sequence[HeldHop]]


@dataclass(kw_only=True)
class PathRepair:
    """Path updates by instance. `owners` must acknowledge theirs before `neighbours` are ordered.

    Otherwise a new owner could be offered a microbatch before it knows that its next hop is fixed; it would
    bind it elsewhere, and two instances of the next stage would own it.
    """

    owners: dict[Member, list[PathUpdate]] = field(default_factory=dict)
    neighbours: dict[Member, list[PathUpdate]] = field(default_factory=dict)
    vacancies: set[int] = field(default_factory=set)
    """Stages (−1: data) that have microbatches to take over, but no living instance."""
    recomputations: list[tuple[int, int]] = field(default_factory=list)
    """(stage, microbatch) pairs with a new owner."""


@dataclass(slots=True)
class _Owner:
    """An instance on a microbatch's path; `hop` is None for one that was chosen just now."""

    member: Member
    hop: HeldHop | None

    @property
    def needs_input(self) -> bool:
        return self.hop is None or self.hop.state == IDLE


def repair_paths(
    stages: Sequence[Sequence[Member]],
    data: Sequence[Member],
    reports: HopReports,
    microbatches: int,
    *,
    dispatched: bool,
) -> PathRepair:
    """The updates that put every microbatch of the open step on a path of living instances.

    Args:
        stages: living members by stage, standbys included.
        data: living data instances.
        reports: what each of them has, by its answer to the fence.
        microbatches: M, the number of microbatches of the step.
        dispatched: every microbatch was handed to a data instance before anybody answered. If not, a
            microbatch that no data instance names waits for the next round.

    Raises:
        Inconsistent: two living instances of a stage own the same microbatch.
    """
    owners = [_owners(members, reports, stage) for stage, members in enumerate(stages)]
    sources = _owners(data, reports, -1)
    living = {member for members in stages for member in members}
    load: Counter[Member] = Counter({member: len(hops) for member, hops in reports.items()})
    repair = PathRepair()
    for number in range(microbatches):
        path = [stage_owners.get(number) for stage_owners in owners]
        source = sources.get(number)
        holes = _holes(path, source, living, dispatched=dispatched)
        unserved = {stage for stage in holes if not (data if is_data(stage) else stages[stage])}
        if unserved:
            repair.vacancies |= unserved
            continue
        chain: dict[int, _Owner] = {-1: source} if source is not None else {}
        chain |= {stage: owner for stage, owner in enumerate(path) if owner is not None}
        for stage, bound_to in holes.items():
            candidates = data if is_data(stage) else stages[stage]
            new_owner = bound_to or min(
                candidates, key=lambda member: (load[member], candidates.index(member))
            )
            load[new_owner] += 1
            chain[stage] = _Owner(new_owner, None)
            if not is_data(stage):
                repair.recomputations.append((stage, number))
        _connect(number, chain, repair)
    return repair


def _owners(members: Sequence[Member], reports: HopReports, stage: int) -> dict[int, _Owner]:
    owners: dict[int, _Owner] = {}
    for member in members:
        for hop in reports.get(member, ()):
            if hop.microbatch in owners:
                raise Inconsistent(
                    f"microbatch {hop.microbatch} of stage {stage} is held "
                    f"by {owners[hop.microbatch].member.sid} and {member.sid}"
                )
            owners[hop.microbatch] = _Owner(member, hop)
    return owners


def _holes(
    path: Sequence[_Owner | None], source: _Owner | None, living: set[Member], *, dispatched: bool
) -> dict[int, Member | None]:
    """Stages (−1: data) where the microbatch needs a new owner, first to last, and who that must be.

    It must be the living instance, if there is one, to which the owner at the stage before has already bound
    the microbatch: an earlier repair chose it, and another loss came before it was told.
    """
    deepest = max((stage for stage, owner in enumerate(path) if owner is not None), default=-1)
    holes: dict[int, Member | None] = {}
    if source is None and not dispatched:
        return {}  # it may have been dispatched after its data instance answered, and be anywhere by now
    if source is None and (path[0] is None or path[0].needs_input):
        holes[-1] = None
    before = source
    for stage, owner in enumerate(path):
        if owner is None:
            bound_to = before.hop.downstream if before is not None and before.hop is not None else None
            if before is None:
                if stage > deepest:
                    break  # the new owner of the stage before chooses its next hop, like any other owner
                bound_to = None
            elif bound_to is None:
                break  # not bound yet
            elif bound_to not in living:
                bound_to = None
            elif stage > deepest:
                break  # on its way to a living instance
            holes[stage] = bound_to
        before = owner
    return holes


def _connect(number: int, chain: Mapping[int, _Owner], repair: PathRepair) -> None:
    """Adds the updates that tell both ends of every hop about each other, unless they know already.

    They don't know if one of them was chosen just now, or if another loss came before an earlier repair was
    told to all.
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
        dispatch = is_data(stage) and owner.hop is None
        if next_owner is None and stage not in upstream and not dispatch:
            continue
        update = PathUpdate(
            microbatch=number,
            upstream=upstream.get(stage),
            downstream=next_owner.member if next_owner is not None else None,
            offer=next_owner is not None and next_owner.needs_input,
        )
        updates = repair.owners if not is_data(stage) and owner.needs_input else repair.neighbours
        updates.setdefault(owner.member, []).append(update)
