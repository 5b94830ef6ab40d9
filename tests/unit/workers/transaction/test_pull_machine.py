"""Which samples are asked of whom: windows, losses, silence; each microbatch comes once (ADR-0062)."""

from __future__ import annotations

import random

from schemas.data_plane import RouteEntry, RouteTable
from schemas.step import Member
from workers.routing.next_hop import Binder
from workers.transaction.pull_machine import Key, Pull, PullConfig, PullMachine

STAGE, WINDOW = -2, 2
ONE, OTHER = Member.of("j-data-r0", "a"), Member.of("j-data-r1", "a")


def table(*members: Member, revision: int = 1) -> RouteTable:
    entries = tuple(
        RouteEntry(sid=each.sid, incarnation=each.incarnation, cluster="c", weight=1.0, window=WINDOW)
        for each in members
    )
    return RouteTable(job="j", cluster="c", stage=STAGE, revision=revision, router="r", entries=entries)


def machine(*members: Member) -> PullMachine:
    made = PullMachine(STAGE, Binder("c", clock=lambda: 0.0), PullConfig(again_s=5.0, suspect_s=2.0))
    assert made.route(table(*members), 0.0) == []
    return made


def keys(*microbatches: int, step: int = 0) -> list[Key]:
    return [(False, step, microbatch) for microbatch in microbatches]


def asked(pulls: list[Pull]) -> dict[Key, Member]:
    return {pull.key: pull.of for pull in pulls}


def test_no_more_is_asked_than_windows_allow() -> None:
    pulls = machine(ONE)
    effects = [pull for key in keys(0, 1, 2) for pull in pulls.want(key, 0.0)]
    assert asked(effects) == dict.fromkeys(keys(0, 1), ONE)
    assert pulls.want(keys(0)[0], 0.0) == []
    assert asked(pulls.arrived(keys(0)[0], ONE, None, 0.0)) == dict.fromkeys(keys(2), ONE)
    assert pulls.arrived(keys(0)[0], ONE, None, 0.0) == []
    assert pulls.waiting == 2


def test_validations_and_early_steps_come_first() -> None:
    pulls = PullMachine(STAGE, Binder("c", clock=lambda: 0.0))
    for key in (*keys(0, step=2), *keys(1, step=1), (True, 0, 7)):
        assert pulls.want(key, 0.0) == []
    assert [pull.key for pull in pulls.route(table(ONE), 0.0)] == [(True, 0, 7), *keys(1, step=1)]


def test_what_a_lost_instance_was_asked_is_asked_of_another() -> None:
    pulls = machine(ONE, OTHER)
    first = asked([pull for key in keys(0, 1, 2, 3) for pull in pulls.want(key, 0.0)])
    of_one = [key for key, member in first.items() if member == ONE]
    assert len(of_one) == 2
    assert pulls.failed(ONE, 1.0) == []  # the other's window is full
    assert pulls.route(table(OTHER, revision=2), 1.0) == []
    fresh = Member.of(ONE.sid, "b")
    assert asked(pulls.route(table(fresh, OTHER, revision=3), 1.0)) == dict.fromkeys(of_one, fresh)


def test_a_suspect_is_asked_again_when_there_is_nobody_else_or_later() -> None:
    pulls = machine(ONE)
    pulls.want(keys(0)[0], 0.0)
    assert asked(pulls.failed(ONE, 0.0)) == dict.fromkeys(keys(0), ONE)
    pulls = machine(ONE, OTHER)
    pulls.failed(ONE, 0.0)
    assert {*asked([p for key in keys(0, 1, 2) for p in pulls.want(key, 0.5)]).values()} == {OTHER}
    assert pulls.passed(1.0) == []
    assert asked(pulls.passed(2.5)) == dict.fromkeys(keys(2), ONE)


def test_who_is_silent_for_too_long_is_not_waited_for() -> None:
    pulls = machine(ONE, OTHER)
    first = asked(pulls.want(keys(0)[0], 0.0))
    (silent,) = first.values()
    assert pulls.passed(4.0) == []
    (again,) = asked(pulls.passed(6.0)).values()
    assert again != silent
    assert pulls.wants(keys(0)[0])
    pulls.arrived(keys(0)[0], silent, None, 6.1)  # it was only slow: the first answer counts
    assert not pulls.wants(keys(0)[0])
    assert pulls.waiting == 0


def test_each_microbatch_comes_once_whatever_happens() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance, now = random.Random(seed), 0.0
    members = [ONE, OTHER]
    pulls = machine(*members)
    open_pulls: list[Pull] = []
    came: list[Key] = []
    for number in range(60):
        open_pulls += pulls.want((False, number // 8, number % 8), now)
        for _ in range(chance.randrange(4)):
            now += 0.5
            event = chance.choice(["arrive", "arrive", "die", "fail", "pass"])
            if event == "arrive" and open_pulls:
                pull = open_pulls.pop(chance.randrange(len(open_pulls)))
                came += [pull.key] * pulls.wants(pull.key)
                open_pulls += pulls.arrived(pull.key, pull.of, None, now)
            elif event == "die":
                index = chance.randrange(2)
                dead = members[index]
                members[index] = Member.of(dead.sid, f"{number}-{int(now * 2)}")
                open_pulls = [pull for pull in open_pulls if pull.of != dead]
                open_pulls += pulls.route(table(*members, revision=number + 2), now)
            elif event == "fail":
                open_pulls += pulls.failed(chance.choice(members), now)
            else:
                open_pulls += pulls.passed(now)
    while pulls.waiting:
        now += 1.0
        for pull in [*open_pulls]:
            came += [pull.key] * pulls.wants(pull.key)
            open_pulls += pulls.arrived(pull.key, pull.of, None, now)
        open_pulls += pulls.passed(now)
        assert now < 1e4, f"seed {seed}: {pulls.waiting} are never asked for"
    assert sorted(came) == [(False, number // 8, number % 8) for number in range(60)]
