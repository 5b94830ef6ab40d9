"""How much of a mesh one user may take: pure."""

from __future__ import annotations

import pytest

from schemas.quota import GIB, Quota, QuotaUse, slots_of, wider_by
from tests.builders.graphs import graph, unit
from tests.builders.jobs import job

USE = QuotaUse(jobs=2, slots=7, stored_bytes=3 * GIB, datasets=1)


@pytest.mark.parametrize("key", list(QuotaUse.model_fields))
def test_each_limit_holds_by_itself_and_says_so(key: str) -> None:
    have = getattr(USE, key)
    more = QuotaUse(**{key: 1})
    assert Quota(rule="r", **{key: have + 1}).excess(USE, more) == ""
    assert Quota(rule="r").excess(USE, more) == ""
    said = Quota(rule="r", **{key: have}).excess(USE, more)
    assert "(quota r)" in said
    assert "\n" not in said
    assert said.count(";") >= 2, "what, how much, and the remedy"


def test_who_is_over_a_limit_may_still_do_what_takes_nothing_of_it() -> None:
    assert Quota(jobs=1).excess(USE, QuotaUse(datasets=1)) == ""


def test_a_standby_is_no_working_replica_where_a_job_gets_wider() -> None:
    working, standbys = (
        [unit(f"j-s{stage}-r{replica}", standby=bool(replica)) for stage in (0, 1)] for replica in (0, 1)
    )
    record = job(graph=graph(*working, *standbys))
    assert slots_of(record) == 4
    assert wider_by(record, 0, 2) == 1
    assert wider_by(record, None, 2) == 2
    assert wider_by(record, None, 1) == 0
