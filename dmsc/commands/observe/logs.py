"""`dmsc logs`: shows the services' structured log lines, read from the bus."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Any

from dmsc.console.command_app import option
from dmsc.console.durations import parse_duration
from dmsc.console.option_groups import BusQuery
from dmsc.console.running import run_async
from schemas.plain_text import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messaging.streams import StreamRecord
    from dmsc.state.settings import BusAddress
    from schemas.telemetry import LogLine

_quiet = ("component", "pid", "service")


def logs(
    job: Annotated[str | None, option("--job JOB", "Only lines about this job.")] = None,
    sid: Annotated[str | None, option("--sid SID", "Only lines of this service.")] = None,
    grep: Annotated[str | None, option("--grep REGEX", "Only lines that match this expression.")] = None,
    correlation: Annotated[
        str | None, option("--correlation ID", "Only lines caused by this request; `dmsc tap` shows ids.")
    ] = None,
    since: Annotated[
        str | None, option("--since WHEN", "Only lines since then: 30s, 5m, 2h or 1d ago, or an ISO time.")
    ] = None,
    level: Annotated[
        str, option("--level LEVEL", "The lowest level: info, warning, error or critical.")
    ] = "info",
    follow: Annotated[
        bool, option("--follow -f", "Then print new lines as they arrive, until Ctrl-C.")
    ] = False,
    last: Annotated[int, option("--last -n N", "The maximal number of past lines.", min=1)] = 200,
    bus: BusQuery = BusQuery(),
) -> None:
    """Show what the services logged (info and above), oldest first.

    Example: dmsc logs --job stdlib-gpt-1 --grep 'fault|recover' --since 10m --follow
    """
    from bus.logs import LEVELS
    from schemas.errors import BadInput

    try:
        pattern = re.compile(grep or "")
    except re.error as error:
        raise BadInput(f"--grep {grep}: {error}") from error
    if level not in LEVELS:
        raise BadInput(f"--level {level}: use one of {', '.join(LEVELS)}")
    after = None if since is None else parse_since(since, time.time())

    def selected(line: LogLine) -> bool:
        loud = line.level not in LEVELS or LEVELS.index(line.level) >= LEVELS.index(level)
        about = (job is None or line.job == job) and correlation in (None, line.correlation)
        return loud and about and bool(pattern.search(text_of(line)))

    run_async(_logs(bus.address(), sid, selected, after, follow, last, bus.json))


def parse_since(text: str, now: float) -> float:
    """Return the time that a text names, as seconds since the epoch.

    The text is a duration before `now` (`30s`, `5m`, `2h`, `1d`) or an ISO 8601 time, which is local if it
    names no zone.

    Raises:
        BadInput: The text is neither.
    """
    from datetime import datetime

    from schemas.errors import BadInput

    try:
        return max(0.0, now - parse_duration(text, "--since"))
    except BadInput:
        pass
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        raise BadInput(f"--since {text}: write 30s, 5m, 2h, 1d, or a time as 2026-01-31T12:00") from None


async def _logs(
    address: BusAddress,
    sid: str | None,
    selected: Callable[[LogLine], bool],
    after: float | None,
    follow: bool,
    last: int,
    json: bool,
) -> None:
    from collections import deque

    from bus import subjects
    from bus.connection import Bus
    from schemas.envelope import EntityKind
    from schemas.telemetry import LogLine

    tokens: dict[str, Any] = {} if sid is None else {"sid": sid}
    async with Bus.connect(address.servers, name="logs", kind=EntityKind.CLIENT, token=address.token) as bus:
        past: deque[StreamRecord] = deque(maxlen=last)
        end = 0
        async for recorded in bus.history(subjects.LOG, since=after, **tokens):
            end = recorded.sequence
            if isinstance(recorded.message, LogLine) and selected(recorded.message):
                past.append(recorded)
        for recorded in past:
            _show(recorded, json)
        if not follow:
            return
        coming = bus.history(subjects.LOG, start=end + 1, follow=True, **tokens)
        if not end and after is not None:  # the stream holds nothing since then, so all new lines count
            coming = bus.history(subjects.LOG, since=after, follow=True, **tokens)
        async for recorded in coming:
            if isinstance(recorded.message, LogLine) and selected(recorded.message):
                _show(recorded, json)


def text_of(line: LogLine) -> str:
    """Format a line as `--grep` sees it: the event, then `key=value` fields."""
    words = [line.event, *(f"{key}={value}" for key, value in line.fields.items() if key not in _quiet)]
    return plain(" ".join(words))


def _show(recorded: StreamRecord, json: bool) -> None:
    import json as encoder

    envelope, line = recorded.envelope, recorded.message
    if json:
        body = {"at": envelope.sent_at, "sid": envelope.sender.name, **line.model_dump(mode="json")}
        print(encoder.dumps(body), flush=True)
        return
    from schemas.telemetry import LogLine

    assert isinstance(line, LogLine)
    clock = time.strftime("%H:%M:%S", time.localtime(envelope.sent_at))
    print(f"{clock} {line.level:<7} {envelope.sender.name}: {text_of(line)}", flush=True)
