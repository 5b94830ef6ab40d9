"""Checks that a message speaks for the party that its subject names; the server checks the subject only.

An instance may publish `…heartbeat.<its SID>`, but only the reader can see whether the heartbeat inside is of
that SID. So readers on a guarded bus compare the two before a handler gets the message, for each row that
names its sender or its job.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from bus import subjects
from bus.subject_row import Subject
from schemas import names
from schemas.base import Message
from schemas.envelope import Envelope, Sender
from schemas.errors import BadMessage

_SENDER = "sender"
"""Stands for the envelope's sender, in place of a field."""


class _Follows(NamedTuple):
    """A name that follows from several fields; `about` describes it in errors."""

    about: str
    of: Callable[[Any], str]


_AGENT = _Follows("the agent of its cluster and node", lambda said: names.agent_name(said.cluster, said.node))
_OF_CLUSTER = _Follows("the one of its kind and cluster", lambda said: f"{said.kind}-{said.endpoint.cluster}")
"""Gateways and routers are named after their cluster."""
_REPORTER = _Follows("the one of its cluster", lambda said: f"{said.sid.partition('-')[0]}-{said.cluster}")
_MODULE = _Follows("the module of its sid", lambda said: names.module_of(said.sid or said.module))
_OF_PEER = _Follows("the job of its peer", lambda said: names.job_of(said.peer))
_OF_REPORTER = _Follows("the job of its reporter", lambda said: names.job_of(said.reporter))

_SAID: dict[Subject, dict[str, tuple[str | _Follows, ...]]] = {
    subjects.REGISTRATION: {"sid": ("record.sid", _SENDER)},
    subjects.STATE_CHANGE: {"sid": ("sid", _SENDER)},
    subjects.INSTANCE_RECORD: {"agent": (_SENDER,), "sid": ("record.sid",)},
    subjects.INSTANCE_STATE: {"agent": (_SENDER,), "sid": ("sid",)},
    subjects.HEARTBEAT: {"sid": ("sid", _SENDER)},
    subjects.ACCESS: {"gateway": ("gateway", _SENDER)},
    subjects.USER_COMMAND: {"gateway": ("gateway", _SENDER)},
    subjects.EXPLAIN_ACCESS: {"gateway": ("gateway", _SENDER)},
    subjects.COMPUTE: {"cluster": ("cluster",)},
    subjects.MESH_REGISTRATION: {"sid": ("sid", _SENDER, _OF_CLUSTER)},
    subjects.NODE_STATUS: {"sid": ("sid", _SENDER, _AGENT)},
    subjects.NODE_LEAVES: {"sid": ("node", _SENDER)},
    subjects.QOS_REPORT: {"sid": ("sid", _SENDER, _REPORTER)},
    subjects.TERMINATION: {"job": ("job",), "sid": ("sid", _SENDER)},
    subjects.TOPOLOGY: {"agent": (_SENDER,), "job": ("job",)},
    subjects.ANALYSIS_FAILED: {"agent": (_SENDER,), "job": ("job",)},
    subjects.SAMPLE_WRITTEN: {"agent": (_SENDER,), "job": ("job",)},
    subjects.FAULT_REPORT: {"sid": ("reporter", _SENDER)},
    subjects.CLUSTER_REPORT: {"agent": ("agent", _SENDER, _AGENT), "sid": ("sid",)},
    subjects.STEP_CLAIM: {"job": ("job",), "sid": ("owner.sid", _SENDER)},
    subjects.NOTICE: {"job": ("job",)},
    subjects.BLOCKS_KEPT: {"job": ("job",), "sid": ("member.sid", _SENDER)},
    subjects.BLOCK_SEND: {"job": ("job",)},
    subjects.NOTICE_ANSWER: {"job": ("job",)},
    subjects.STORE_QUERY: {"job": ("job",)},
    subjects.INSTANCE_SAMPLE: {"job": ("job",), "sid": ("sid", _SENDER)},
    subjects.NODE_SAMPLE: {"agent": (_SENDER, _AGENT)},
    subjects.SLOT_REPORT: {"agent": (_SENDER, _AGENT)},
    subjects.USE_REPORT: {"gateway": ("gateway", _SENDER)},
    subjects.SUGGESTION: {"owner": ("owner",), "module": ("module",)},
    subjects.FAULT_QUESTION: {"job": ("job",)},
    subjects.FAULT_ANSWER: {"owner": ("owner",), "module": ("module",)},
    subjects.POLICY_SCORE: {"owner": ("owner",), "module": ("module",)},
    subjects.MODULE_LIFECYCLE: {"owner": ("owner",), "module": ("module", _MODULE)},
    subjects.MODULE_DRIFT: {"owner": ("owner",), "module": ("module",)},
    subjects.LEARNT_QUERY: {"owner": ("owner",), "module": ("module",)},
    subjects.KEEP_LEARNT: {"owner": ("owner", "state.owner"), "module": ("module", "state.module")},
    subjects.LINK_FAULT: {"job": ("job", _OF_PEER, _OF_REPORTER)},
    subjects.LOG: {"sid": (_SENDER,)},
    subjects.WAVE_TOKENS: {"job": ("job",), "sid": ("member.sid", _SENDER)},
    subjects.SERVICE_FIGURES: {"gateway": ("gateway", _SENDER)},
    subjects.SERVICE_OUTCOMES: {"gateway": ("gateway", _SENDER)},
    subjects.ROWS_NEEDED: {"job": ("job",)},
    subjects.DEAD_LETTER: {"sid": ("service", _SENDER)},
}
"""For each row on which a party speaks: its tokens, and the fields that must say the same."""


KNOWN_SUBJECTS = 4_096
"""Subjects of a row whose tokens are cached; few parties speak on a row, again and again."""

Check = Callable[[str, Message, Envelope], None]


def check_of(row: Subject) -> Check | None:
    """The check for messages of this row, called with subject, message and envelope; None: there is none.

    The check raises `BadMessage` if the message names another party than its subject does.
    """
    return _CHECKS.get(row.name)


def _check(row: Subject, said: dict[str, tuple[str | _Follows, ...]]) -> Check:
    """Builds the check of a row; what is the same for all messages is computed once, here."""
    before = row.prefix.count(".") + 1
    claims = [(before + row.tokens_at(token), path) for token, paths in said.items() for path in paths]
    fields = [(place, path) for place, path in claims if isinstance(path, str) and path != _SENDER]
    derived = [(place, path) for place, path in claims if isinstance(path, _Follows)]
    sender_at = next((place for place, path in claims if path == _SENDER), None)
    # For one field, both getters return a name; for several, a tuple.
    places = itemgetter(*(place for place, _ in fields)) if fields else None
    read = attrgetter(*(path for _, path in fields)) if fields else None

    @lru_cache(maxsize=KNOWN_SUBJECTS)
    def expected(subject: str) -> tuple[Any, str | None, tuple[str, ...]]:
        tokens = subject.split(".")
        sender = None if sender_at is None else tokens[sender_at]
        return places(tokens) if places else None, sender, tuple(tokens[place] for place, _ in derived)

    def check(subject: str, message: Message, envelope: Envelope) -> None:
        expected_names, sender, derived_names = expected(subject)
        if read is not None and read(message) != expected_names:
            tokens = subject.split(".")
            values = [(path, attrgetter(path)(message), tokens[place]) for place, path in fields]
            raise _another_name(
                subject, *next((path, is_said) for path, is_said, due in values if is_said != due)
            )
        if sender is not None and not _is_called(sender, envelope.sender):
            raise _another_name(subject, _SENDER, envelope.sender.name)
        if derived_names:
            for (_, path), due in zip(derived, derived_names, strict=True):
                if (is_said := path.of(message)) != due:
                    raise _another_name(subject, path.about, is_said)

    return check


def _is_called(sid: str, sender: Sender) -> bool:
    """Whether `sid` is the sender's own name, or its name as a standby, which begins with its own name."""
    if sender.name == sid:
        return True
    return sender.kind in names.STANDING and sid == names.standby(sender.name, sender.incarnation)


def _another_name(subject: str, path: str, said: str) -> BadMessage:
    return BadMessage(f"{subject}: {path} in it is {said}", reason="another name")


_CHECKS = {row.name: _check(row, said) for row, said in _SAID.items()}
