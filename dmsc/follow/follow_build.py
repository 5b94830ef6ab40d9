"""The progress of a build of a data set on a terminal: one line that is updated, or one line per event."""

from __future__ import annotations

import sys

from dmsc.console.exit_codes import ExitCode
from dmsc.follow.run_state import duration
from schemas.data_set.builds import BUILD_WAITS, HAS_LANES, BuildEvent, BuildRecord, BuildState, PhaseProgress

CLEAR = "\r\x1b[K"


class BuildLine:
    """Shows a build's events. On a terminal the present phase is one line, which each event replaces."""

    def __init__(self, record: BuildRecord, *, json: bool) -> None:
        self._json = json
        self._live = not json and sys.stdout.isatty()
        self._shown = False
        self._begun = False
        self._waits = False
        if not json:
            self.say(f"{record.build} builds {record.spec.name} ({_at_a_time(record)} units at a time)")

    def show(self, event: BuildEvent) -> None:
        if self._json:
            print(event.model_dump_json(exclude_defaults=True), flush=True)
            return
        if event.progress is not None:
            text = progress_line(event.progress, event.rows_per_s, event.left_s)
            whole = event.progress.left == 0
            if self._live and not whole:
                print(f"{CLEAR}{text}", end="", flush=True)
                self._shown = True
            elif event.kind == "phase" or whole:
                self.say(text)
        elif event.kind == "failure":
            self.say(f"tried again: {event.text}")
        elif event.state is not None and self._is_news(event):
            self.say(f"{event.state.value}: {event.text}" if event.text else event.state.value)
            self._waits = event.state in BUILD_WAITS
        self._begun = True

    def _is_news(self, event: BuildEvent) -> bool:
        """Not that it was submitted, and had its lanes at once."""
        if event.state is BuildState.BUILDING:
            return self._waits or event.progress is not None or event.text not in ("", HAS_LANES)
        return self._begun or event.state is not BuildState.QUEUED

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._json:
            print(text, file=sys.stderr, flush=True)
            return
        print(f"{CLEAR if self._shown else ''}{text}", flush=True)
        self._shown = False

    def close(self) -> None:
        if self._shown:
            print()
            self._shown = False

    @staticmethod
    def exit_code(record: BuildRecord) -> ExitCode:
        if record.state is BuildState.DONE:
            return ExitCode.OK
        return ExitCode.INTERRUPTED if record.state is BuildState.CANCELLED else ExitCode.FAILED


def _at_a_time(record: BuildRecord) -> str:
    least, _, most = record.spec.units_at_a_time
    return f"{least} to {most}" if least > 1 or not isinstance(record.spec.replicas, int) else f"{most}"


def progress_line(progress: PhaseProgress, rows_per_s: float, left_s: float | None) -> str:
    """A phase in one line: units, rows in, kept and dropped by reason, pace, time left."""
    parts = [f"{progress.phase} {progress.committed:,}/{progress.units:,} units"]
    if progress.reused:
        parts.append(f"{progress.reused:,} from an earlier build")
    if progress.rows_in:
        kept = sum(progress.kept.values())
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in progress.dropped.items())
        parts.append(
            f"{progress.rows_in:,} rows, {kept:,} kept" + (f", dropped: {dropped}" if dropped else "")
        )
    if progress.tokens:
        parts.append(f"{progress.tokens:,} tokens")
    if progress.skipped:
        parts.append(f"{progress.skipped:,} units skipped")
    if rows_per_s and progress.left:
        parts.append(f"{rows_per_s:,.0f} rows/s")
    if left_s is not None and progress.left:
        parts.append(f"{duration(left_s)} left")
    return " · ".join(parts)
