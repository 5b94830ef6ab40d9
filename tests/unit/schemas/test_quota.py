"""How much of a mesh one user may take: pure."""

from __future__ import annotations

import pytest

from schemas.quota import GIB, Quota, QuotaUse

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
