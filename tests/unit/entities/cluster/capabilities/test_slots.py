"""What the slots of a node can do (draft §4.3 Type 1, §4.4(1))."""

from __future__ import annotations

import pytest

from entities.cluster.capabilities.slots import MeasuredDevice, mig_profile, offer_slots
from entities.cluster.core import Device, EmulatedSlot
from schemas.errors import BadInput

GIB = 1 << 30
MEASURED = MeasuredDevice(
    speed={"stage": 1.5, "matmul": 2.0}, bits_class="cpu-abc", flops_per_s=1e11, precisions=("fp32",)
)


class TestSlots:
    def test_a_cpu_node_offers_its_cores_and_shares_its_memory(self) -> None:
        slots = offer_slots((), None, 4, 8 * GIB)
        assert [(slot.index, slot.device, slot.memory_bytes) for slot in slots] == [
            (index, "cpu", 2 * GIB) for index in range(4)
        ]

    def test_a_gpu_node_offers_its_devices(self) -> None:
        devices = tuple(Device(device=f"cuda:{index}", name="H", memory_bytes=8 * GIB) for index in range(2))
        slots = offer_slots(devices, None, 64, GIB)
        assert [(slot.device, slot.device_name, slot.memory_bytes) for slot in slots] == [
            ("cuda:0", "H", 8 * GIB),
            ("cuda:1", "H", 8 * GIB),
        ]

    def test_more_slots_than_devices_share_them_and_fewer_leave_some(self) -> None:
        devices = tuple(Device(device=f"cuda:{index}", memory_bytes=8 * GIB) for index in range(2))
        assert [(s.device, s.memory_bytes // GIB) for s in offer_slots(devices, 3, 1, 0)] == [
            ("cuda:0", 4),
            ("cuda:1", 8),
            ("cuda:0", 4),
        ]
        assert [(s.device, s.memory_bytes // GIB) for s in offer_slots(devices, 1, 1, 0)] == [("cuda:0", 8)]
        assert offer_slots(devices, 0, 1, 0) == ()

    def test_a_slot_says_what_its_device_was_measured_to_do(self) -> None:
        (slot,) = offer_slots((), 1, 4, GIB, {"cpu": MEASURED}, {"region": "eu"})
        assert (slot.kind, slot.speed, slot.bits_class) == ("cpu", {"stage": 1.5, "matmul": 2.0}, "cpu-abc")
        assert (slot.flops_per_s, slot.precisions, slot.labels) == (1e11, ("fp32",), {"region": "eu"})
        registered = slot.capability(compute_threads=2)
        assert (registered.compute_threads, registered.speed, registered.memory_bytes) == (2, slot.speed, GIB)

    def test_devices_of_a_node_keep_their_own_figures(self) -> None:
        devices = (Device(device="cuda:0", name="H"), Device(device="cuda:1", name="A"))
        slower = MeasuredDevice(speed={"stage": 0.5}, bits_class="cuda-a")
        slots = offer_slots(devices, None, 1, 0, {"cuda:0": MEASURED, "cuda:1": slower})
        assert [(slot.kind, slot.speed["stage"]) for slot in slots] == [("cuda", 1.5), ("cuda", 0.5)]

    def test_a_slice_of_a_gpu_says_its_profile(self) -> None:
        name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
        (slot,) = offer_slots((Device(device="cuda:0", name=name, memory_bytes=10 * GIB),), None, 1, 0)
        assert slot.mig == mig_profile(name) == "1g.10gb"
        assert mig_profile("NVIDIA H100 80GB HBM3") == ""


class TestEmulatedSlots:
    def test_they_stand_for_other_devices_and_say_so(self) -> None:
        emulated = tuple(map(EmulatedSlot.parse, ("1", "1", "2", "2", "4:0.5")))
        slots = offer_slots((), 99, 1, 10 * GIB, {"cpu": MEASURED}, emulated=emulated)
        assert [slot.speed["stage"] for slot in slots] == [1, 1, 2, 2, 4]
        assert [slot.memory_bytes for slot in slots] == [2 * GIB] * 4 + [GIB // 2]
        assert all(slot.emulated and slot.bits_class == "cpu-abc" for slot in slots)

    @pytest.mark.parametrize("text", ["", "0", "-1", "nan", "2:0", "2:-1", "fast", "1e9", "1:1e400", "1:2:3"])
    def test_others_are_refused_with_the_way_to_write_them(self, text: str) -> None:
        with pytest.raises(BadInput, match=r"SPEED:MEMORY_GIB"):
            EmulatedSlot.parse(text)
