"""How long an all-reduce may take."""

from __future__ import annotations

from workers.reduction import TIMEOUT_S, reduce_timeout_s
from workers.tensor_link import SLOWEST_BYTES_PER_S


def test_patience_grows_with_what_has_to_cross_the_slowest_link() -> None:
    assert reduce_timeout_s(0) == TIMEOUT_S
    assert reduce_timeout_s(int(SLOWEST_BYTES_PER_S) * 60) == TIMEOUT_S + 120
