"""What a person types as a subject, completed and checked against the table of subjects."""

from __future__ import annotations

import difflib

from bus import subjects
from bus.subject import ROOT, Subject
from bus.subjects import SUBJECTS
from schemas.errors import BadInput


def complete(pattern: str) -> str:
    """A full subscription subject: `signal.>` becomes `dmsc.v1.signal.>`; `$KV.…` and full ones pass.

    Raises:
        BadInput: it is no subject, or none of ours can match it; the text names close ones.
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
    """The rows of which a (full) pattern can see messages."""
    return [row for row in SUBJECTS if overlap(pattern, row.wildcard())]


def overlap(one: str, other: str) -> bool:
    """Whether some subject matches both patterns."""
    left, right = one.split("."), other.split(".")
    for mine, theirs in zip(left, right, strict=False):
        if ">" in (mine, theirs):
            return True
        if mine != theirs and "*" not in (mine, theirs):
            return False
    return len(left) == len(right)


def common(one: str, other: str) -> str:
    """The pattern of what two overlapping patterns both match."""
    left, right = one.split("."), other.split(".")
    found: list[str] = []
    for mine, theirs in zip(left, right, strict=False):
        if mine == ">":
            return ".".join((*found, *right[len(found) :]))
        if theirs == ">":
            return ".".join((*found, *left[len(found) :]))
        found.append(theirs if mine == "*" else mine)
    return ".".join(found)


def matches(pattern: str, subject: str) -> bool:
    """Whether a concrete subject matches a pattern, as the server does it."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > index
        if index >= len(tokens) or token not in ("*", tokens[index]):
            return False
    return len(wanted) == len(tokens)


def short(subject: str) -> str:
    """A subject as people read it: without the root that all of ours have."""
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
