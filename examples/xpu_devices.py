"""A third kind of device: Intel's GPUs, for `dmsc join --device-kind examples.xpu_devices:KIND`.

A node then offers a slot for each of them, measured like others; jobs ask for them by `requires: {device:
xpu}`. Any kind that torch computes on can be added so. It has not been run on such a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from workers.devices.device_kind import FoundDevice


class XpuKind:
    """Intel's GPUs, through `torch.xpu`."""

    name = "xpu"

    def is_built_in(self) -> bool:
        return bool(torch.xpu._is_compiled())

    def find(self) -> list[FoundDevice]:
        found = []
        for index in range(torch.xpu.device_count()):
            properties: Any = torch.xpu.get_device_properties(index)
            found.append(FoundDevice(f"xpu:{index}", properties.name, properties.total_memory, self.name))
        return found

    def synchronize(self, device: torch.device) -> None:
        torch.xpu.synchronize(device)

    def build(self, device: torch.device) -> str:
        """What decides about bits besides the program: the library, and the product that chooses kernels."""
        properties: Any = torch.xpu.get_device_properties(device)
        return f"xpu {torch.version.xpu} {properties.name} {properties.driver_version}"


KIND = XpuKind()
