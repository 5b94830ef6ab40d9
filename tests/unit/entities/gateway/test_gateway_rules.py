"""The gateway's small pure parts: ranges, problems, where an event stream begins, which faults are news."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from entities.gateway.dispatch.dispatcher import DispatcherConfig, StepKey, supersedes
from entities.gateway.http.files import parse_range
from entities.gateway.http.problems import NotSatisfiable, TooLarge, problem, status_of
from entities.gateway.http.sse.format import first_sequence
from entities.gateway.server_sent_events import encode_event
from entities.gateway.service import GatewayConfig
from entities.qos.fault_reporter import FaultLedger, FaultReporterConfig
from entities.router.service import RouterConfig
from schemas import errors
from schemas.job import JobEvent, JobState
from schemas.step import Member
from tests.builders.faults import fault_report
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("", None),
        ("bytes=0-9", (0, 10)),
        ("bytes=90-", (90, 10)),
        ("bytes=90-500", (90, 10)),
        ("bytes=-10", (90, 10)),
        ("bytes=-500", (0, 100)),
        ("bytes = 5 - 5", (5, 1)),
        ("bytes=0-1,5-6", None),
        ("bytes=-", None),
        ("bytes=9-3", None),
        ("lines=0-1", None),
        ("bytes=x-1", None),
    ],
)
def test_a_range(header: str | None, expected: tuple[int, int] | None) -> None:
    assert parse_range(header, 100) == expected


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=200-300", "bytes=-0"])
def test_a_range_behind_the_end(header: str) -> None:
    with pytest.raises(NotSatisfiable, match="100 bytes"):
        parse_range(header, 100)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TooLarge("x"), 413),
        (NotSatisfiable("x"), 416),
        (errors.BadMessage("x"), 400),
        (errors.BadJob("x"), 422),
        (errors.Refused("x"), 401),
        (errors.Refused("x", user="ann"), 403),
        (errors.NotFound("x"), 404),
        (errors.Conflict("x"), 409),
        (errors.Fenced("x"), 409),
        (errors.IllegalTransition("x"), 409),
        (errors.NoResponders("x"), 503),
        (errors.BusUnreachable("x"), 503),
        (errors.DeadlineExceeded("x"), 504),
        (errors.DmscError("x"), 500),
    ],
)
def test_every_error_has_its_status(error: errors.DmscError, status: int) -> None:
    assert status_of(error) == status
    body = problem(status_of(error), error.text, error.code)
    assert {"type", "title", "status", "detail", "code"} == body.keys()


@pytest.mark.parametrize(
    ("start", "last", "first"), [(None, None, 1), (5, None, 5), (5, "9", 10), (None, "x", 1), (None, "0", 1)]
)
def test_where_an_event_stream_begins(start: int | None, last: str | None, first: int) -> None:
    assert first_sequence(start, last) == first


def test_an_event_is_one_record_even_with_line_breaks_in_it() -> None:
    event = JobEvent(job="j", kind="sample", at=1.0, sample="def f():\n\n    pass", state=JobState.DONE)
    lines = encode_event(event.kind, event.model_dump_json(), 7).decode().split("\n")
    assert lines[:2] == ["id: 7", "event: sample"]
    assert json.loads(lines[2].removeprefix("data: "))["sample"] == "def f():\n\n    pass"
    assert lines[3:] == ["", ""]


def test_a_death_is_told_once_and_a_broken_link_again_after_a_while() -> None:
    ledger = FaultLedger(FaultReporterConfig(again_s=5.0))
    assert ledger.is_news(fault_report("instance"), 0)
    assert not ledger.is_news(fault_report("instance"), 1_000)
    assert ledger.is_news(fault_report("instance", incarnation="i2"), 1_000)
    assert ledger.is_news(fault_report("link"), 0)
    assert not ledger.is_news(fault_report("link"), 4)
    assert ledger.is_news(fault_report("link"), 5)


def test_a_witness_does_not_hide_another() -> None:
    ledger = FaultLedger(FaultReporterConfig(again_s=5.0))
    zombie, sound = Member(sid="j-s1-r0", incarnation="i1"), Member(sid="j-s1-r0", incarnation="i2")
    assert ledger.is_news(fault_report("unreachable", witness=zombie), 0)
    assert ledger.is_news(fault_report("unreachable", witness=sound), 1)
    assert not ledger.is_news(fault_report("unreachable", witness=sound), 2)


def test_a_broken_link_does_not_hide_that_its_peer_is_silent() -> None:
    ledger = FaultLedger(FaultReporterConfig(again_s=5.0))
    one, other = Member(sid="j-s1-r0", incarnation="i1"), Member(sid="j-s1-r1", incarnation="i1")
    assert ledger.is_news(fault_report("link", witness=one), 0)
    assert ledger.is_news(fault_report("link", witness=one, silent=True), 1)
    assert ledger.is_news(fault_report("link", witness=other, silent=True), 1)
    assert not ledger.is_news(fault_report("link", witness=other, silent=True), 2)


def test_the_ledger_is_bounded() -> None:
    ledger = FaultLedger(FaultReporterConfig(remembered=3))
    for number in range(10):
        assert ledger.is_news(fault_report("instance", incarnation=f"i{number}"), 0)
    assert not ledger.is_news(fault_report("instance", incarnation="i9"), 0)
    assert ledger.is_news(fault_report("instance", incarnation="i0"), 0)


def test_which_begin_overtakes_which() -> None:
    base = StepKey("j", 3, 10, 1, False)
    assert supersedes(base._replace(attempt=2), base)
    assert supersedes(base._replace(epoch=4, step=2, attempt=0), base)
    assert not supersedes(base, base)
    assert not supersedes(base._replace(step=11, attempt=0), base), (
        "the next step may begin before this one ended"
    )
    assert not supersedes(base._replace(step=11, attempt=5), base)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="entry_wait_s"):
        DispatcherConfig(deadline_s=1.0, entry_wait_s=2.0)
    with pytest.raises(ValueError, match="http_port"):
        GatewayConfig(cluster="east", http_port=70_000)
    with pytest.raises(ValueError, match="compute_gap_s"):
        RouterConfig(cluster="east", compute_gap_s=9.0)
    assert GatewayConfig(cluster="east").sid == "gateway-east"
    assert RouterConfig(cluster="east").sid == "router-east"


def test_the_http_framework_is_loaded_only_where_there_is_an_http_door() -> None:
    """It would cost every control-plane process memory (DESIGN: 80 MB each)."""
    code = (
        "import sys, entities.gateway, entities.router.service, entities.authorizer; "
        "import entities.service_registry.service; "
        "sys.exit(', '.join({'fastapi', 'uvicorn', 'starlette'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "")
