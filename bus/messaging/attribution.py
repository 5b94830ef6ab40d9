"""A message says nothing of others than its subject does: the server holds a sender to the subject alone.

An instance may publish `…heartbeat.<its SID>`; that the heartbeat inside is of that SID, nobody but the
reader can see. So readers on a guarded bus compare, for each row that names its sender or its job, before a
handler gets the message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from bus import subjects as rows
from bus.subject import Subject
from schemas import names
from schemas.base import Message
from schemas.envelope import Envelope, Sender
from schemas.errors import BadMessage

_SENDER = "sender"
"""In place of a field: the envelope's sender."""


class _Follows(NamedTuple):
    """A name that follows from several fields; `about` says which."""

    about: str
    of: Callable[[Any], str]


_AGENT = _Follows("the agent of its cluster and node", lambda said: names.agent_name(said.cluster, said.node))
_OF_CLUSTER = _Follows("the one of its kind and cluster", lambda said: f"{said.kind}-{said.endpoint.cluster}")
"""Gateways and routers are called by their cluster."""
_REPORTER = _Follows("the one of its cluster", lambda said: f"{said.sid.partition('-')[0]}-{said.cluster}")
_MODULE = _Follows("the module of its sid", lambda said: names.module_of(said.sid or said.module))
_OF_PEER = _Follows("the job of its peer", lambda said: names.job_of(said.peer))
_OF_REPORTER = _Follows("the job of its reporter", lambda said: names.job_of(said.reporter))

_SAID: dict[Subject, dict[str, tuple[str | _Follows, ...]]] = {
    rows.REGISTRATION: {"sid": ("record.sid", _SENDER)},
    rows.STATE_CHANGE: {"sid": ("sid", _SENDER)},
    rows.INSTANCE_RECORD: {"agent": (_SENDER,), "sid": ("record.sid",)},
    rows.INSTANCE_STATE: {"agent": (_SENDER,), "sid": ("sid",)},
    rows.HEARTBEAT: {"sid": ("sid", _SENDER)},
    rows.ACCESS: {"gateway": ("gateway", _SENDER)},
    rows.USER_COMMAND: {"gateway": ("gateway", _SENDER)},
    rows.EXPLAIN_ACCESS: {"gateway": ("gateway", _SENDER)},
    rows.COMPUTE: {"cluster": ("cluster",)},
    rows.MESH_REGISTRATION: {"sid": ("sid", _SENDER, _OF_CLUSTER)},
    rows.NODE_STATUS: {"sid": ("sid", _SENDER, _AGENT)},
    rows.QOS_REPORT: {"sid": ("sid", _SENDER, _REPORTER)},
    rows.TERMINATION: {"job": ("job",), "sid": ("sid", _SENDER)},
    rows.TOPOLOGY: {"agent": (_SENDER,), "job": ("job",)},
    rows.ANALYSIS_FAILED: {"agent": (_SENDER,), "job": ("job",)},
    rows.SAMPLE_WRITTEN: {"agent": (_SENDER,), "job": ("job",)},
    rows.FAULT_REPORT: {"sid": ("reporter", _SENDER)},
    rows.STEP_CLAIM: {"job": ("job",), "sid": ("owner.sid", _SENDER)},
    rows.NOTICE: {"job": ("job",)},
    rows.NOTICE_ANSWER: {"job": ("job",)},
    rows.STORE_QUERY: {"job": ("job",)},
    rows.INSTANCE_SAMPLE: {"job": ("job",), "sid": ("sid", _SENDER)},
    rows.NODE_SAMPLE: {"agent": (_SENDER, _AGENT)},
    rows.SUGGESTION: {"owner": ("owner",), "module": ("module",)},
    rows.POLICY_SCORE: {"owner": ("owner",), "module": ("module",)},
    rows.MODULE_LIFECYCLE: {"owner": ("owner",), "module": ("module", _MODULE)},
    rows.LINK_FAULT: {"job": ("job", _OF_PEER, _OF_REPORTER)},
    rows.LOG: {"sid": (_SENDER,)},
    rows.DEAD_LETTER: {"sid": ("service", _SENDER)},
}
"""Of each row that parties speak on: tokens, and the fields that say the same."""


KNOWN_SUBJECTS = 4_096
"""Of a row, whose tokens are not looked for again: few parties speak again and again."""

Check = Callable[[str, Message, Envelope], None]


def check_of(row: Subject) -> Check | None:
    """What is done with each message of this row: the subject, the message, its envelope; None: nothing.

    It raises `BadMessage` where the message speaks of somebody whom its subject does not name.
    """
    return _CHECKS.get(row.name)


def _check(row: Subject, said: dict[str, tuple[str | _Follows, ...]]) -> Check:
    """Everything that is the same for all of a row is done here: this is on the way of every message."""
    before = row.prefix.count(".") + 1
    named = [(before + row.tokens_at(token), path) for token, paths in said.items() for path in paths]
    fields = [(place, path) for place, path in named if isinstance(path, str) and path != _SENDER]
    follow = [(place, path) for place, path in named if isinstance(path, _Follows)]
    sender_at = next((place for place, path in named if path == _SENDER), None)
    # Both give a name of one field, and a tuple of several.
    places = itemgetter(*(place for place, _ in fields)) if fields else None
    read = attrgetter(*(path for _, path in fields)) if fields else None

    @lru_cache(maxsize=KNOWN_SUBJECTS)
    def expected(subject: str) -> tuple[Any, str | None, tuple[str, ...]]:
        tokens = subject.split(".")
        sender = None if sender_at is None else tokens[sender_at]
        return places(tokens) if places else None, sender, tuple(tokens[place] for place, _ in follow)

    def check(subject: str, message: Message, envelope: Envelope) -> None:
        wanted, sender, following = expected(subject)
        if read is not None and read(message) != wanted:
            tokens = subject.split(".")
            values = [(path, attrgetter(path)(message), tokens[place]) for place, path in fields]
            raise _another_name(
                subject, *next((path, is_said) for path, is_said, due in values if is_said != due)
            )
        if sender is not None and not _is_called(sender, envelope.sender):
            raise _another_name(subject, _SENDER, envelope.sender.name)
        if following:
            for (_, path), due in zip(follow, following, strict=True):
                if (is_said := path.of(message)) != due:
                    raise _another_name(subject, path.about, is_said)

    return check


def _is_called(sid: str, sender: Sender) -> bool:
    """Whether this is its own name, or that under which it stands by, which begins with a name of its own."""
    if sender.name == sid:
        return True
    return sender.kind in names.STANDING and sid == names.standby(sender.name, sender.incarnation)


def _another_name(subject: str, path: str, said: str) -> BadMessage:
    return BadMessage(f"{subject}: {path} in it is {said}", reason="another name")


_CHECKS = {row.name: _check(row, said) for row, said in _SAID.items()}
