"""Which messages a tap shows: sampled as whole trees, by pattern, by permission."""

from __future__ import annotations

import pytest

from bus import subjects
from bus.tap.decoder import Sampler, TapDecoder
from bus.tap.message import RawMessage
from schemas.errors import Ack, BadInput
from schemas.registry import ReleaseJob
from schemas.signals import AccessRequest
from schemas.telemetry import NodeSample
from tests.builders.tapped_messages import answer, arrived, look


def release(name: str, cause: str | None = None) -> RawMessage:
    return arrived(subjects.RELEASE_JOB, ReleaseJob(job="j"), name, cause)


def family(number: int) -> list[RawMessage]:
    root = f"r-{number}"
    return [
        release(root),
        release(f"{root}-b", root),
        release(f"{root}-c", f"{root}-b"),
        answer(Ack(), f"{root}-d", f"{root}-c"),
    ]


def test_a_sample_keeps_or_leaves_whole_trees_the_same_each_time() -> None:
    sampler, again = Sampler(0.25), Sampler(0.25)
    kept = 0
    for number in range(400):
        verdicts = [sampler.keeps(look(one)) for one in family(number)]
        assert len(set(verdicts)) == 1
        assert verdicts == [again.keeps(look(one)) for one in family(number)]
        kept += verdicts[0]
    assert kept == 91  # a hash, no chance
    assert all(Sampler(1.0).keeps(look(one)) for one in family(0))


def test_a_smaller_sample_is_part_of_a_larger_one() -> None:
    small, large = Sampler(0.1), Sampler(0.5)
    for number in range(200):
        one = look(release(f"r-{number}"))
        assert large.keeps(one) or not small.keeps(one)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_is_above_nothing_and_at_most_all(share: float) -> None:
    with pytest.raises(BadInput, match=r"above 0 and up to 1, as in 0\.1"):
        Sampler(share)


def test_those_left_out_still_count_as_causes() -> None:
    """Filters do not tear trees: the sample is drawn before them."""
    lens = TapDecoder(sample=0.5, filters=["sender.name=someone"])
    for number in range(50):
        shown = [lens.look(one) is not None for one in family(number)[:3]]
        assert len(set(shown)) == 1


def test_who_may_not_see_a_request_does_not_see_its_answer() -> None:
    def may(subject: str) -> bool:
        return subject.startswith("dmsc.v1.registry.")

    request = AccessRequest(token="t", action="a", resource="r", gateway="g")
    lens = TapDecoder(replies=True, may=may)
    assert lens.look(arrived(subjects.ACCESS, request, "q", gateway="g")) is None
    assert lens.look(answer(Ack(), "a", "q")) is None
    assert lens.look(release("p")) is not None
    reply = lens.look(answer(Ack(), "b", "p"))
    assert reply is not None
    assert reply.answers == "dmsc.v1.registry.release"


def test_a_file_is_looked_at_with_the_same_patterns() -> None:
    lens = TapDecoder(["telemetry.>"])
    sample = arrived(subjects.NODE_SAMPLE, NodeSample(cluster="c", node="n"), "z", agent="n")
    assert lens.covers(sample.subject)
    assert not lens.covers(release("p").subject)
    assert not lens.covers("_INBOX.x")
    assert TapDecoder(replies=True).covers("_INBOX.x")
