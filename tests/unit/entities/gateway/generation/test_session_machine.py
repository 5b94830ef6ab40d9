"""One session's machine under losses, repetitions, reordering and kills: each token once, in order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from entities.gateway.generation.path_choice import KnownLoad, choose_path
from entities.gateway.generation.session_machine import (
    OVER,
    Bind,
    ChoosePath,
    Deliver,
    Effect,
    Finish,
    GenerationMachine,
    Recall,
    Release,
    SessionState,
    SessionTimes,
)
from schemas.services.generation import (
    GeneratedToken,
    Generation,
    Sampling,
    SessionBound,
    SessionLoad,
)
from schemas.step import Member

A, B, C, D = (Member.of(sid, "i1") for sid in "abcd")
PATH = (A, B)


def generation(**more: object) -> Generation:
    fields = {
        "id": "g",
        "service": "s",
        "version": "v",
        "job": "j",
        "user": "ruth",
        "writer": "gateway-a",
        "session": 5,
        "prompt": (1, 2, 3),
        "most_tokens": 4,
    } | more
    return Generation.model_validate(fields)


def token(position: int, **more: object) -> GeneratedToken:
    return GeneratedToken.model_validate(
        {"session": 5, "fence": 1, "position": position, "token": 100 + position} | more
    )


def bound(outcome: str = "bound", **more: object) -> SessionBound:
    return SessionBound.model_validate({"session": 5, "outcome": outcome} | more)


def delivered(effects: list[Effect]) -> list[int]:
    return [effect.token.position for effect in effects if isinstance(effect, Deliver)]


def started(**more: object) -> GenerationMachine:
    machine = GenerationMachine(generation(**more))
    assert machine.begin(0.0) == [ChoosePath(frozenset(), ())]
    assert machine.path_found(PATH, 0.0) == [Bind(0, PATH)]
    return machine


def test_tokens_come_once_and_in_order() -> None:
    machine = started()
    for member in PATH:
        assert machine.answered(member, 0, bound(), 0.1) == []
    assert machine.is_bound
    assert delivered(machine.tokens([token(4)], 0.2)) == []
    assert delivered(machine.tokens([token(3), token(3)], 0.3)) == [3, 4]
    effects = machine.tokens([token(5), token(6)], 0.4)
    assert delivered(effects) == [5, 6]
    assert effects[-2:] == [Release(PATH), Finish("length")]
    assert machine.tokens([token(7)], 0.5) == []
    assert machine.state is SessionState.DONE


def test_a_stop_token_ends_the_answer() -> None:
    machine = started(sampling=Sampling(stop_tokens=(103,)))
    effects = machine.tokens([token(3)], 0.1)
    assert effects[0] == Deliver(token(3, ends="stop"))
    assert effects[-1] == Finish("stop")


def test_a_lost_owner_is_replaced_and_its_neighbour_stays() -> None:
    machine = started()
    machine.tokens([token(3)], 0.1)
    assert machine.lost((C,), 0.2) == []
    assert machine.lost((B,), 0.2) == [ChoosePath(frozenset({B, C}), (A,))]
    assert machine.state == "rebuilding"
    assert machine.path_found((A, D), 0.2) == [Bind(1, (A, D))]
    # What the new owner does not know yet is no loss; what an earlier attempt's answer says counts no more.
    assert machine.answered(B, 0, bound("full"), 0.3) == []
    assert delivered(machine.answered(D, 1, bound(tokens=(103, 104)), 0.3)) == [4]
    assert machine.state == "decoding"


def test_silence_is_asked_about_and_a_standstill_changes_the_path() -> None:
    times = SessionTimes(silence_s=1.0, stuck_s=5.0, give_up_s=20.0)
    machine = GenerationMachine(generation(), times)
    machine.begin(0.0)
    machine.path_found(PATH, 0.0)
    assert machine.tick(0.9) == []
    assert machine.tick(1.1) == [Bind(0, PATH)]
    assert machine.tick(1.2) == []
    for member in PATH:
        machine.answered(member, 0, bound(cached=1), 2.0)
    assert machine.tick(6.9) == [Bind(0, PATH)]
    assert ChoosePath(frozenset(PATH), ()) in machine.tick(7.1)
    assert machine.no_path("stage 0 has nobody", 7.1) == []
    (effect,) = machine.tick(7.5)
    assert isinstance(effect, ChoosePath)
    assert machine.tick(30.0)[-1] == Finish("failed", "unavailable: no token for 20 s")


def test_full_instances_are_passed_over_and_then_said() -> None:
    machine = started()
    assert machine.answered(A, 0, bound("full"), 0.1) == [ChoosePath(frozenset({A}), (B,))]
    assert machine.path_found((C, B), 0.1)[-1] == Bind(1, (C, B))
    assert machine.answered(C, 1, bound("full"), 0.2) == [ChoosePath(frozenset({A, C}), (B,))]
    assert machine.no_path("stage 0 …", 0.2)[-1] == Finish(
        "failed", "full: all instances of a stage are full"
    )


def test_a_newer_writer_fences() -> None:
    machine = started()
    assert machine.answered(A, 0, bound("fenced"), 0.1) == [Finish("fenced")]
    machine = started()
    assert machine.tokens([token(3, fence=2)], 0.1) == [Finish("fenced")]
    assert machine.state is SessionState.FENCED


def test_details_are_recalled_before_plain_tokens_count() -> None:
    machine = started(sampling=Sampling(logprobs=1))
    assert machine.answered(B, 0, bound(tokens=(103, 104)), 0.1) == [Recall()]
    effects = machine.recalled([token(3, logprob=-0.5)], 0.2)
    assert [effect.token.logprob for effect in effects if isinstance(effect, Deliver)] == [-0.5, None]


def test_paths_go_to_the_emptiest_and_then_the_fastest() -> None:
    wanted = ChoosePath(frozenset({C}), (A,))
    loads = {
        "b": KnownLoad(SessionLoad(sessions=5, most_sessions=10)),
        "d": KnownLoad(SessionLoad(sessions=1, most_sessions=10, rows=100, free_rows=90)),
    }
    assert choose_path(((A, D), (B, C, D)), wanted, loads, "k") == (A, D)
    assert (
        choose_path(((A,), (C,)), wanted, loads, "k")
        == "stage 1 has no instance that is ready and not avoided"
    )
    spread = {choose_path(((A, B, C, D),), ChoosePath(frozenset(), ()), {}, str(key)) for key in range(50)}
    assert len(spread) == 4


@dataclass
class Mesh:
    """Two stages of two instances that forget, lose and repeat, and are killed; seeded."""

    seed: int
    now: float = 0.0
    alive: dict[int, list[Member]] = field(default_factory=dict)

    def run(self) -> list[int]:
        chance = random.Random(self.seed)
        alive = [[Member.of(f"{stage}{n}", "i1") for n in range(2)] for stage in range(2)]
        machine = GenerationMachine(generation(most_tokens=20), now=0.0)
        got: list[int] = []
        known: dict[Member, list[int]] = {}
        flying: list[GeneratedToken] = []
        replacements = 0

        def carry_out(effects: list[Effect]) -> None:
            for effect in effects:
                if isinstance(effect, ChoosePath):
                    path = choose_path(alive, effect, {}, str(chance.random()))
                    now = self.now
                    carry_out(
                        machine.no_path(path, now) if isinstance(path, str) else machine.path_found(path, now)
                    )
                elif isinstance(effect, Bind):
                    for stage, member in enumerate(effect.path):
                        if member not in alive[stage]:
                            carry_out(machine.silent(member, effect.attempt, self.now))
                        elif chance.random() < 0.9:
                            told = known.setdefault(member, [])
                            if len(machine.answer) > len(told):
                                told[:] = machine.answer
                            carry_out(machine.answered(member, effect.attempt, bound(tokens=told), self.now))
                elif isinstance(effect, Deliver):
                    got.append(effect.token.token)

        carry_out(machine.begin(0.0))
        for step in range(4000):
            if machine.over:
                break
            self.now += 0.05
            if machine.path and machine.path[-1] in alive[1] and chance.random() < 0.5:
                told = known.setdefault(machine.path[-1], [])
                if len(told) < 20:
                    told.append(100 + 3 + len(told))
                    flying.append(token(2 + len(told)))
            if flying and chance.random() < 0.7:
                each = chance.choice(flying)
                if chance.random() < 0.8:
                    flying.remove(each)
                if chance.random() < 0.8:
                    carry_out(machine.tokens([each], self.now))
            if step == 4 or chance.random() < 0.05:
                stage = chance.randrange(2)
                replacements += 1
                victim = alive[stage][0]
                alive[stage] = [alive[stage][1], Member.of(f"{stage}x{replacements}", "i1")]
                known.pop(victim, None)
                if chance.random() < 0.7:
                    carry_out(machine.lost((victim,), self.now))
            carry_out(machine.tick(self.now))
        assert replacements
        assert machine.state is SessionState.DONE, (self.seed, machine.history)
        return got


@pytest.mark.parametrize("seed", range(40))
def test_every_session_ends_with_the_tokens_that_it_has_alone(seed: int) -> None:
    assert Mesh(seed).run() == [103 + number for number in range(20)]


def test_an_owner_without_a_cache_has_all_bound_as_whole() -> None:
    machine = started()
    machine.answered(A, 0, bound(), 0.1)
    assert not machine.is_whole
    assert machine.answered(B, 0, bound("uncached"), 0.1) == [ChoosePath(frozenset(), PATH)]
    assert machine.is_whole
    assert machine.path_found(PATH, 0.1) == [Bind(1, PATH)]
    assert machine.answered(B, 0, bound("uncached"), 0.2) == [], "an answer to the attempt before"
    for member in PATH:
        assert machine.answered(member, 1, bound(), 0.3) == []
    assert machine.is_bound


def test_no_state_follows_an_end() -> None:
    machine = started()
    machine.cancel(0.1)
    assert machine.state in OVER
    for effects in (machine.tick(99), machine.cancel(1), machine.stop(1), machine.lost(PATH, 1)):
        assert effects == []


def test_a_session_that_another_gateway_began_waits_for_a_stage_that_comes_back() -> None:
    machine = GenerationMachine(generation(fence=2))
    machine.begin(0.0)
    assert machine.no_path("stage 0 has nobody", 0.0) == []
    assert machine.tick(0.1) == []
    assert machine.tick(0.3) == [ChoosePath(frozenset(), ())]
    assert machine.path_found(PATH, 0.3) == [Bind(0, PATH)]
    machine = GenerationMachine(generation(fence=2))
    machine.begin(0.0)
    machine.no_path("nobody", 0.0)
    (finish,) = machine.tick(121.0)
    assert finish == Finish("failed", "unavailable: no token for 120 s"), "its time is bounded"


def test_who_worked_for_the_same_request_may_take_over_once_the_session_is_bound() -> None:
    machine = GenerationMachine(generation(), avoid=frozenset({C, D}))
    assert machine.begin(0.0) == [ChoosePath(frozenset({C, D}), ())]
    machine.path_found(PATH, 0.0)
    for member in PATH:
        machine.answered(member, 0, bound(), 0.1)
    assert machine.lost([B], 0.2) == [ChoosePath(frozenset({B}), (A,))]
