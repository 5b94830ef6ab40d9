"""A message says nothing of others than its subject does: the server holds a sender to the subject alone.

An instance may publish `…heartbeat.<its SID>`; that the heartbeat inside is of that SID, nobody but the
reader can see. So readers on a guarded bus compare, for each row that names its sender or its job, before a
handler gets the message.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from bus import subjects as rows
from bus.subject import Subject
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import BadMessage

_SENDER = "sender"
"""In place of a field: the envelope's sender."""

_SAID: dict[Subject, dict[str, tuple[str, ...]]] = {
    rows.REGISTRATION: {"sid": ("record.sid",)},
    rows.STATE_CHANGE: {"sid": ("sid",)},
    rows.HEARTBEAT: {"sid": ("sid", _SENDER)},
    rows.MESH_REGISTRATION: {"sid": ("sid",)},
    rows.NODE_STATUS: {"sid": ("sid",)},
    rows.QOS_REPORT: {"sid": ("sid",)},
    rows.TERMINATION: {"job": ("job",), "sid": ("sid",)},
    rows.TOPOLOGY: {"job": ("job",)},
    rows.ANALYSIS_FAILED: {"job": ("job",)},
    rows.SAMPLE_WRITTEN: {"job": ("job",)},
    rows.STEP_CLAIM: {"job": ("job",), "sid": ("owner.sid", _SENDER)},
    rows.NOTICE: {"job": ("job",)},
    rows.NOTICE_ANSWER: {"job": ("job",)},
    rows.STORE_QUERY: {"job": ("job",)},
    rows.INSTANCE_SAMPLE: {"job": ("job",), "sid": ("sid", _SENDER)},
    rows.NODE_SAMPLE: {"agent": (_SENDER,)},
    rows.SUGGESTION: {"module": ("module",)},
    rows.POLICY_SCORE: {"module": ("module",)},
    rows.MODULE_LIFECYCLE: {"module": ("module",)},
    rows.LOG: {"sid": (_SENDER,)},
    rows.DEAD_LETTER: {"sid": ("service", _SENDER)},
}
"""Of each row that parties below the control plane speak on: tokens, and the fields that say the same."""


def check(row: Subject, subject: str, message: Message, envelope: Envelope) -> None:
    """
    Raises:
        BadMessage: it speaks of somebody whom its subject does not name.
    """
    plan = _PLANS.get(row.name)
    if plan is None:
        return
    tokens = subject.split(".")
    for place, name, read in plan:
        said = envelope.sender.name if read is None else read(message)
        if said != tokens[place]:
            raise BadMessage(f"{subject}: {name} in it is {said}", reason="another name")


def _plan(row: Subject, said: dict[str, tuple[str, ...]]) -> tuple[tuple[int, str, Any], ...]:
    """Places of tokens in the subject, and how to read what must be the same; None: the envelope's sender."""
    before = row.prefix.count(".") + 1
    return tuple(
        (before + row.tokens_at(token), path, None if path == _SENDER else attrgetter(path))
        for token, paths in said.items()
        for path in paths
    )


_PLANS = {row.name: _plan(row, said) for row, said in _SAID.items()}
