"""Which messages a tap shows: sampled as whole trees, by pattern, by permission."""

from __future__ import annotations

import pytest

from bus import subjects
from bus.tap.decoder import ANSWERS_HELD, INBOXES, Sampler, TapDecoder
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
        shown = [bool(lens.look(one)) for one in family(number)[:3]]
        assert len(set(shown)) == 1


def test_who_may_not_see_a_request_does_not_see_its_answer() -> None:
    def may(subject: str) -> bool:
        return subject.startswith("dmsc.v1.registry.")

    request = AccessRequest(token="t", action="a", resource="r", gateway="g")
    lens = TapDecoder(replies=True, may=may)
    assert lens.look(arrived(subjects.ACCESS, request, "q", gateway="g")) == []
    assert lens.look(answer(Ack(), "a", "q")) == []
    assert len(lens.look(release("p"))) == 1
    (reply,) = lens.look(answer(Ack(), "b", "p"))
    assert reply.answers == "dmsc.v1.registry.release"
    # neither do they if it is read before the request
    assert lens.look(answer(Ack(), "c", "r")) == []
    assert lens.look(arrived(subjects.ACCESS, request, "r", gateway="g")) == []


def test_an_answer_that_is_read_before_its_request_is_shown_after_it() -> None:
    """They come by two subscriptions, which are read one after the other."""
    lens = TapDecoder(replies=True)
    assert lens.look(answer(Ack(note="gone"), "a", "p")) == []
    asked, reply = lens.look(release("p"))
    assert (asked.row, asked.answers) == (subjects.RELEASE_JOB, "")
    assert (reply.row, reply.message) == (subjects.RELEASE_JOB, Ack(note="gone"))
    assert (reply.answers, reply.latency_ms) == ("dmsc.v1.registry.release", 0.0)
    assert len(lens.look(release("p"))) == 1, "a request that is repeated shows it once"


def test_of_answers_to_what_nobody_asked_only_the_latest_are_held() -> None:
    lens = TapDecoder(replies=True)
    for number in range(ANSWERS_HELD + 1):
        assert lens.look(answer(Ack(), f"a-{number}", f"p-{number}")) == []
    assert len(lens.look(release("p-0"))) == 1
    assert len(lens.look(release("p-1"))) == 2


def test_where_inboxes_are_shown_no_answer_waits() -> None:
    lens = TapDecoder([">", INBOXES], replies=True)
    (reply,) = lens.look(answer(Ack(), "a", "p"))
    assert reply.answers == ""
    assert len(lens.look(release("p"))) == 1


def test_a_file_is_looked_at_with_the_same_patterns() -> None:
    lens = TapDecoder(["telemetry.>"])
    sample = arrived(subjects.NODE_SAMPLE, NodeSample(cluster="c", node="n"), "z", agent="n")
    assert lens.covers(sample.subject)
    assert not lens.covers(release("p").subject)
    assert not lens.covers("_INBOX.x")
    assert TapDecoder(replies=True).covers("_INBOX.x")
