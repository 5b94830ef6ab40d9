"""Orders for units: what becomes of one whose agent is gone."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest

from bus.connection import Bus
from bus.messaging.key_value import Change
from entities.orchestrator.data_builds.progress import UnitTimes
from entities.orchestrator.data_builds.unit_dispatch import UnitDispatch
from entities.orchestrator.data_builds.unit_ledger import LOST_CODES, Unit
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.units import UnitOrder
from schemas.envelope import EntityKind
from schemas.errors import Unavailable
from schemas.registry import InstanceState
from tests.builders.graphs import node
from tests.builders.records import service


async def test_a_unit_of_an_agent_that_is_not_known_any_more_is_lost() -> None:
    """A job whose order an agent did not answer has it forgotten: the build goes on elsewhere."""
    spec = DataBuildSpec(name="corpus", source="texts/*.txt")
    dispatch = UnitDispatch(cast(Bus, None), MeshView(), "b1a2b3", spec, "rita", Counter())
    unit = Unit("k0", UnitOrder(phase="plan", index=0), agent="a-n")
    with pytest.raises(Unavailable, match="node agent a-n has left the mesh") as lost:
        await dispatch.give(unit, "")
    assert lost.value.code in LOST_CODES


async def test_a_node_that_the_registry_says_is_leaving_gets_no_unit() -> None:
    """Draft §1: data is prepared where the registry finds node agents."""
    spec = DataBuildSpec(name="corpus", source="texts/*.txt")
    mesh = MeshView()
    dispatch = UnitDispatch(cast(Bus, None), mesh, "b1a2b3", spec, "rita", Counter())
    for cluster in "ab":
        await mesh.node(node(cluster))
    assert [load.agent for load in dispatch.loads(UnitTimes())] == ["a-n", "b-n"]
    fields = {"kind": EntityKind.CLUSTER, "prefix": "entity/cluster/a"}
    for state, agents in ((InstanceState.ACTIVE, ["a-n", "b-n"]), (InstanceState.DRAINING, ["b-n"])):
        record = service("a-n", state=state, **fields)
        await mesh.record(Change(key="a-n", message=record, revision=1))
        assert [load.agent for load in dispatch.loads(UnitTimes())] == agents
