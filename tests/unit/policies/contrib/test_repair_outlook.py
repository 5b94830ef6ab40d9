"""Whether a repair will take long, from what its beginning tells."""

from __future__ import annotations

import numpy as np
import pytest

from policies.contrib.repair_outlook import LEAST, RepairOutlook


@pytest.mark.parametrize("seed", range(3))
def test_kinds_that_took_long_are_expected_to(seed: int) -> None:
    rng = np.random.default_rng(seed)
    outlook, at = RepairOutlook(1.0), 0.0
    for _ in range(150):
        at += 3.0
        kind = str(rng.choice(["cable", "power"]))
        number = outlook.began(kind, at)
        outlook.repaired(number, at + (0.1 if kind == "cable" else 2.5))
    quick, slow = (outlook.longer(outlook.began(kind, at + 3.0)) for kind in ("cable", "power"))
    assert quick < 0.3 < 0.7 < slow, f"seed {seed}"


def test_with_few_repairs_known_nothing_is_said() -> None:
    outlook = RepairOutlook(1.0)
    for at in range(LEAST - 1):
        outlook.repaired(outlook.began("a", 2.0 * at), 2.0 * at + 0.5)
    assert outlook.longer(outlook.began("a", 100.0)) == 0.5


def test_what_is_not_known_yet_has_no_part_in_it() -> None:
    outlook = RepairOutlook(1.0)
    for at in range(60):
        outlook.began("a", 0.001 * at)  # all open, none older than the limit
    assert outlook.longer(outlook.began("a", 0.07)) == 0.5
