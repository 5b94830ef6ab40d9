"""`DeviceKind`: what a kind of device has to tell, and the two built-in kinds, CPU and CUDA.

A kind of one's own is an object with these methods, which `dmsc join --device-kind module:NAME` names
(`examples/xpu_devices.py`).
"""

from __future__ import annotations

import importlib
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from schemas.base import is_token
from schemas.errors import BadInput


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A device of this node: `device` as torch spells it (`cuda:0`), its product's name, its memory."""

    device: str
    name: str
    memory_bytes: int
    kind: str
    """The name of its kind; jobs ask for it (`requires.device`)."""


class DeviceKind(Protocol):
    """A kind of device. Its methods may initialise the driver: they run in short-lived processes."""

    name: str
    """What jobs and the registry call the kind: mostly the part before the colon of torch's device string."""

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
            found.append(FoundDevice(f"cuda:{index}", properties.name, properties.total_memory, self.name))
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


_METHODS = ("name", "is_built_in", "find", "synchronize", "build")


def register_kind(path: str) -> DeviceKind:
    """Adds a kind to `KINDS`, in this process and all that it forks.

    Args:
        path: `module:NAME` of an object with the methods of `DeviceKind`.

    Raises:
        BadInput: there is no such object, or it is no kind.
    """
    module, _, attribute = path.partition(":")
    try:
        kind: DeviceKind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(f"device kind {path}: {error}; write it as module:NAME") from error
    lacking = [name for name in _METHODS if not hasattr(kind, name)]
    if lacking or not is_token(kind.name):
        what = f"lacks {', '.join(lacking)}" if lacking else f"has the name {kind.name!r}, which is none"
        raise BadInput(f"device kind {path} {what}: see workers.devices.device_kind.DeviceKind")
    KINDS[kind.name] = kind
    return kind


def processor_name() -> str:
    """The processor's product name as the kernel gives it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
