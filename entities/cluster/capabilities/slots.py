"""The slots that a node offers, with what each can do. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from entities.cluster.core import Device, EmulatedSlot
from schemas.cluster import Slot
from schemas.registry import Capability

WORK = ("stage", "matmul", "matmul_bf16", "matmul_fp16", "memory")
"""The kinds of work of which a device's speed is measured (`workers.tasks.standard_stage`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """What the standard stage found out about a device. Without a speed it could not be measured."""

    speed: Mapping[str, float]
    bits_class: str
    flops_per_s: float = 0.0
    precisions: tuple[str, ...] = ()
    busy: float = 0.0
    """The part of the node's cores that others kept busy meanwhile, 0…1: such figures are too low."""


def present_devices(devices: tuple[Device, ...], memory_bytes: int) -> tuple[Device, ...]:
    """The devices of a node: its accelerators, or the processor with the main memory if there are none."""
    return devices or (Device(device="cpu", name="cpu", memory_bytes=memory_bytes),)


def offer_slots(
    devices: tuple[Device, ...],
    count: int | None,
    cores: int,
    memory_bytes: int,
    measured: Mapping[str, MeasuredDevice] | None = None,
    labels: Mapping[str, str] | None = None,
    emulated: tuple[EmulatedSlot, ...] = (),
) -> tuple[Slot, ...]:
    """The slots of a node: one per accelerator, else one per core; `count` overrides the number.

    If there are more slots than devices, they are assigned in turn; a device's memory is divided among its
    slots.

    Args:
        devices: accelerators; empty on a CPU node.
        count: number of slots that the operator wants, or None.
        cores: CPU cores of the node.
        memory_bytes: main memory of the node, divided among CPU slots.
        measured: what each device can do, by torch's name for it.
        labels: the node's.
        emulated: other devices that the slots stand for, in order; their number is that of the slots.
    """
    if not devices and count is None:
        count = cores
    devices = present_devices(devices, memory_bytes)
    if emulated:
        count = len(emulated)
    count = len(devices) if count is None else count
    slots = []
    for index in range(count):
        device = devices[index % len(devices)]
        sharers = count // len(devices) + (index % len(devices) < count % len(devices))
        slot = Slot(
            index=index,
            device=device.device,
            kind=device.kind,
            device_name=device.name,
            memory_bytes=device.memory_bytes // sharers,
            mig=mig_profile(device.name),
            labels=dict(labels or {}),
        )
        if (found := (measured or {}).get(device.device)) is not None:
            slot = slot.model_copy(
                update={
                    "speed": dict(found.speed),
                    "bits_class": found.bits_class,
                    "flops_per_s": found.flops_per_s,
                    "precisions": found.precisions,
                }
            )
        slots.append(_stand_for(slot, emulated[index]) if emulated else slot)
    return tuple(slots)


def _stand_for(slot: Slot, other: EmulatedSlot) -> Slot:
    update: dict[str, object] = {"speed": dict.fromkeys(WORK, other.speed), "emulated": True}
    if other.memory_bytes is not None:
        update["memory_bytes"] = other.memory_bytes
    return slot.model_copy(update=update)


def mig_profile(name: str) -> str:
    """The profile of a slice of a GPU (`1g.10gb`) from the product's name as CUDA gives it; empty: none.

    A process sees one slice, which `CUDA_VISIBLE_DEVICES` names: an agent for each.
    """
    return name.rpartition(" MIG ")[2] if " MIG " in name else ""


def node_capability(slots: Sequence[Slot], labels: Mapping[str, str], cores: int) -> Capability:
    """What the whole node can do: the first slot's figures, the memory of all."""
    first = slots[0].capability() if slots else Capability(labels=dict(labels))
    return first.model_copy(
        update={
            "memory_bytes": sum(slot.memory_bytes for slot in slots),
            "slots": len(slots),
            "cores": cores,
        }
    )
