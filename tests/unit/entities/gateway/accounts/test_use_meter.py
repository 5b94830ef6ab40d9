"""What a gateway says of whom it answered: from a beginning, and no longer than is of use."""

from __future__ import annotations

from entities.gateway.accounts.use_meter import UseMeter
from schemas.accounts import MOST_USES, TOLD_AGAIN_S, ServiceUse


def test_counts_go_on_until_they_are_left_out_and_then_begin_anew() -> None:
    meter = UseMeter()
    assert meter.told(0.0) == ()
    meter.add("v", "ruth", 10.0, prompt_tokens=3, tokens=5)
    meter.add("v", "ann", 11.0)
    meter.add("v", "ruth", 12.0, prompt_tokens=1, tokens=2)
    ruth = ServiceUse(job="v", user="ruth", began=10.0, prompt_tokens=4, tokens=7, answers=2)
    ann = ServiceUse(job="v", user="ann", began=11.0, answers=1)
    assert set(meter.told(13.0)) == {ruth, ann}
    assert meter.told(11.5 + TOLD_AGAIN_S) == (ruth,)
    meter.add("v", "ann", 200.0, tokens=1)
    assert ServiceUse(job="v", user="ann", began=200.0, tokens=1, answers=1) in meter.told(200.0)


def test_a_report_is_bounded() -> None:
    meter = UseMeter()
    for number in range(MOST_USES + 3):
        meter.add("v", f"u{number}", float(number) / 1e6)
    told = meter.told(1.0)
    assert len(told) == MOST_USES
    assert told[0].user == "u3", "those that changed longest ago are left out"
