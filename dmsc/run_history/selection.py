"""Which runs a list names, and since when. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from dmsc.console.durations import parse_duration
from schemas.errors import BadInput
from schemas.job import JobRecord, JobState


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """What a listed run must be. `name` may have `*`; `since` is seconds since the epoch."""

    state: JobState | None = None
    name: str | None = None
    user: str | None = None
    since: float | None = None

    def matches(self, record: JobRecord) -> bool:
        return (
            self.state in (None, record.state)
            and self.user in (None, record.user)
            and self.takes(record.spec.name, record.changed_at)
        )

    def takes(self, name: str, changed_at: float) -> bool:
        """Whether a run of this name that last ran then is wanted, whatever its state and user."""
        named = self.name is None or fnmatch.fnmatchcase(name, self.name)
        return named and (self.since is None or changed_at >= self.since)

    def of(self, records: Iterable[JobRecord]) -> list[JobRecord]:
        """The matching records, in the order of their submission."""
        matching = [record for record in records if self.matches(record)]
        return sorted(matching, key=lambda record: (record.submitted_at, record.job))


def state_called(text: str | None) -> JobState | None:
    """Raises `BadInput` for a text that is no state."""
    if text is None:
        return None
    try:
        return JobState(text)
    except ValueError:
        raise BadInput(f"--status {text}: one of {', '.join(JobState)}") from None


def since_when(text: str | None, now: float) -> float | None:
    """Seconds since the epoch of a duration before `now` (`2h`, `7d`) or of a date (`2026-05-01`).

    Raises:
        BadInput: The text is neither.
    """
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        pass
    try:
        return now - parse_duration(text, "--since")
    except BadInput:
        raise BadInput(f"--since {text}: write it as 90s, 30m, 8h, 14d or 2026-05-01") from None
