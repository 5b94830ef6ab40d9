"""Kinds of devices of one's own, with a real fork server (draft §4.3 Type 1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.errors import Unavailable
from tests.integration.entities.cluster_mesh import stand_in_mesh


async def test_a_third_kind_is_found_measured_and_offered(tmp_path: Path) -> None:
    async with stand_in_mesh(tmp_path) as mesh:
        kinds = ("npu_kind:KIND",)
        async with mesh.agent("a", device="auto", slots=None, device_kinds=kinds):
            status = await mesh.smo.status("a-n", lambda s: s.warm)
        assert [(slot.kind, slot.device, slot.device_name) for slot in status.slots] == [
            ("npu", "cpu:0", "NPU 0"),
            ("npu", "cpu:0", "NPU 1"),
        ]
        assert {slot.bits_class for slot in status.slots} == {"cpu-stand-in"}
        measured = [path.read_text() for path in (tmp_path / "logs").glob("*standard-stage*")]
        assert measured  # by a worker of its own
        with pytest.raises(Unavailable, match="device kind nowhere:KIND: No module named"):
            async with mesh.agent("b", device="auto", device_kinds=("nowhere:KIND",)):
                pass
