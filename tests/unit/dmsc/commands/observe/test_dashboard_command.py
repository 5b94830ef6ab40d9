"""`dmsc dashboard`: the token goes where no server sees it."""

from __future__ import annotations

from urllib.parse import urlsplit

from dmsc.commands.observe.dashboard import dashboard_url


def test_the_token_stands_in_the_fragment_alone() -> None:
    address = urlsplit(dashboard_url("http://10.0.0.5:8080/", "se/cr&et="))
    assert (address.path, address.query) == ("/dashboard/", "")
    assert address.fragment == "token=se%2Fcr%26et%3D"
    assert dashboard_url("http://h:1", None) == "http://h:1/dashboard/"
