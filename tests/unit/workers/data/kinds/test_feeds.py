"""Which record of a feed a job's position has: for ever the same, and each once an epoch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from schemas.feeds import records_needed, standing
from schemas.job import JobSpec
from schemas.urls import UrlRules
from workers.data.kinds.feeds import Arrival

PAGE = (Path(__file__).parents[5] / "docs" / "data-feeds.md").read_text()
MODEL = {"factory": "torch.nn:Linear", "loss": "torch.nn:MSELoss"}


@pytest.mark.parametrize("window", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("count", [1, 7, 20])
def test_a_position_keeps_its_record_when_its_feed_is_closed(window: int, count: int) -> None:
    arrival = Arrival(11, window, stops=True)
    closed = [arrival.record(position, count, closed=True) for position in range(count)]
    assert sorted(closed) == [*range(count)]
    for there in range(count + 1):  # at any earlier moment
        known = [
            position
            for position in range(count)
            if standing(position + 1, window, there, closed=False, stops=True) == "there"
        ]
        assert [arrival.record(each, there, closed=False) for each in known] == [
            closed[each] for each in known
        ]
        assert all(closed[each] < there for each in known)
        assert len(known) == (there if window < 2 else there // window * window)


def test_a_closed_feed_goes_on_with_its_next_epoch() -> None:
    arrival = Arrival(11, 4, stops=False)
    epochs = [
        [arrival.record(10 * epoch + place, 10, closed=True) for place in range(10)] for epoch in range(3)
    ]
    assert all(sorted(epoch) == [*range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert Arrival(12, 4, stops=False).record(0, 10, closed=True) in range(4)
    assert standing(10**9, 4, 10, closed=True, stops=False) == "there"
    assert records_needed(9, 4) == 12


def spec(data: dict[str, Any], **training: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "fed",
            "model": MODEL,
            "data": {"kind": "feed", **data},
            "training": {"steps": 3, **training},
        }
    )


def test_the_page_s_job_takes_a_feed_as_it_arrives() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    job = JobSpec.model_validate({"name": "fed", "model": MODEL, **yaml.safe_load(block)})
    assert (job.data.arriving, job.ends_with_feed, job.data.evaluation_sets) == ("sensor", True, ())
    assert JobSpec.model_validate(job.model_dump(mode="json")) == job


def test_a_feed_is_named_like_what_else_is_on_the_bus() -> None:
    job = spec({"feed": "one", "validation": {"dev": {"feed": "two"}}})
    assert job.data.urls() == {"data.feed": "bus://feeds/one", "data.validation.dev.feed": "bus://feeds/two"}
    rules = UrlRules.of((), "/nowhere")
    assert not rules.refusal("bus://feeds/one")
    for url in ("bus://feeds", "bus://feeds/..", "bus://feeds/a/b", "bus://other/a"):
        assert rules.refusal(url)
    assert rules.refusal("bus://feeds/one", write=True)


@pytest.mark.parametrize(
    ("data", "training", "line"),
    [
        ({}, {}, "kind feed needs feed: NAME"),
        ({"feed": "a.b"}, {}, "feed"),
        ({"feed": "a >"}, {}, "feed"),
        ({"feed": "f", "source": "x"}, {}, "source is not for kind feed"),
        ({"feed": "f", "validation_fraction": 0.1}, {}, "no size to hold a part of out"),
        ({"feed": "f", "last": "drop"}, {}, "ends with training.until"),
        (
            {"feed": "f", "order": "shuffled", "shuffle_window": 3},
            {},
            "shuffle_window is for kind feed, alone",
        ),
        ({"feed": "f", "order": "shuffled"}, {"until": {"feed": True}}, "no feed in the order of arrival"),
        ({"kind": "bytes", "feed": "f"}, {}, "feed is for kind feed"),
    ],
)
def test_what_does_not_fit_a_feed(data: dict[str, Any], training: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        spec(data, **training)


def test_the_end_of_a_feed_is_no_number_of_steps() -> None:
    with pytest.raises(ValidationError, match="schedule cosine needs the number of steps"):
        JobSpec.model_validate(
            {
                "name": "fed",
                "model": MODEL,
                "data": {"kind": "feed", "feed": "f"},
                "training": {"until": {"feed": True}},
            }
        )
