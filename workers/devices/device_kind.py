"""`DeviceKind`: what a kind of device has to tell, and the two built-in kinds, CPU and CUDA."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A device of this node: `device` as torch spells it (`cuda:0`), its product's name, its memory."""

    device: str
    name: str
    memory_bytes: int


class DeviceKind(Protocol):
    """A kind of device. Its methods may initialise the driver: they run in short-lived processes."""

    name: str
    """The part before the colon of torch's device string."""

    def is_built_in(self) -> bool:
        """Whether this torch can use such devices at all. It must not initialise a driver."""
        ...

    def find(self) -> list[FoundDevice]:
        """The devices of this kind on this node, in torch's order; empty: none."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all that it was asked to do."""
        ...

    def build(self, device: torch.device) -> str:
        """What decides about the bits of its results besides the program: libraries, kernels, product."""
        ...


class CpuKind:
    """The processor. `find` names none: a node without other devices offers its cores."""

    name = "cpu"

    def is_built_in(self) -> bool:
        return True

    def find(self) -> list[FoundDevice]:
        return []

    def synchronize(self, device: torch.device) -> None:
        """Nothing to wait for: operations return when they are done."""

    def build(self, device: torch.device) -> str:
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


class CudaKind:
    """NVIDIA's GPUs, and AMD's under the same name in torch's builds for ROCm."""

    name = "cuda"

    def is_built_in(self) -> bool:
        return torch.version.cuda is not None or torch.version.hip is not None

    def find(self) -> list[FoundDevice]:
        found = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found.append(FoundDevice(f"cuda:{index}", properties.name, properties.total_memory))
        return found

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def build(self, device: torch.device) -> str:
        """Libraries choose kernels by the product: its architecture, and how many processors it has."""
        properties: Any = torch.cuda.get_device_properties(device)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch: unannotated
        library = torch.version.cuda or f"hip {torch.version.hip}"
        return f"{library} cudnn {cudnn} {properties.name} {properties.multi_processor_count}"


KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in (CpuKind(), CudaKind())}


def kind_of(device: str) -> DeviceKind:
    """The kind of a device as torch spells it.

    Raises:
        KeyError: no such kind is known here.
    """
    return KINDS[device.partition(":")[0]]


def processor_name() -> str:
    """The processor's product name as the kernel gives it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
