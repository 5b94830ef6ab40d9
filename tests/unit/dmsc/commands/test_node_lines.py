"""What `dmsc nodes` prints of a slot."""

from __future__ import annotations

import pytest

from dmsc.commands.mesh.nodes import device_text, judged_text
from schemas.cluster import Slot


@pytest.mark.parametrize(("mig", "text"), [("", "cuda:0"), ("1g.10gb", "cuda:0 (MIG 1g.10gb)")])
def test_a_slice_of_a_card_is_named_beside_the_device(mig: str, text: str) -> None:
    assert device_text(Slot(index=0, device="cuda:0", kind="cuda", mig=mig)) == text


def test_what_the_agent_judges() -> None:
    slow = Slot(index=0, device="cpu", condition="underperforming", performance=0.35)
    assert judged_text(slow) == "underperforming (35%)"
