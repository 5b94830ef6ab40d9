"""A kind of device that stands for a third one: two of them, on which torch computes as on the processor."""

from __future__ import annotations

from typing import Any

from workers.devices.device_kind import FoundDevice


class NpuKind:
    name = "npu"

    def is_built_in(self) -> bool:
        return True

    def find(self) -> list[FoundDevice]:
        return [FoundDevice("cpu:0", f"NPU {number}", 1 << 30, self.name) for number in range(2)]

    def synchronize(self, device: Any) -> None:
        pass

    def build(self, device: Any) -> str:
        return "npu"


KIND = NpuKind()
