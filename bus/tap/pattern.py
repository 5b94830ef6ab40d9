"""Subject patterns as typed by a person: completed, checked against the table, and compared."""

from __future__ import annotations

import difflib

from bus import subjects
from bus.subject_row import ROOT, Subject
from bus.subjects import SUBJECTS
from schemas.errors import BadInput


def complete(pattern: str) -> str:
    """The full subject of a pattern: `signal.>` becomes `dmsc.v1.signal.>`; `$KV.…` and full ones stay.

    Raises:
        BadInput: it is no subject, or it can match none of ours; the text names similar ones.
    """
    pattern = pattern.strip()
    tokens = pattern.split(".")
    if not pattern or any(not token or " " in token for token in tokens) or ">" in tokens[:-1]:
        raise BadInput(
            f"{pattern!r} is not a subject: tokens between dots, `*` for any one of them, `>` for the rest, "
            "as in 'signal.>'"
        )
    foreign = pattern.startswith(("$", "_INBOX."))
    full = pattern if foreign or tokens[0] == "dmsc" else f"{ROOT}.{pattern}"
    if foreign and not pattern.startswith("$KV."):
        return full
    if not any(overlap(full, row.wildcard()) for row in SUBJECTS):
        raise BadInput(f"no subject matches {pattern!r}; {_advice(full)}")
    return full


def rows(pattern: str) -> list[Subject]:
    """The rows whose messages a full pattern can match."""
    return [row for row in SUBJECTS if overlap(pattern, row.wildcard())]


def overlap(one: str, other: str) -> bool:
    """Whether some subject matches both patterns."""
    left, right = one.split("."), other.split(".")
    for left_token, right_token in zip(left, right, strict=False):
        if ">" in (left_token, right_token):
            return True
        if left_token != right_token and "*" not in (left_token, right_token):
            return False
    return len(left) == len(right)


def common(one: str, other: str) -> str:
    """The pattern of the subjects that two overlapping patterns both match."""
    left, right = one.split("."), other.split(".")
    tokens: list[str] = []
    for left_token, right_token in zip(left, right, strict=False):
        if left_token == ">":
            return ".".join((*tokens, *right[len(tokens) :]))
        if right_token == ">":
            return ".".join((*tokens, *left[len(tokens) :]))
        tokens.append(right_token if left_token == "*" else left_token)
    return ".".join(tokens)


def matches(pattern: str, subject: str) -> bool:
    """Whether a concrete subject matches a pattern, by the server's rules."""
    pattern_tokens, tokens = pattern.split("."), subject.split(".")
    for index, token in enumerate(pattern_tokens):
        if token == ">":
            return len(tokens) > index
        if index >= len(tokens) or token not in ("*", tokens[index]):
            return False
    return len(pattern_tokens) == len(tokens)


def short(subject: str) -> str:
    """A subject for people: without the root that all of ours have."""
    return subject.removeprefix(f"{ROOT}.")


def _advice(full: str) -> str:
    known = sorted({short(row.wildcard()).replace(".*", "", 9) for row in subjects.SUBJECTS})
    typed = short(full).removesuffix(".>").removesuffix(".*")
    heads = {name.split(".")[0] for name in known}
    close = difflib.get_close_matches(typed, known, n=3, cutoff=0.6)
    close += [f"{head}.>" for head in difflib.get_close_matches(typed.split(".")[0], heads, n=2, cutoff=0.6)]
    if typed.split(".")[0] in heads:  # the domain is right, the rest is not
        domain = typed.split(".")[0]
        close += [name for name in known if name.startswith(f"{domain}.") and name not in close][:4]
    if close:
        return f"close ones: {', '.join(dict.fromkeys(close))}"
    return f"domains are: {', '.join(sorted(head for head in heads if not head.startswith('$')))}"
