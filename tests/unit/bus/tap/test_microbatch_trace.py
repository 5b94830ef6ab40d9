"""Following one microbatch: in order, with latencies, repeats told as such."""

from __future__ import annotations

import pytest

from bus import subjects
from bus.tap.message import decode
from bus.tap.microbatch_trace import Microbatch, MicrobatchTrace
from bus.wire import codec
from schemas.data_plane import NoticeAnswer, TensorMeta
from schemas.envelope import EntityKind, Sender
from schemas.errors import BadInput
from schemas.step import MicrobatchDispatch, StepBegin
from tests.builders import steps
from tests.builders.steps import member

SENDER = codec.sender_map(Sender(name="orchestrator", kind=EntityKind.ORCHESTRATOR, incarnation="o1"))
KEY = {"job": "j", "epoch": 1, "step": 3, "attempt": 0}


def at(ms: float, row, message, **tokens):
    return decode(row(**tokens), codec.encode(message, SENDER, "e"), at=ms / 1e3)


def notice(ms: float, sender: str, receiver: str, microbatch: int = 1, stage: int = 0):
    tensors = (TensorMeta(shape=(4, 128), dtype="int64"),)
    fields = {**KEY, "microbatch": microbatch, "stage": stage, "tensors": tensors, "link": "l1", "tag": 7}
    message = steps.notice(member(sender), member(receiver), **fields)
    return at(ms, subjects.NOTICE, message, job="j", sid=receiver)


def answer(ms: float, receiver: str):
    message = NoticeAnswer(
        job="j",
        step=3,
        attempt=0,
        microbatch=1,
        direction="forward",
        receiver=member(receiver),
        link="l1",
        tag=7,
        answer="accepted",
    )
    return at(ms, subjects.NOTICE_ANSWER, message, job="j", sid="sender")


def claim(ms: float, sid: str, stage: int, upstream: str):
    figures = {"forward_ms": 5.0, "backward_ms": 9.0, "loss": 2.25 if stage == 1 else None}
    message = steps.claim(1, sid, stage=stage, upstream=upstream, **figures)
    return at(ms, subjects.STEP_CLAIM, message, job="j", sid=sid)


def test_the_hops_of_one_microbatch_in_order_with_latencies():
    trail = MicrobatchTrace(Microbatch.parse("j/3/1"))
    seen = [
        at(0, subjects.STEP_BEGIN, StepBegin(**KEY, microbatches=(0, 1)), job="j", gateway="a"),
        at(1, subjects.STEP_DISPATCH, MicrobatchDispatch(**KEY, microbatches=(1,)), job="j", sid="j-data-r0"),
        at(1, subjects.STEP_DISPATCH, MicrobatchDispatch(**KEY, microbatches=(0,)), job="j", sid="j-data-r1"),
        notice(3, "j-data-r0", "j-s0-r1"),
        notice(4, "j-data-r1", "j-s0-r0", microbatch=0),
        notice(203, "j-data-r0", "j-s0-r1"),
        answer(205, "j-s0-r1"),
        notice(210, "j-s0-r1", "j-s1-r0", stage=1),
        claim(230, "j-s1-r0", 1, "j-s0-r1"),
        claim(240, "j-s0-r1", 0, "j-data-r0"),
    ]
    hops = trail.add_all(reversed(seen))
    assert [hop.what for hop in hops] == [
        "begin",
        "dispatch",
        "notice",
        "repeated",
        "accepted",
        "notice",
        "claim",
        "claim",
    ]
    assert [round(hop.since_first_ms) for hop in hops] == [0, 1, 3, 203, 205, 210, 230, 240]
    assert hops[4].latency_ms == pytest.approx(202)  # since the first notice, not since its repetition
    assert hops[2].text == "j-data-r0 → j-s0-r1 forward, int64[4×128], attempt 0"
    assert "j-s1-r0 has stage 1 from j-s0-r1: forward 5.0 ms, backward 9.0 ms, loss 2.2500" in hops[6].text
    assert trail.complete
    assert "+2.0" in str(hops[4])


def test_it_taps_no_more_than_it_needs():
    patterns = Microbatch.parse("j/3/1").patterns()
    assert "dmsc.v1.step.claim.j.*" in patterns
    assert all(".j." in pattern for pattern in patterns)


@pytest.mark.parametrize("text", ["", "j", "j/3", "j/3/x", "j/3/1/2", "a.b/3/1", "j/-1/0"])
def test_anything_else_is_said_in_one_line(text):
    with pytest.raises(BadInput, match="write job/step/microbatch"):
        Microbatch.parse(text)
