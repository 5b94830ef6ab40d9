"""A data instance makes again what was lost: also after a roll-back, when the step is a smaller one."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.step import Member, MicrobatchDispatch, PathUpdate
from workers.routing.next_hop import Binder
from workers.transaction.data_machine import DataMachine, Send

ME = Member(sid="data-r0", incarnation="i1")
NEW = Member(sid="s0-r0", incarnation="i2")


def dispatch(machine: DataMachine, step: int, attempt: int = 0) -> None:
    order = MicrobatchDispatch(job="j", epoch=1, step=step, attempt=attempt, microbatches=(0,))
    machine.dispatch(order)


def owned(sends: Iterable[Send]) -> list[tuple[int, int, Member]]:
    return [(send.work[0], send.work[2], send.to) for send in sends]


def test_after_a_roll_back_it_makes_a_lost_microbatch_of_a_smaller_step_again() -> None:
    machine = DataMachine(ME, epoch=1, binder=Binder("a"))
    dispatch(machine, step=7)
    machine.restarted(1)
    dispatch(machine, step=3, attempt=1)
    repair = PathUpdate(microbatch=0, upstream=None, downstream=NEW, offer=True)
    assert owned(machine.assign((1, 1, 1), 3, [repair])) == [(3, 0, NEW)]


def test_within_an_attempt_it_drops_repairs_of_an_earlier_step() -> None:
    machine = DataMachine(ME, epoch=1, binder=Binder("a"))
    dispatch(machine, step=7)
    repair = PathUpdate(microbatch=0, upstream=None, downstream=NEW, offer=True)
    assert owned(machine.assign((1, 0, 1), 6, [repair])) == []
