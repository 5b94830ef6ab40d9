"""A node's instances: what is refused before anything starts leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from bus.security.credentials import delegate, issue, new_root
from bus.security.identity import Identity
from entities.cluster.cache_folders import CacheFolders
from entities.cluster.capabilities.slots import offer_slots
from entities.cluster.config import ClusterConfig
from entities.cluster.context import NodeContext
from entities.cluster.file_reach import FileRules
from entities.cluster.instances import NodeInstances
from entities.cluster.store_folders import StoreFolders
from schemas.envelope import EntityKind as K
from schemas.errors import BadInput
from tests.builders.graphs import start, unit


def instances(tmp_path: Path) -> NodeInstances:
    """Of a guarded node with one slot, on which nothing may start."""
    agent = issue(new_root(), Identity(name="a-n", kind=K.CLUSTER, cluster="a", node="n"))

    def credential_of(sid: str, job: str) -> str | None:
        return delegate(agent, Identity(name=sid, kind=K.INSTANCE, cluster="a", node="n", job=job))

    def starts_nothing(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        work.close()
        raise AssertionError("something was started")

    context = NodeContext(
        config=ClusterConfig(cluster="a", node="n"),
        processes=None,  # type: ignore[arg-type]  # no process is started
        files=FileRules(),
        caches=CacheFolders(tmp_path, 0),
        credential=credential_of,
        start_task=starts_nothing,
        send=None,  # type: ignore[arg-type]  # nothing is told
    )
    stores = StoreFolders(tmp_path)
    there = NodeInstances(context, stores, code=None, on_change=lambda: None)  # type: ignore[arg-type]
    there.offer(offer_slots((), 1, 2, 8 << 30))
    return there


@pytest.mark.parametrize(("job", "sid"), [("j-1", "j-1-s0-r0"), ("j", "k-s0-r0")])
async def test_a_unit_that_can_have_no_credential_is_refused_and_keeps_no_slot(
    tmp_path: Path, job: str, sid: str
) -> None:
    there = instances(tmp_path)
    order = start(unit(sid), job=job, incarnation="i1", stages=1, layer_count=1)
    with pytest.raises(BadInput, match="is not called as those of job"):
        await there.start(order)
    assert [slot.busy_with for slot in there.ledger.slots] == [None]
    assert there.renew_credentials() == 0  # no such instance is there: it does not end the agent either
