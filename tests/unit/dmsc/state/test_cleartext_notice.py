"""One line says what anybody on the network can read, wherever it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmsc.state.cleartext_notice import ALWAYS, REMEDY_OF_TENSORS, WITHOUT_TLS, in_the_clear

SECURITY = Path(__file__).resolve().parents[4] / "docs" / "security.md"


@pytest.mark.parametrize(
    ("addresses", "line"),
    [
        (["nats://127.0.0.1:4222", "http://localhost:8080", "127.0.0.1"], ""),
        (["nats://[::1]:4222"], ""),
        (
            ["nats://10.0.0.5:4222", "http://127.0.0.1:8080"],
            f"{WITHOUT_TLS}, {ALWAYS}: --tls encrypts the former; ",
        ),
        (["tls://10.0.0.5:4222", "http://10.0.0.5:8080"], f"{WITHOUT_TLS}, "),
        (["tls://10.0.0.5:4222", "https://10.0.0.5:8080"], f"{ALWAYS}, with TLS, too: "),
        (["nats://127.0.0.1:4222", "10.0.0.7"], f"{ALWAYS}, with TLS, too: "),
    ],
)
def test_it_says_what_leaves_the_machine(addresses: list[str], line: str) -> None:
    said = in_the_clear(addresses)
    assert said.startswith(line)
    assert bool(said) is bool(line)
    assert "\n" not in said
    if line:
        assert said.endswith(REMEDY_OF_TENSORS)


def test_the_page_has_the_same_line() -> None:
    line = f"In the clear: {WITHOUT_TLS}, {ALWAYS}: `--tls` encrypts the former; {REMEDY_OF_TENSORS}."
    assert line in SECURITY.read_text().splitlines()
