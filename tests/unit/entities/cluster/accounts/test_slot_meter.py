"""Who held which slot: every second of an offered slot is in exactly one stretch."""

from __future__ import annotations

import random

import pytest

from entities.cluster.accounts.slot_meter import SlotMeter
from entities.cluster.capabilities.slots import offer_slots
from entities.cluster.core import LocalIncarnation
from schemas.accounts import TOLD_AGAIN_S, SlotStretch
from schemas.telemetry import DeviceSample, InstanceSample, LinkSample, SessionLoad
from tests.builders.graphs import unit

SLOTS = offer_slots((), 2, 2, 1 << 30, None, {"price": "0.5"})


def holder(sid: str, slot: int, incarnation: str = "i1") -> LocalIncarnation:
    return LocalIncarnation(job="j", incarnation=incarnation, unit=unit(sid), stages=2, slot=slot)


def seconds(stretches: tuple[SlotStretch, ...]) -> float:
    return sum(each.until - each.began for each in stretches)


def test_stretches_cover_what_is_offered_whoever_comes_and_goes() -> None:
    for seed in range(30):
        chance, meter, now = random.Random(seed), SlotMeter(), 1000.0
        for _ in range(40):
            held = [
                holder(f"j-s{slot}-r0", slot, f"i{chance.randrange(1 << 30)}")
                for slot in (0, 1)
                if chance.random() < 0.6
            ]
            slots = SLOTS if chance.random() < 0.9 else SLOTS[:1]
            meter.look(slots, [each for each in held if each.slot in {one.index for one in slots}], now)
            now += chance.random() * 2
        offered = sum(offer.until - offer.since for offer in meter.offers(now))
        assert seconds(meter.stretches(now)) == pytest.approx(offered), f"seed {seed}"


def test_only_a_change_of_holder_is_a_change() -> None:
    meter = SlotMeter()
    assert meter.look(SLOTS, [], 10.0)
    assert not meter.look(SLOTS, [], 11.0)
    assert meter.look(SLOTS, [holder("j-s0-r0", 0)], 12.0)
    assert not meter.look(SLOTS, [holder("j-s0-r0", 0)], 13.0)
    assert meter.look(SLOTS, [holder("j-s0-r0", 0, "i2")], 14.0)
    told = {
        (each.payer, each.incarnation): each.until - each.began
        for each in meter.stretches(20.0)
        if each.slot == 0
    }
    assert told == {(None, None): 2, ("j", "i1"): 2, ("j", "i2"): 6}
    assert {offer.price for offer in meter.offers(20.0)} == {0.5}


def test_what_has_ended_is_told_for_a_while() -> None:
    meter = SlotMeter()
    meter.look(SLOTS, [holder("j-s0-r0", 0)], 10.0)
    meter.look(SLOTS, [], 12.0)
    assert sum(each.payer == "j" for each in meter.stretches(12.0 + TOLD_AGAIN_S)) == 1
    assert not any(each.payer == "j" for each in meter.stretches(13.0 + TOLD_AGAIN_S))


def test_energy_and_bytes_are_counted_from_the_beginning() -> None:
    meter = SlotMeter()
    meter.look(SLOTS, [holder("j-s0-r0", 0)], 10.0)

    def sample(meter_j: float, sent: int) -> InstanceSample:
        return InstanceSample(
            job="j",
            sid="j-s0-r0",
            incarnation="i1",
            cluster="a",
            node="n",
            stage=0,
            step=0,
            links=(LinkSample(peer="j-s1-r0", sent_bytes=sent),),
            device=DeviceSample(device="cpu", energy_j=meter_j),
        )

    for meter_j, sent in ((1000.0, 5), (1600.0, 7), (200.0, 0), (300.0, 1)):  # its driver is loaded anew
        meter.take(sample(meter_j, sent))
    (told,) = [each for each in meter.stretches(20.0) if each.payer == "j"]
    assert told.sent_bytes == 13
    assert told.energy_j == pytest.approx((600 + 100) / 2)  # two slots share the device


def test_what_an_instance_that_serves_computed_is_told() -> None:
    meter = SlotMeter()
    meter.look(SLOTS, [holder("j-s0-r0", 0)], 10.0)
    for busy_s, again_s in ((1.5, 0.0), (2.5, 0.25), (2.0, 0.25)):  # samples may come in another order
        load = SessionLoad(busy_s=busy_s, recomputed_s=again_s)
        meter.take(
            InstanceSample(
                job="j", sid="j-s0-r0", incarnation="i1", cluster="a", node="n", stage=0, step=0, serving=load
            )
        )
    (told,) = [each for each in meter.stretches(20.0) if each.payer == "j"]
    assert (told.busy_s, told.recomputed_s) == (2.5, 0.25)
