"""Refusals are recorded one by one up to a bound, then counted: nothing is lost silently, nothing floods."""

from __future__ import annotations

from entities.authorizer.folding import OTHERS, Folding, FoldingConfig

CONFIG = FoldingConfig(window_s=10.0, each=2, users=3)


def test_the_first_few_of_each_user_then_a_count() -> None:
    folding = Folding(CONFIG)
    taken = [folding.take("ann", "job.cancel", f"j{index}", "no", 1.0) for index in range(5)]
    assert taken == [True, True, False, False, False]
    assert folding.take("bob", "job.cancel", "j", "no", 2.0), "another user's are not hidden by it"
    assert folding.due(5.0) == 6.0
    (folded,) = folding.close()
    assert (folded.user, folded.count, folded.action, folded.resource) == ("ann", 3, "job.cancel", "j4")
    assert folding.due(12.0) is None
    assert folding.take("ann", "a", "r", "no", 12.0), "a new window"


def test_a_flood_of_names_is_bounded() -> None:
    folding = Folding(CONFIG)
    recorded = sum(folding.take(f"u{index}", "a", "r", "no", 1.0) for index in range(1_000))
    folded = folding.close()
    assert recorded == 3 + CONFIG.each
    assert [one.user for one in folded] == [OTHERS]
    assert recorded + sum(one.count for one in folded) == 1_000
