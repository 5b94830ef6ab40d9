"""A name, host or subject that steers a terminal does so nowhere: log lines, tables, taps, `dmsc logs`."""

from __future__ import annotations

import io

import pytest
import structlog

from bus import subjects
from bus.logs import configure_logging, get_logger
from bus.tap.message import decode
from bus.tap.rendering import render, render_raw
from dmsc.commands.observe.logs import text_of
from dmsc.console.options import print_table
from schemas.plain_text import plain
from schemas.telemetry import LogLine

HOSTILE = "\x1b[2J\x1b]0;owned\x07 evil\r\u009b31m \u202egnp\x00"
BAD = [char for char in HOSTILE if not char.isprintable()]


def harmless(text: str) -> bool:
    return not any(char in text for char in BAD)


def test_what_has_no_sign_is_written_out_and_letters_stay() -> None:
    assert plain("Zoë 日本 a\tb", keep="\t") == "Zoë 日本 a\tb"
    assert plain("a\x1b[0m\n") == r"a\x1b[0m\n"
    assert harmless(plain(HOSTILE))


@pytest.mark.parametrize("json", [False, True])
def test_log_lines(json: bool) -> None:
    stream, before = io.StringIO(), structlog.get_config()
    try:
        configure_logging(stream=stream, json=json)
        get_logger("test").warning(f"not let in {HOSTILE}", sid=HOSTILE, names=[HOSTILE], more={"k": HOSTILE})
    finally:
        structlog.configure(**before)
    assert "owned" in stream.getvalue()
    assert harmless(stream.getvalue().replace("\n", ""))
    assert stream.getvalue().count("\n") == 1


def test_tables_taps_and_lines_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name",), [(HOSTILE,)])
    line = LogLine(level="info", event=HOSTILE, fields={HOSTILE: HOSTILE})
    print(text_of(line))
    tapped = decode(f"dmsc.v1.{HOSTILE}", HOSTILE.encode(), at=0.0)
    assert tapped is not None
    print(render(tapped))
    print(render_raw(tapped))
    unreadable = decode(subjects.LOG(sid="x"), HOSTILE.encode(), at=0.0)
    assert unreadable is not None
    print(render(unreadable))
    shown = capsys.readouterr().out
    assert "owned" in shown
    assert harmless(shown)
