"""Owners of stages, gateways and a bus that loses, doubles, delays and reorders: sessions all the same.

What a stage computes is a hash of its own rows so far and of the row that comes, as attention would have it:
one wrong, missing or doubled row anywhere changes every token behind it.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from schemas.errors import BadInput
from schemas.services.generation import BindSession, EndSession, GeneratedToken, RowsNeeded, Sampling
from schemas.step import Member
from workers.serving.runtime.session_machine import SessionMachine
from workers.serving.runtime.session_table import (
    AskForRows,
    ForgetSession,
    PublishAgain,
    SentRows,
    ServingLimits,
)

VOCABULARY = 97


def mixed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


def alone(prompt: tuple[int, ...], answer: int, stages: int) -> tuple[int, ...]:
    """What one process answers that has all stages and nothing else to do."""
    tokens, own = list(prompt), [0] * stages
    for at in range(len(prompt) + answer - 1):
        row = tokens[at]
        for stage in range(stages):
            row = own[stage] = mixed(stage, own[stage], row)
        if at + 1 == len(tokens):
            tokens.append(row % VOCABULARY)
    return tuple(tokens)


@dataclass
class Owner:
    """An instance of one stage: the machine, and what the shell around it keeps."""

    machine: SessionMachine
    me: Member
    rows: dict[int, list[int]] = field(default_factory=dict)
    given: dict[int, list[int]] = field(default_factory=dict)
    computed_rows: int = 0

    @property
    def first(self) -> bool:
        return self.machine.limits.is_first

    def forget(self, effect: ForgetSession) -> None:
        for table in (self.rows, self.given):
            if effect.rows:
                table[effect.session] = table.get(effect.session, [])[: effect.rows]
            else:
                table.pop(effect.session, None)

    def receive(self, item: SentRows, rows: list[int], now: float) -> None:
        skipped = self.machine.arrived(item, now)
        if skipped is not None:
            own = self.rows.setdefault(item.session, [])
            if self.machine.limits.whole:
                own.clear()
            own += rows[skipped:]

    def wave(self, now: float) -> list[GeneratedToken]:
        """Computes one wave; returns what it samples."""
        tokens = []
        for item in self.machine.take_wave():
            session = item.session
            came = session.tokens if self.first else self.rows[session.number]
            given = self.given.setdefault(session.number, [])
            del given[item.first :]
            for row in came[item.first : item.first + item.rows]:
                before = given[-1] if given else 0
                given.append(mixed(self.machine.limits.stage, before, row))
            self.computed_rows += item.rows
            assert self.machine.computed(item, now)
            end = item.first + item.rows
            for position in range(end - item.wanted + 1, end + 1):
                token = given[position - 1] % VOCABULARY
                ends = self.machine.ends(session, position, token)
                found = GeneratedToken(
                    session=session.number,
                    fence=session.order.fence,
                    position=position,
                    token=token,
                    ends=ends,
                )
                self.machine.sampled(session, found, now)
                tokens.append(found)
        return tokens


class World:
    """Instances, the messages between them, and one gateway for each session, which may be replaced."""

    def __init__(
        self, seed: int, stages: int, replicas: int, *, loss: float = 0.0, whole: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.stages, self.loss, self.whole = stages, loss, whole
        self.now = 0.0
        self.number = 0
        self.owners = {
            (stage, replica): self._new(stage, replica)
            for stage in range(stages)
            for replica in range(replicas)
        }
        self.messages: list[tuple[Any, ...]] = []
        self.lost = self.kills = 0
        self.orders: dict[int, BindSession] = {}
        self.answers: dict[int, list[int]] = {}
        self.heard_at: dict[int, float] = {}

    def _new(self, stage: int, replica: int) -> Owner:
        self.number += 1
        me = Member(sid=f"s{stage}-r{replica}", incarnation=f"i{self.number}")
        limits = ServingLimits(
            stage=stage,
            stages=self.stages,
            chunk_rows=5,
            wave_rows=12,
            whole=self.whole,
            repeat_s=5,
            patience_s=500,
        )
        return Owner(SessionMachine(me, "j", limits), me)

    def kill(self, stage: int) -> None:
        replica = self.random.choice([key for key in self.owners if key[0] == stage])
        self.owners[replica] = self._new(*replica)
        self.kills += 1

    def ask(self, number: int, prompt: tuple[int, ...], answer: int) -> None:
        self.answers[number] = list(prompt)
        self.orders[number] = BindSession(
            job="j",
            session=number,
            generation=f"g{number}",
            writer="mg",
            fence=1,
            attempt=0,
            path=self._path(),
            tokens=prompt,
            prompt_tokens=len(prompt),
            most_tokens=answer,
            whole=self.whole,
            sampling=Sampling(),
        )
        self._bind(number)

    def _path(self) -> tuple[Member, ...]:
        choose = self.random.choice
        return tuple(
            choose([owner.me for (at, _), owner in self.owners.items() if at == stage])
            for stage in range(self.stages)
        )

    def _bind(self, number: int) -> None:
        self.heard_at[number] = self.now
        for member in self.orders[number].path:
            self.messages.append(("bind", member, self.orders[number]))

    def bind_again(self, number: int, *, taken_over: bool = False) -> None:
        """By the same gateway, or by one that knows the prompt alone."""
        order = self.orders[number]
        if taken_over:
            self.answers[number] = self.answers[number][: order.prompt_tokens]
        self.orders[number] = order.model_copy(
            update={
                "fence": order.fence + taken_over,
                "attempt": 0 if taken_over else order.attempt + 1,
                "path": self._path(),
                "tokens": tuple(self.answers[number]),
            }
        )
        self._bind(number)

    def done(self, number: int) -> bool:
        order = self.orders[number]
        return len(self.answers[number]) == order.prompt_tokens + order.most_tokens

    def _find(self, member: Member) -> Owner | None:
        return next((owner for owner in self.owners.values() if owner.me == member), None)

    def turn(self) -> None:
        """One thing happens, of all that might."""
        self.now += 0.05
        for number in self.orders:
            if not self.done(number) and self.now > self.heard_at[number] + 40:
                self.bind_again(number)
        if self.messages and self.random.random() < 0.7:
            self._deliver()
        owner = self.random.choice([*self.owners.values()])
        owner.machine.tick(self.now)
        self._publish(owner, owner.wave(self.now))
        self._effects(owner)
        for receiver in owner.machine.receivers():
            items = owner.machine.outgoing(receiver, 9)
            rows = [owner.given[each.session][each.first : each.first + each.rows] for each in items]
            if self._find(receiver) is None:
                owner.machine.unsent(items)
            else:
                self.messages.append(("rows", receiver, items, rows))

    def _effects(self, owner: Owner) -> None:
        for effect in owner.machine.effects():
            match effect:
                case ForgetSession():
                    owner.forget(effect)
                case AskForRows(asked, order):
                    self.messages.append(("need", asked, order))
                case PublishAgain(tokens):
                    self._publish(owner, list(tokens))

    def _publish(self, owner: Owner, tokens: list[GeneratedToken]) -> None:
        if tokens:
            self.messages.append(("tokens", owner.me, tuple(tokens)))
            for first in self.owners.values():
                if first.first:
                    self.messages.append(("heard", first.me, owner.me, tuple(tokens)))

    def _deliver(self) -> None:
        message = self.messages.pop(self.random.randrange(len(self.messages)))
        if self.random.random() < 0.1:
            self.messages.append(message)
        if self.random.random() < self.loss:
            self.lost += 1
            return
        kind, member, *rest = message
        if kind == "tokens":
            self._answered(rest[0])
            return
        owner = self._find(member)
        if owner is None:
            return
        if kind == "bind":
            order = rest[0]
            bound = owner.machine.bind(order, self.now)
            if bound.outcome == "bound" and order is self.orders[order.session]:
                self._learn(order.session, order.prompt_tokens, bound.tokens)
        elif kind == "need":
            owner.machine.needed(rest[0])
        elif kind == "heard":
            owner.machine.heard(rest[0], rest[1], self.now)
        else:
            for item, rows in zip(*rest, strict=True):
                owner.receive(item, rows, self.now)
        self._effects(owner)

    def _answered(self, tokens: tuple[GeneratedToken, ...]) -> None:
        for token in tokens:
            self._learn(token.session, token.position, (token.token,))

    def _learn(self, number: int, position: int, tokens: tuple[int, ...]) -> None:
        known = self.answers[number]
        for at, token in enumerate(tokens, position):
            if at < len(known):
                assert known[at] == token, "the same position has another token"
            elif at == len(known):
                known.append(token)
                self.heard_at[number] = self.now

    def run(self, most: int = 60_000) -> None:
        for _ in range(most):
            if all(self.done(number) for number in self.orders):
                return
            self.turn()
        raise AssertionError(f"not done: {self.answers}")


def requests(world: World, count: int) -> dict[int, tuple[int, ...]]:
    """Asks for `count` sessions; returns what each is to be, from its first token on."""
    expected = {}
    for number in range(count):
        prompt = tuple(world.random.randrange(VOCABULARY) for _ in range(world.random.randint(1, 30)))
        answer = world.random.randint(1, 12)
        expected[number] = alone(prompt, answer, world.stages)
        world.ask(number, prompt, answer)
    return expected


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_tokens_are_those_of_one_process_whatever_happens(stages: int, replicas: int) -> None:
    for seed in range(6):
        world = World(seed, stages, replicas, loss=0.05)
        expected = requests(world, 6)
        for _ in range(8):
            for _ in range(world.random.randint(20, 200)):
                world.turn()
            world.kill(world.random.randrange(stages))
            number = world.random.randrange(6)
            if not world.done(number):
                world.bind_again(number, taken_over=world.random.random() < 0.5)
        world.run()
        assert {number: tuple(tokens) for number, tokens in world.answers.items()} == expected, seed
        assert world.kills == 8
        assert world.lost > 0


def test_without_a_cache_each_wave_has_whole_histories() -> None:
    for seed in range(4):
        world = World(seed, 2, 2, loss=0.05, whole=True)
        expected = requests(world, 4)
        for _ in range(60):
            world.turn()
        world.kill(1)
        world.run()
        assert {number: tuple(tokens) for number, tokens in world.answers.items()} == expected, seed


def test_without_a_cache_a_binding_is_whole_or_refused() -> None:
    """It can't go on from rows that it does not have; nor does it take a part of a history for all of it."""
    owner = machine(stage=1, stages=2, whole=True)
    refused = owner.bind(order(path=(UP, ME)), 0)
    assert (refused.outcome, len(owner)) == ("uncached", 0)
    assert owner.bind(order(path=(UP, ME), attempt=1, whole=True), 0).outcome == "bound"
    assert owner.bind(order(path=(UP, ME), attempt=2), 0).outcome == "uncached"
    assert owner.effects() == []
    assert owner.arrived(SentRows(7, 1, 1, 2, 1), 0) is None, "its first two rows are not here"
    asked = RowsNeeded(job="j", session=7, fence=1, attempt=1, first=0, member=ME)
    assert owner.effects() == [AskForRows(UP, asked)]
    assert owner.arrived(SentRows(7, 1, 1, 0, 3), 0) == 0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_only_the_lost_stage_computes_anew(stage: int) -> None:
    world = World(3, 3, 1)
    prompt = tuple(range(40))
    world.ask(0, prompt, 20)
    while len(world.answers[0]) < 50:
        world.turn()
    before = {key: owner.computed_rows for key, owner in world.owners.items()}
    world.kill(stage)
    world.bind_again(0)
    world.run()
    anew = {
        key[0]: owner.computed_rows - before.get(key, 0) * (key[0] != stage)
        for key, owner in world.owners.items()
    }
    assert anew[stage] >= 50, "it has computed all rows"
    assert all(rows <= 10 for at, rows in anew.items() if at != stage), "the others only go on"
    assert tuple(world.answers[0]) == alone(prompt, 20, 3)


# --- one machine -------------------------------------------------------------------------------------------
ME, UP, DOWN = (Member(sid=sid, incarnation="i") for sid in ("me", "up", "down"))


def order(**more: Any) -> BindSession:
    fields = {
        "job": "j",
        "session": 7,
        "generation": "g",
        "writer": "mg",
        "fence": 1,
        "attempt": 0,
        "path": (ME,),
        "tokens": (1, 2, 3),
        "prompt_tokens": 3,
        "most_tokens": 5,
        "sampling": Sampling(),
    }
    return BindSession(**(fields | more))


def machine(**limits: Any) -> SessionMachine:
    return SessionMachine(ME, "j", ServingLimits(**({"stage": 0, "stages": 1} | limits)))


def test_an_older_writer_or_attempt_is_fenced() -> None:
    owner = machine()
    assert owner.bind(order(fence=2, attempt=1), 0).outcome == "bound"
    for fence, attempt in ((1, 9), (2, 0)):
        assert owner.bind(order(fence=fence, attempt=attempt), 0).outcome == "fenced"
    assert not owner.end(EndSession(job="j", session=7, fence=1))
    assert owner.end(EndSession(job="j", session=7, fence=2))
    assert owner.effects() == [ForgetSession(7)]


def test_another_incarnation_of_the_owner_is_fenced() -> None:
    answer = machine().bind(order(path=(Member(sid="me", incarnation="old"),)), 0)
    assert answer.outcome == "fenced"


def test_room_is_counted_for_the_whole_session_and_given_back() -> None:
    owner = machine(rows=128, sessions=8)
    assert owner.bind(order(session=1, most_tokens=60), 0).outcome == "bound"
    full = owner.bind(order(session=2, most_tokens=62), 0)
    assert (full.outcome, full.text) == ("full", "room for 64 tokens, but 65 are needed")
    assert full.load.free_rows == 64
    never = owner.bind(order(session=2, most_tokens=126), 0)
    assert (never.outcome, never.text) == ("too_long", "129 tokens need more than all room, which is for 128")
    owner.end(EndSession(job="j", session=1, fence=1))
    assert owner.bind(order(session=2, most_tokens=62), 0).outcome == "bound"


def test_too_many_sessions_or_tokens() -> None:
    owner = machine(sessions=1, context=10)
    long = owner.bind(order(most_tokens=8), 0)
    assert (long.outcome, long.text) == (
        "too_long",
        "3 tokens of prompt and 8 of answer, but at most 10 in all",
    )
    assert owner.bind(order(), 0).outcome == "bound"
    assert owner.bind(order(session=8), 0).outcome == "full"
    assert owner.bind(order(), 0).outcome == "bound", "the same one again needs no more room"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tokens": (1, 2, 500)}, "token 500 is none of the model's 100 tokens"),
        ({"path": (ME, DOWN)}, "a path of 2 owners, but the version has 1 stages"),
        ({"prompt_tokens": 4}, "session 7 has 3 tokens, and no prompt of them"),
    ],
)
def test_orders_that_nobody_can_obey(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInput) as raised:
        machine(vocabulary=100).bind(order(**wrong), 0)
    assert raised.value.text == text


def test_rows_before_their_binding_are_asked_for_with_it() -> None:
    owner = machine(stage=1, stages=2)
    assert owner.arrived(SentRows(7, 1, 0, 0, 3), 0) is None
    assert owner.effects() == []
    owner.bind(order(path=(UP, ME)), 0)
    asked = RowsNeeded(job="j", session=7, fence=1, attempt=0, first=0, member=ME)
    assert owner.effects() == [AskForRows(UP, asked)]


def test_rows_of_another_path_are_dropped() -> None:
    owner = machine(stage=1, stages=2)
    owner.bind(order(path=(UP, ME), fence=2), 0)
    assert owner.arrived(SentRows(7, 1, 5, 0, 3), 0) is None
    assert owner.arrived(SentRows(7, 2, 0, 0, 3), 0) == 0
    assert owner.arrived(SentRows(7, 2, 0, 1, 4), 0) == 2


def test_a_session_that_nobody_cares_for_is_forgotten() -> None:
    owner = machine(patience_s=60)
    owner.bind(order(), 0)
    owner.bind(order(), 50)
    owner.tick(109)
    assert len(owner) == 1
    owner.tick(110)
    assert len(owner) == 0
    assert owner.effects() == [ForgetSession(7)]


def test_single_rows_come_before_prompts_and_rebuilds_leave_them_room() -> None:
    owner = machine(wave_rows=40, chunk_rows=64)
    for number in (1, 2):
        owner.bind(order(session=number, tokens=(1,), prompt_tokens=1), 0)
    lost = tuple(range(100))
    owner.bind(order(session=3, tokens=lost, prompt_tokens=50, most_tokens=90, attempt=1), 0)
    owner.bind(order(session=4, tokens=lost, prompt_tokens=100), 0)
    wave = owner.take_wave()
    assert [(item.session.number, item.rows) for item in wave] == [(1, 1), (2, 1), (3, 19), (4, 19)]


def test_tokens_that_differ_are_the_gateways() -> None:
    """Only without exact arithmetic they can: what was computed of the others does not count any more."""
    owner = machine()
    owner.bind(order(), 0)
    (item,) = owner.take_wave()
    owner.bind(order(attempt=1, tokens=(1, 9, 3)), 0)
    assert not owner.computed(item, 0)
    assert owner.effects() == [ForgetSession(7, 1)]
    (item,) = owner.take_wave()
    assert (item.first, item.rows) == (0, 3)
