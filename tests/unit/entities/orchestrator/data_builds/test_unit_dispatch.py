"""Orders for units: what becomes of one whose agent is gone."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest

from bus.connection import Bus
from entities.orchestrator.data_builds.unit_dispatch import UnitDispatch
from entities.orchestrator.data_builds.unit_ledger import LOST_CODES, Unit
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.units import UnitOrder
from schemas.errors import Unavailable


async def test_a_unit_of_an_agent_that_is_not_known_any_more_is_lost() -> None:
    """A job whose order an agent did not answer has it forgotten: the build goes on elsewhere."""
    spec = DataBuildSpec(name="corpus", source="texts/*.txt")
    dispatch = UnitDispatch(cast(Bus, None), MeshView(), "b1a2b3", spec, "rita", Counter())
    unit = Unit("k0", UnitOrder(phase="plan", index=0), agent="a-n")
    with pytest.raises(Unavailable, match="node agent a-n has left the mesh") as lost:
        await dispatch.give(unit, "")
    assert lost.value.code in LOST_CODES
