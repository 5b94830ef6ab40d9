"""Draft §6.3: functional modules read structured state; names here are those of the tables themselves."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from policies.kit import instance_store
from policies.kit.instance_store import InstanceStore
from schemas.errors import NoResponders, NotFound
from schemas.step import Member
from schemas.store import StoreQuery, StoreRows
from workers.local_store.store_schema import COLUMNS


@pytest.mark.parametrize(
    ("table", "record"),
    [
        ("metrics", instance_store.StoredMetrics),
        ("versions", instance_store.StoredVersion),
        ("events", instance_store.StoredEvent),
        ("configuration", instance_store.StoredConfiguration),
        ("snapshots", instance_store.StoredSnapshot),
        ("audit", instance_store.StoredOrder),
    ],
)
def test_records_have_the_columns_of_their_table(table: Any, record: Any) -> None:
    assert [field.name for field in fields(record)] == list(COLUMNS[table])


class StandInBus:
    """Answers with two configurations, of which the later incarnation's counts."""

    def __init__(self) -> None:
        self.asked: list[tuple[StoreQuery, dict[str, Any]]] = []
        self.there = True

    async def request(self, row: Any, query: StoreQuery, *, timeout_s: float, **tokens: Any) -> StoreRows:
        self.asked.append((query, tokens))
        if not self.there:
            raise NoResponders("nobody listens")
        return StoreRows(
            member=Member(sid="job-s0-r0", incarnation="two"),
            table="configuration",
            columns=tuple(COLUMNS["configuration"]),
            rows=(
                (1, 1.0, "one", "epoch", "1"),
                (2, 2.0, "two", "epoch", "2"),
                (3, 2.0, "two", "tags", '["x"]'),
            ),
            schema_version=1,
        )


async def test_the_configuration_is_that_of_the_present_incarnation() -> None:
    bus = StandInBus()
    store = InstanceStore(bus, job="job", sid="job-s0-r0")
    assert await store.configuration() == {"epoch": 2, "tags": ["x"]}
    query, tokens = bus.asked[0]
    assert (query.table, query.newest, tokens) == ("configuration", True, {"job": "job", "sid": "job-s0-r0"})


async def test_an_instance_that_is_gone_is_told_in_one_line() -> None:
    bus = StandInBus()
    bus.there = False
    with pytest.raises(NotFound, match="job-s0-r0 of job is not there: an instance answers while it lives"):
        await InstanceStore(bus, job="job", sid="job-s0-r0").events()
