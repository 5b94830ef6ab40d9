"""Parses server-sent events: takes lines and returns events (WHATWG HTML §9.2.6), without I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event. `id` is the stream's last id so far, as text."""

    id: str
    event: str
    data: str


class EventParser:
    """Takes the lines of a stream one by one, and returns an event when it is complete."""

    def __init__(self) -> None:
        self.last_id = ""
        self._event = ""
        self._data: list[str] = []

    def feed(self, line: str) -> ServerEvent | None:
        """Take one line without its line end.

        A blank line completes an event. Comments, which begin with `:`, only keep the connection alive.
        """
        if not line:
            return self._complete()
        if line.startswith(":"):
            return None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id" and "\0" not in value:
            self.last_id = value
        elif field == "event":
            self._event = value
        elif field == "data":
            self._data.append(value)
        return None

    def _complete(self) -> ServerEvent | None:
        data, event = self._data, self._event or "message"
        self._data, self._event = [], ""
        return ServerEvent(self.last_id, event, "\n".join(data)) if data else None
