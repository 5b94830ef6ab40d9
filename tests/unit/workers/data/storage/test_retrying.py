"""Errors of a store pass or do not; neither says anything about a sample."""

from __future__ import annotations

import errno
from collections.abc import Callable

import httpx
import pytest

from schemas.errors import BadData, Unavailable
from workers.data.storage.retrying import SourceChanged, StoreRetryTimes, passes, retried


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now += pause_s


def failing(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "data"

    return call


def run(call: Callable[[], str], clock: Clock, **times: float) -> object:
    return retried(call, "s3://b/x", StoreRetryTimes(**times), clock=clock, sleep=clock.sleep)


def answered(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://x")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        ConnectionResetError(),
        OSError("short"),
        httpx.ReadTimeout("x"),
        answered(503),
        answered(429),
        OSError(errno.EIO, "disk"),
        Unavailable("bus"),
    ],
)
def test_what_passes_is_tried_again(error: Exception) -> None:
    clock = Clock()
    assert run(failing(error, error), clock) == "data"
    assert len(clock.pauses) == 2


@pytest.mark.parametrize(
    "error", [FileNotFoundError("x"), PermissionError("x"), answered(403), answered(404), ValueError("x")]
)
def test_what_does_not_pass_is_told_at_once(error: Exception) -> None:
    assert not passes(error)
    clock = Clock()
    with pytest.raises(BadData, match="s3://b/x can't be read"):
        run(failing(error), clock)
    assert clock.pauses == []


def test_a_changed_source_is_not_tried_again() -> None:
    with pytest.raises(SourceChanged):
        run(failing(SourceChanged("s3://b/x has changed")), Clock())


def test_pauses_grow_to_a_limit_and_end_in_time_with_an_error_that_others_may_retry() -> None:
    clock = Clock()
    with pytest.raises(Unavailable, match=r"s3://b/x could not be read for \d+ s: boom") as caught:
        run(failing(*[OSError("boom")] * 1000), clock, first_s=1, longest_s=4, give_up_s=60)
    assert caught.value.retryable
    assert clock.now <= 60
    assert max(clock.pauses) <= 4
    assert clock.pauses[0] < 1.01
