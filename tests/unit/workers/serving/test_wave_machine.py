"""Waves: who joins, with how many rows, what a loss brings back, and that nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from workers.serving.wave_machine import RebuildQueue, Wave, WaveLimits, WaveMachine


def kinds(wave: Wave | None) -> dict[str, tuple[str, int, int]]:
    assert wave is not None
    return {item.session: (item.kind.value, item.position, len(item.tokens)) for item in wave.items}


def finish(machine: WaveMachine, wave: Wave | None, token: int = 7) -> None:
    assert wave is not None
    machine.returned(wave.number, {item.session: token for item in wave.items if item.answers})


def test_decoding_comes_first_and_prompts_share_the_rest() -> None:
    machine = WaveMachine(WaveLimits(rows=256))
    machine.admit("early", [1, 2, 3])
    finish(machine, machine.next_wave())
    machine.admit("long", [1] * 500)
    machine.admit("short", [1] * 10)
    wave = machine.next_wave()
    assert kinds(wave) == {
        "early": ("decode", 3, 1),
        "long": ("prefill", 0, 64),
        "short": ("prefill", 0, 10),
    }
    assert [item.answers for item in wave.items] == [True, False, True]  # type: ignore[union-attr]
    finish(machine, wave)
    assert machine.tokens("early") == (1, 2, 3, 7, 7)
    assert kinds(machine.next_wave())["long"] == ("prefill", 64, 192)


def test_several_waves_share_the_sessions_and_a_session_never_overtakes_its_own_token() -> None:
    machine = WaveMachine(WaveLimits(rows=64, in_flight=2))
    for name in "abcd":
        machine.admit(name, [1])
    finish(machine, machine.next_wave())
    one, two = machine.next_wave(), machine.next_wave()
    assert [*kinds(one), *kinds(two)] == ["a", "b", "c", "d"]
    assert machine.next_wave() is None
    finish(machine, two)
    assert set(kinds(machine.next_wave())) == {"c", "d"}


def test_an_ended_session_joins_nothing_and_its_token_is_dropped() -> None:
    machine = WaveMachine(WaveLimits())
    machine.admit("a", [1])
    machine.admit("b", [1])
    wave = machine.next_wave()
    assert machine.end("a")
    assert not machine.end("a")
    assert wave is not None
    assert machine.returned(wave.number, {"a": 3, "b": 4}) == ("b",)
    assert machine.returned(wave.number, {"b": 9}) == ()  # a duplicate
    assert machine.admit("a", [5, 6])  # the same name again is a new session
    assert machine.tokens("b") == (1, 4)
    assert not machine.admit("b", [1])


def test_a_broken_wave_is_sent_again_from_its_first_row() -> None:
    machine = WaveMachine(WaveLimits(rows=64, in_flight=2))
    machine.admit("a", [1] * 100)
    first, second = machine.next_wave(), machine.next_wave()
    assert kinds(second) == {"a": ("prefill", 64, 36)}
    assert first is not None
    machine.broken(first.number)
    again = machine.next_wave()
    assert kinds(again) == {"a": ("prefill", 0, 64)}
    assert second is not None
    assert machine.returned(second.number, {"a": 3}) == ()  # it was computed over rows that are lost
    finish(machine, again)
    finish(machine, machine.next_wave(), 5)
    assert machine.tokens("a")[-1] == 5


def test_what_is_lost_takes_its_share_while_others_decode() -> None:
    machine = WaveMachine(WaveLimits(rows=128, rebuild_share=0.5))
    for name in ("lost", "live"):
        machine.admit(name, [1] * (200 if name == "lost" else 1))
    while len(machine.tokens("lost")) < 203:
        finish(machine, machine.next_wave())
    machine.lost_rows("lost")
    wave = machine.next_wave()
    assert kinds(wave)["lost"] == ("rebuild", 0, 64)
    assert kinds(wave)["live"][0] == "decode"
    assert machine.end("live")
    finish(machine, wave)
    wave = machine.next_wave()  # alone it has the whole wave
    assert kinds(wave) == {"lost": ("rebuild", 64, 128)}
    assert not wave.items[0].answers  # type: ignore[union-attr]
    finish(machine, wave)
    finish(machine, wave := machine.next_wave())
    assert kinds(wave) == {"lost": ("rebuild", 192, 10)}
    assert kinds(machine.next_wave()) == {"lost": ("decode", 202, 1)}


def test_without_a_cache_a_wave_has_whole_histories() -> None:
    machine = WaveMachine(WaveLimits(rows=5), cached=False)
    machine.admit("a", [1, 2])
    machine.admit("b", [1] * 9)
    finish(machine, wave := machine.next_wave())
    assert kinds(wave) == {"a": ("prefill", 0, 2)}
    finish(machine, wave := machine.next_wave())
    assert kinds(wave) == {"b": ("prefill", 0, 9)}
    assert kinds(machine.next_wave()) == {"a": ("prefill", 0, 3)}


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_every_session_gets_its_tokens_within_the_limits(seed: int) -> None:
    chance = random.Random(seed)
    limits = WaveLimits(
        rows=chance.choice([1, 3, 64, 100]),
        sessions=chance.choice([1, 2, 8]),
        in_flight=chance.choice([1, 2, 3]),
    )
    machine, flying = WaveMachine(limits), []
    wanted = {f"s{i}": (chance.randint(1, 150), chance.randint(1, 5)) for i in range(6)}
    waiting = dict(wanted)
    computed: dict[str, int] = {}
    for _ in range(20_000):
        if waiting and chance.random() < 0.3:
            name = next(iter(waiting))
            machine.admit(name, list(range(waiting.pop(name)[0])))
        if (wave := machine.next_wave()) is not None:
            flying.append(wave)
            assert wave.rows <= limits.rows
            assert len(wave.items) <= limits.sessions
            for item in wave.items:
                expected = machine.tokens(item.session)[item.position : item.position + len(item.tokens)]
                assert item.tokens == expected
        if flying and chance.random() < 0.02:
            for wave in flying:
                machine.broken(wave.number)
            for name in machine.sessions:
                computed[name] = 0
                machine.lost_rows(name)
            flying.clear()
        elif flying:
            wave = flying.pop(0)
            sampled = {}
            for item in wave.items:
                assert item.position <= computed.get(item.session, 0)  # no row is computed before its turn
                computed[item.session] = item.position + len(item.tokens)
                if item.answers:
                    sampled[item.session] = computed[item.session]
            for name in machine.returned(wave.number, sampled):
                if len(machine.tokens(name)) == sum(wanted[name]):
                    assert machine.tokens(name) == tuple(range(sum(wanted[name])))
                    machine.end(name)
        if not waiting and not machine.sessions:
            return
    pytest.fail(f"sessions {machine.sessions} never end, seed {seed}")


def test_a_rebuild_queue_gives_whole_ranges_beside_live_waves() -> None:
    queue = RebuildQueue(WaveLimits(rows=128, rebuild_share=0.5))
    queue.add("a", 0, 100)
    queue.add("b", 0, 10)
    queue.add("c", 5, 5)
    assert queue.take(live_rows=10) == [("a", 0, 64)]
    assert queue.waits("a")
    assert not queue.waits("c")
    assert queue.take(live_rows=0) == [("a", 64, 100), ("b", 0, 10)]
    assert queue.rows_waiting == 0
    queue.add("a", 0, 100)
    queue.drop("a")
    assert queue.take(0) == []


def test_limits_that_make_no_sense_are_refused() -> None:
    for wrong in ({"rows": 0}, {"rebuild_share": 0.0}, {"decode_share": 1.5}):
        with pytest.raises(ValueError, match="must be"):
            WaveLimits(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no tokens"):
        WaveMachine(WaveLimits()).admit("a", [])
