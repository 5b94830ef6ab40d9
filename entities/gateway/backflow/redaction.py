"""Takes personal data and secrets out of texts before they are stored. Pure.

It prefers to take out too much: whatever has nine digits or more is a number of somebody. It looks at all
texts of a request together, both as lines and as one text that goes on: an answer may end the word that its
prompt began. So nothing hides in the gap between two pieces.
Names, addresses and what only a reader would understand are beyond patterns (ADR-0165).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from entities.gateway.backflow.number_shapes import Found, find_numbers
from entities.gateway.backflow.plain_form import plain_form

KINDS = ("secret", "email", "iban", "card", "ip", "phone", "number", "hidden")
"""What is taken out; of two that overlap the first one gives its name."""
_RANK = {kind: rank for rank, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True)
class Redacted:
    """The texts with `[KIND]` in place of what was taken out, and how often each kind was."""

    texts: tuple[str, ...]
    counts: dict[str, int]


def redact(texts: Sequence[str], hide: Iterable[str] = (), *, before: str = "", behind: str = "") -> Redacted:
    """Takes out what `KINDS` says, of all texts of one request together.

    Args:
        texts: In their order.
        hide: Further texts to take out, in any case of letters.
        before: What stood before the first of the texts and is not kept: something may begin there.
        behind: The same behind the last one.
    """
    hidden = tuple(hide)
    pieces = (before, *texts, behind)
    lines = _found("\n".join(pieces), hidden)
    # An address that is whole at the end of its text does not go on with the word that follows.
    whole = {each.start for each in lines if each.kind == "email"}
    across = [each for each in _across(pieces, hidden) if each.kind != "email" or each.start not in whole]
    spans = _merged(lines + across)
    done: list[str] = []
    start = first = len(before) + 1
    for text in texts:
        done.append(_without(text, start, spans))
        start += len(text) + 1
    counts = Counter(span.kind for span in spans if first < span.end and span.start < start - 1)
    return Redacted(tuple(done), dict(sorted(counts.items())))


def _found(text: str, hide: Sequence[str]) -> list[Found]:
    plain = plain_form(text)
    found = [*_secrets(plain.text), *_emails(plain.text), *_addresses(plain.text), *find_numbers(plain.text)]
    found += _hidden(plain.text, hide)
    return [Found(*plain.span(each.start, each.end), each.kind) for each in found]


def _across(pieces: Sequence[str], hide: Sequence[str]) -> Iterator[Found]:
    """What begins in one of the pieces and ends in another, without a break between them.

    Its places are those in the text that has a line break between two pieces.
    """
    ends = list(accumulate(map(len, pieces)))
    for each in _found("".join(pieces), hide):
        first, last = bisect_right(ends, each.start), bisect_right(ends, each.end - 1)
        if first != last:
            yield Found(each.start + first, each.end + last, each.kind)


def _merged(found: list[Found]) -> list[Found]:
    merged: list[Found] = []
    for each in sorted(found, key=lambda span: (span.start, span.end)):
        last = merged[-1] if merged else None
        if last is None or each.start >= last.end:
            merged.append(each)
            continue
        kind = min(last.kind, each.kind, key=_RANK.__getitem__)
        merged[-1] = Found(last.start, max(last.end, each.end), kind)
    return merged


def _without(text: str, offset: int, spans: Iterable[Found]) -> str:
    """The text that begins at `offset` of the joined ones, without the spans' parts that lie in it."""
    parts: list[str] = []
    at = 0
    for span in spans:
        start, end = max(span.start - offset, 0), min(span.end - offset, len(text))
        if start < end:
            parts += text[at:start], f"[{span.kind.upper()}]"
            at = end
    return "".join((*parts, text[at:]))


# --- secrets ------------------------------------------------------------------------------------------------
_PEM = re.compile(
    r"-----BEGIN[A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----"
    r"(?:(?!-----END)[\s\S]){0,16384}(?:-----END[A-Z0-9 ]{0,60}-----)?"
)
_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9])(?:
    (?<![\w-])eyJ[\w-]{6,2000}\.[\w-]{6,4000}(?:\.[\w-]{0,2000})?  # JSON web tokens
    |(?:sk|rk|pk)[-_][A-Za-z0-9_-]{16,300}                         # OpenAI, Anthropic, Stripe
    |gh[pousr]_[A-Za-z0-9]{20,300}|github_pat_\w{20,300}|gl[a-z]{2,6}-[\w-]{16,200}
    |xox[a-z]-[\w-]{10,300}|xapp-[\w-]{10,300}
    |(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA)[0-9A-Z]{12,32}
    |AIza[\w-]{24,100}|ya29\.[\w-]{16,2000}|GOCSPX-[\w-]{16,100}
    |hf_[A-Za-z0-9]{16,100}|npm_[A-Za-z0-9]{20,100}|pypi-[\w-]{24,300}|nvapi-[\w-]{16,200}
    |SG\.[\w-]{12,100}\.[\w-]{12,100}|(?:AC|SK)[0-9a-f]{32}|key-[0-9a-f]{32}
    |do[opr]_v1_[0-9a-f]{32,100}|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{24,64}|dckr_pat_[\w-]{16,100}
    |hv[sbr]\.[\w-]{16,300}|lin_api_\w{16,100}|tskey-[\w-]{10,100}|AGE-SECRET-KEY-1[0-9A-Z]{20,100}
    |S[ACNOUX][A-Z2-7]{40,100}                                     # seeds of NATS
    )""",
    re.VERBOSE,
)
_WORD = re.compile(r"[A-Za-z0-9._/+=~-]{14,}")
"""Where a shape may lie: most words of a text are shorter, and are not looked at again."""
_NAMES = ("pass", "pwd", "pw", "secret", "key", "token", "credential", "pin", "cv", "kennwort", "contrase")
_IN_URL = re.compile(r"(?<=://)[^\s/?#@]{1,200}@")
_AUTHORIZATION = re.compile(r"(?i)(?<![a-z])(?:bearer|basic)\s{1,3}([A-Za-z0-9._~+/=-]{8,4000})")
_NAMED = re.compile(
    r"""(?ix)(?<![a-z])
    (?:pass(?:word|wort|wd|phrase|code)?|pwd|pw|secret|(?:api|access|private|secret|signing|account|auth)[\s_-]?key
    |(?:access|auth|api|bearer|refresh|client)[\s_-]?(?:token|secret)|token|credentials?|pin|cvv|cvc|kennwort
    |contrase(?:ñ|n)a)
    ["'`*]{0,2}\s{0,3}(?:(?P<sign>:{1,2}=?|=>?|->)|(?P<verb>is|are|was|ist|lautet|est|es)\b:?)\s{0,3}["'`*<]{0,2}
    (?P<value>[^\s"'`<>,;]{3,500})"""
)
_LONG = re.compile(r"(?<![A-Za-z0-9])[A-Za-z0-9+/_=.~-]{20,4096}(?![A-Za-z0-9])")
_PIECE = re.compile(r"[A-Za-z0-9+/]{20,}")
_LONE_SMALL = re.compile(r"(?<=[A-Z0-9])[a-z](?=[A-Z0-9])")
"""A small letter alone between others: words that are written together have none."""


def _secrets(text: str) -> Iterator[Found]:
    for pattern in (_PEM, _IN_URL):
        for match in pattern.finditer(text):
            yield Found(match.start(), match.end(), "secret")
    for word in _WORD.finditer(text):
        for match in _SHAPES.finditer(text, *word.span()):
            yield Found(match.start(), match.end(), "secret")
    for match in _AUTHORIZATION.finditer(text):
        yield Found(*match.span(1), "secret")
    lower = text.lower()
    for match in _NAMED.finditer(text) if any(name in lower for name in _NAMES) else ():
        value = match["value"].rstrip(".!?)")
        # "the password is required" names none; "the password is hunter2" does.
        if len(value) >= 3 and (
            match["sign"] or not value.isalpha() or not (value.islower() or value.istitle())
        ):
            start = match.start("value")
            yield Found(start, start + len(value), "secret")
    for match in _LONG.finditer(text):
        if any(_is_drawn(piece) for piece in _PIECE.findall(match[0])):
            yield Found(match.start(), match.end(), "secret")


def _is_drawn(piece: str) -> bool:
    """Whether letters and digits follow each other as in what was drawn, not as in words and numbers."""
    if len(set(piece)) < 8 or ("/" in piece and piece.lower() == piece):  # a path
        return False
    if len(_LONE_SMALL.findall(piece)) >= 2 and piece.upper() != piece:
        return True
    if not 2 <= sum(map(str.isdigit, piece)) < len(piece):
        return False
    changes = sum(a.isdigit() != b.isdigit() for a, b in pairwise(piece))
    return changes >= (3 if len(piece) >= 32 else 4)


# --- addresses ----------------------------------------------------------------------------------------------
_LOCAL = r"[\w.!#$%&'*+/=?^`{|}~-]{1,64}"
_SIGN = r"(?:@|%40|&\#0{0,4}(?:64|x40);|&commat;|\\u0040)"
"""The sign, and how URLs, pages and JSON write it."""
_EMAIL = re.compile(rf"{_LOCAL}{_SIGN}(?:[\w-]{{1,63}}(?:\.[\w-]{{1,63}}){{1,8}}|\[[0-9A-Fa-f.:]{{3,45}}\])")
_AT = (
    r"(?:\s{0,3}(?:@|[(\[{<]\s?(?:at|ät|@)\s?[)\]}>])\s{0,3}"
    r"|\s{1,3}(?:at|AT)\s{1,3}(?=[\w-]{1,63}\s{1,3}(?:dot|DOT)\s))"
)
_DOT = (
    r"(?:\.|\s{1,2}\.\s{0,2}|\s{0,2}[(\[{<]\s?(?:dot|punkt|point|\.)\s?[)\]}>]\s{0,2}"
    r"|\s{1,2}(?:dot|DOT)\s{1,2})"
)
_TLD = r"(?:com|org|net|edu|gov|info|io|de|uk|fr|es|it|nl|eu|ch|at|us|co|jp|cn|in|ru|br|au|ca)"
_SPACED_EMAIL = re.compile(
    rf"[\w+%-]{{1,64}}(?:{_DOT}[\w+%-]{{1,64}}){{0,4}}{_AT}[\w-]{{1,63}}"
    rf"(?:{_DOT}[\w-]{{1,63}}|\.\s{{1,2}}{_TLD}\b){{1,8}}"
)
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|0?[0-9]?[0-9])"
_POINT = r"\s?(?:\.|[\[(]\s?(?:\.|dot)\s?[\])])\s?"
_IPV4 = re.compile(rf"(?<![0-9])(?<![0-9]\.){_OCTET}(?:{_POINT}{_OCTET}){{3}}(?![0-9])")
_IPV6 = re.compile(
    r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,8}(?:[0-9A-Fa-f]{1,4}|(?:[0-9]{1,3}\.){3}[0-9]{1,3})?(?:%\w{1,16})?(?![\w:])"
)
_MAC = re.compile(r"(?<![0-9A-Fa-f:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![0-9A-Fa-f:-])")


def _emails(text: str) -> Iterator[Found]:
    if _HAS_SIGN.search(text):
        for match in _EMAIL.finditer(text):
            yield Found(match.start(), match.end(), "email")
    if _MAY_BE_SPACED.search(text):
        for match in _SPACED_EMAIL.finditer(text):
            yield Found(match.start(), match.end(), "email")


_HAS_SIGN = re.compile(_SIGN)
_MAY_BE_SPACED = re.compile(
    r"\s@|@\s|[(\[{<]\s?(?:at|ät|@|dot|punkt|point|\.)\s?[)\]}>]|\s(?:dot|DOT)\s|\s\.\s?\w|@\S{1,63}\.\s"
)


def _addresses(text: str) -> Iterator[Found]:
    for match in _IPV4.finditer(text):
        yield Found(match.start(), match.end(), "ip")
    colons = text.count(":")
    for match in _MAC.finditer(text) if max(colons, text.count("-")) >= 5 else ():
        yield Found(match.start(), match.end(), "ip")
    for match in _IPV6.finditer(text) if colons >= 2 else ():
        if _is_ipv6(match[0]):
            yield Found(match.start(), match.end(), "ip")


def _is_ipv6(text: str) -> bool:
    from ipaddress import AddressValueError, IPv6Address

    if len(text) < 4 or not any(map(str.isdigit, text)):
        return False
    try:
        IPv6Address(text)
    except AddressValueError:
        return False
    return True


def _hidden(text: str, hide: Iterable[str]) -> Iterator[Found]:
    words = [r"\s+".join(map(re.escape, plain_form(each).text.split())) for each in hide]
    if any(words):
        for match in re.finditer("|".join(filter(None, words)), text, re.IGNORECASE):
            yield Found(match.start(), match.end(), "hidden")
