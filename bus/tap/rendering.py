"""Tapped messages as text: one line in parts that the command line may colour, raw bytes, or JSON."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bus.tap.live_tap import SubjectRate
from bus.tap.message import TappedMessage
from bus.tap.pattern import short
from schemas.plain_text import plain

WIDTH = 160
"""Most characters of a summary."""


@dataclass(frozen=True, slots=True)
class RenderedLine:
    """The parts of a line. `tone`: plain, request, reply, stream, key-value, or problem."""

    time: str
    sender: str
    subject: str
    what: str
    summary: str
    tone: str

    def __str__(self) -> str:
        return plain(f"{self.time}  {self.sender:<22} {self.subject:<44} {self.what}: {self.summary}")


def render(tapped: TappedMessage, *, width: int = WIDTH) -> RenderedLine:
    """The line of a message; `width` bounds the characters of its summary."""
    sender = tapped.envelope.sender.name if tapped.envelope is not None else "?"
    subject = short(tapped.answers or tapped.subject)
    what = tapped.row.name if tapped.row is not None else "unknown subject"
    tone = tapped.row.delivery.value if tapped.row is not None else "problem"
    if tapped.answers:
        what, tone = f"reply to {what} after {tapped.latency_ms:.1f} ms", "reply"
    if tapped.problem:
        summary, tone = f"unreadable, {tapped.size:,} bytes: {tapped.problem}", "problem"
    elif tapped.message is None:
        summary = tapped.note
    else:
        summary = _summary(tapped)
    return RenderedLine(
        clock(tapped.at),
        plain(sender),
        plain(subject),
        what,
        plain(_cut(summary, width)),
        "plain" if tone == "core" else tone,
    )


def render_raw(tapped: TappedMessage, *, limit: int = 1024) -> str:
    """The subject, size and bytes of any message, with secrets as `***`."""
    more = f" … {len(tapped.raw) - limit:,} more" if len(tapped.raw) > limit else ""
    subject = plain(tapped.subject)
    return f"{clock(tapped.at)}  {subject}  {tapped.size:,} bytes  {tapped.raw[:limit]!r}{more}"


def as_json(tapped: TappedMessage) -> str:
    """One line of JSON with all fields except secrets; unreadable bytes are base64."""
    tree = tapped.tree()
    document: dict[str, Any] = {"at": tapped.at, "subject": tapped.subject, "row": tree.pop("row") or None}
    document["envelope"] = (
        None if tapped.envelope is None else tapped.envelope.model_dump(mode="json", exclude={"body"})
    )
    document["body"] = tree.get("body")
    for name in ("problem", "note", "answers", "latency_ms"):
        if (value := getattr(tapped, name)) not in ("", None):
            document[name] = value
    if tapped.problem:
        document["raw"] = base64.b64encode(tapped.raw).decode()
    return json.dumps(document, default=_plain, ensure_ascii=False)


def render_rates(rates: list[SubjectRate], *, seen: int, dropped: int) -> list[str]:
    """A table of rates in the given order, and the numbers of seen and dropped messages."""
    lines = [f"{'messages/s':>12} {'kB/s':>10} {'total':>10}  subject"]
    lines += [
        f"{rate.per_s:>12,.1f} {rate.bytes_per_s / 1e3:>10,.1f} {rate.total:>10,}  {plain(rate.name)}"
        for rate in rates
    ]
    lines.append(f"{seen:,} seen, {dropped:,} dropped")
    return lines


def clock(at: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at * 1000) % 1000:03d}"


def _summary(tapped: TappedMessage) -> str:
    """`field=value …`, without the fields that the subject already names or that have their default value."""
    assert tapped.message is not None
    body = tapped.tree()["body"]
    words = []
    for name, field in type(tapped.message).model_fields.items():
        value = getattr(tapped.message, name)
        in_subject = not tapped.answers and tapped.tokens.get(name) == str(value)
        if in_subject or (not field.is_required() and value == field.get_default(call_default_factory=True)):
            continue
        words.append(f"{name}={_value(body[name])}")
    return " ".join(words) or "(nothing beyond the subject)"


def _value(value: Any, depth: int = 0) -> str:
    match value:
        case Enum():
            return str(value.value)
        case bool() | None:
            return str(value).lower()
        case float():
            return f"{value:.4g}"
        case bytes():
            return f"<{len(value):,} bytes>"
        case str():
            return value if value and " " not in value else json.dumps(value, ensure_ascii=False)
        case dict() if depth >= 2:
            return f"{{{len(value)}}}"
        case dict():
            items = [item for item in value.items() if item[1] is not None]  # None: nothing was said
            shown = " ".join(f"{key}={_value(inner, depth + 1)}" for key, inner in items[:6])
            return f"{{{shown}{' …' if len(items) > 6 else ''}}}"
        case list() | tuple() if len(value) > 8 or (
            depth >= 1 and any(isinstance(element, dict) for element in value)
        ):
            return f"[{len(value)}]"
        case list() | tuple():
            return f"[{', '.join(_value(inner, depth + 1) for inner in value)}]"
    return str(value)


def _cut(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
