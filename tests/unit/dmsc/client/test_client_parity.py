"""`Client` has what `AsyncClient` has, with the same arguments; what may be asked again is decided purely."""

from __future__ import annotations

import inspect

import httpx
import pytest

from dmsc import AsyncClient, Client
from dmsc.client.calls.access_calls import AccessCalls
from dmsc.client.http_protocol import may_repeat, raise_for
from schemas.errors import (
    DeadlineExceeded,
    InProgress,
    NoResponders,
    Overloaded,
    RateLimited,
    Refused,
    Unavailable,
)


def public(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(method)
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


def test_the_same_methods_with_the_same_arguments() -> None:
    kinds = reversed(AsyncClient.__mro__)
    parts = [kind for kind in kinds if kind.__module__.startswith("dmsc.client.") and kind is not AccessCalls]
    blocking = public(Client)
    waiting = {name: method for part in parts for name, method in public(part).items()}
    assert blocking.keys() == waiting.keys()
    for name, signature in waiting.items():
        own = dict(blocking[name].parameters)
        if name == "wait":
            del own["timeout_s"]
        assert list(own.values()) == list(signature.parameters.values()), name


@pytest.mark.parametrize(
    ("method", "keyed", "error", "again"),
    [
        ("GET", False, httpx.ReadError("x"), True),
        ("POST", True, httpx.ReadTimeout("x"), True),
        ("POST", False, httpx.ReadError("x"), False),
        ("DELETE", False, httpx.ConnectError("x"), True),
        ("POST", False, Overloaded("x"), True),
        ("POST", False, RateLimited("x"), True),
        ("POST", False, NoResponders("x"), False),
        ("POST", True, DeadlineExceeded("x"), True),
        ("POST", True, InProgress("x"), True),
        ("GET", False, Refused("x"), False),
    ],
)
def test_what_may_be_asked_again(method: str, keyed: bool, error: Exception, again: bool) -> None:
    assert may_repeat(method, keyed, error) is again


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (429, {"code": "rate_limited", "detail": "slower"}, RateLimited),
        (503, {"code": "overloaded", "detail": "busy"}, Overloaded),
        (503, {"code": "something_newer", "detail": "busy"}, Unavailable),
        (429, None, RateLimited),
        (502, None, Unavailable),
    ],
)
def test_an_answer_as_an_error(status: int, body: dict[str, str] | None, kind: type[Exception]) -> None:
    request = httpx.Request("GET", "http://g/v1/jobs")
    headers = {"Retry-After": "3"}
    response = (
        httpx.Response(status, json=body, headers=headers, request=request)
        if body is not None
        else httpx.Response(status, text="<html>", headers=headers, request=request)
    )
    with pytest.raises(kind) as caught:
        raise_for(response)
    assert type(caught.value) is kind
    assert caught.value.fields["retry_after_s"] == 3.0
