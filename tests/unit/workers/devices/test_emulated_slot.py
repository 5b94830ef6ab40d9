"""What an emulated slot does to whoever stands in it: by its script and the clock, and not by the process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from entities.cluster.config import ClusterConfig
from entities.cluster.core import EmulatedSlot
from schemas.errors import BadInput
from schemas.slot_conditions import NORMAL, SlotPhase, SlotScript, node_folder, script_file, script_of
from workers.devices.emulated_slot import EmulatedSlotConditions
from workers.links.link_shaping import Shaping
from workers.models import padded

PHASES = (SlotPhase(at_s=100.0, speed=0.25), SlotPhase(at_s=130.0, latency_ms=40.0, loss=0.02))


def slot(file: Path, now: list[float], speed: float = 1.0) -> EmulatedSlotConditions:
    return EmulatedSlotConditions(speed, file, clock=lambda: now[0])


def test_a_script_is_followed_by_the_clock() -> None:
    script = script_of(reversed(PHASES))
    assert [script.at(now).speed for now in (0.0, 99.9, 100.0, 129.9, 130.0)] == [1.0, 1.0, 0.25, 0.25, 1.0]
    assert not script.at(100.0).shapes_links
    assert script.at(1e9).shapes_links
    with pytest.raises(ValidationError, match="must not be before"):
        SlotScript(phases=tuple(reversed(PHASES)))


def test_two_processes_of_one_slot_are_as_slow_and_another_slot_is_not(tmp_path: Path) -> None:
    now = [110.0]
    script_file(tmp_path, 1).write_text(script_of(PHASES).model_dump_json())
    before, after_a_fork = (slot(script_file(tmp_path, 1), now, speed=2.0) for _ in range(2))
    assert before.speed_now() == after_a_fork.speed_now() == 0.5
    assert slot(script_file(tmp_path, 0), now, speed=2.0).speed_now() == 2.0
    assert EmulatedSlotConditions(2.0).speed_now() == 2.0


def test_a_script_may_come_change_and_go(tmp_path: Path) -> None:
    file, now = script_file(tmp_path, 0), [110.0]
    conditions = slot(file, now)
    assert conditions.now() is NORMAL
    file.write_text(script_of(PHASES).model_dump_json())
    assert conditions.speed_now() == 0.25
    file.write_text('{"phases": [{"at_s": 1, "speed": 0}]}')
    assert conditions.now() is NORMAL
    file.write_text(json.dumps({"phases": [{"at_s": 1, "speed": 0.125}]}))
    assert conditions.speed_now() == 0.125
    file.unlink()
    assert conditions.now() is NORMAL


def test_padded_layers_wait_by_the_slot_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(padded.time, "sleep", waits.append)
    file, now = script_file(tmp_path, 0), [0.0]
    file.write_text(script_of(PHASES).model_dump_json())
    monkeypatch.setattr(padded, "_slot", [slot(file, now)])
    layer = padded.Padded(torch.nn.Identity(), 0.010)
    plain = layer(torch.ones(2, requires_grad=True))
    now[0] = 110.0  # between forward and backward
    plain.sum().backward()
    assert waits == [0.010, pytest.approx(0.080, rel=0.1)]
    monkeypatch.setattr(padded, "_slot", [EmulatedSlotConditions(2.0)])
    waits.clear()
    layer(torch.ones(2, requires_grad=True)).sum().backward()
    assert waits == [pytest.approx(0.005, rel=0.1), pytest.approx(0.010, rel=0.1)]


async def test_a_slots_link_delays_and_loses_what_is_sent_from_it(tmp_path: Path) -> None:
    file, now = script_file(tmp_path, 0), [140.0]
    file.write_text(script_of([SlotPhase(at_s=130.0, latency_ms=1.0, loss=0.99999)]).model_dump_json())
    assert Shaping.of_environment({}, EmulatedSlotConditions(1.0)) is None
    shaping = Shaping.of_environment({}, slot(file, now))
    assert shaping is not None
    line, order = shaping.line("anybody", "else"), []
    done = asyncio.Event()
    line.post(9000, lambda: order.append("there"), lambda: (order.append("lost"), done.set()))
    await done.wait()
    now[0] = 120.0
    done.clear()
    line.post(9000, lambda: (order.append("there"), done.set()), lambda: order.append("lost"))
    await done.wait()
    assert order == ["lost", "there"]


def test_scripts_need_slots_that_follow_them(tmp_path: Path) -> None:
    options = {"cluster": "a", "node": "n", "servers": ("nats://localhost",), "emulation": tmp_path}
    with pytest.raises(BadInput, match=r"only emulated slots follow it; add --emulate-slot 1"):
        ClusterConfig(**options)
    assert ClusterConfig(**options, emulated_slots=(EmulatedSlot(speed=1.0),)).emulation == tmp_path
    assert script_file(node_folder(tmp_path, "a", "n"), 3) == tmp_path / "a" / "n" / "slot-3.json"
