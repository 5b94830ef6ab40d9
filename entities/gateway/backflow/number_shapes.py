"""Numbers of persons in a plain text: cards (Luhn), IBANs (mod 97), phones, and any other long number. Pure.

Dates, times and decimal fractions are left alone; all else with nine digits or more counts as a number of
somebody. Fewer digits count where they look like a phone: after `+`, 00, a leading 0, or a word that says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

LEAST_DIGITS = 9
"""Digits that are a number of somebody, whatever stands around them."""


@dataclass(frozen=True, slots=True)
class Found:
    """From `start` to before `end` of the text there is something of this kind."""

    start: int
    end: int
    kind: str


_GAP = r"[\s.:/_-]{0,2}"
_IBAN = re.compile(
    rf"(?<![A-Za-z0-9])(?=([A-Za-z]{_GAP}[A-Za-z]{_GAP}[0-9]{_GAP}[0-9](?:{_GAP}[A-Za-z0-9]){{11,29}}))"
)
_CARD = re.compile(r"(?<![0-9])[0-9](?:[\s.,:/_|*()-]{0,3}[0-9]){11,29}(?![0-9])")
_RUN = re.compile(
    r"(?:(?<![\w+])\+\s?)?(?<![0-9])(?:[(\[]\s?)?[0-9](?:[ .()/_\-~]{0,3}[0-9]){4,60}"
    r"(?:\s?(?:x|ext\.?|#)\s?[0-9]{1,6}\b)?"
)
_LOCAL_PHONE = re.compile(r"(?<![\w.-])[0-9]{3}[-. ][0-9]{4}(?![\w-]|\.[0-9])")
_PHONE_WORD = re.compile(
    r"(?i)(?:\btel\b|phone|mobil|\bcell|\bcall\b|\bfax\b|whatsapp|\bsms\b|\bhandy\b|telefon|\btext me|"
    r"\bring\b|\breach\b|contact|"
    r"\bnumber\b|\bnummer\b|t[ée]l[ée]phone)[^0-9\n]{0,24}$"
)
_GROUP = re.compile(r"[0-9]+")
_YEAR = r"(?:1[89]|20)[0-9]{2}"
_MONTH, _DAY = r"(?:1[0-2]|0?[1-9])", r"(?:3[01]|[12][0-9]|0?[1-9])"
_CLOCK = r"(?:[T ,]{1,2}(?:2[0-3]|[01]?[0-9]):[0-5][0-9](?::[0-5][0-9](?:[.,][0-9]{1,9})?)?)?"
_DATE = re.compile(
    rf"(?<![0-9])(?<![0-9][-/.])(?:{_YEAR}([-/.]){_MONTH}\1{_DAY}|{_DAY}([-/.]){_DAY}\2{_YEAR})"
    rf"{_CLOCK}(?![0-9])(?![-/.][0-9])"
)
_FRACTION = re.compile(
    r"(?<![0-9.,/-])(?<![0-9] )(?:(?:0|[1-9][0-9]{0,5})\.[0-9]{3,7}|(?:0|[1-9][0-9]?)\.[0-9]{8,30})"
    r"(?:[eE][-+]?[0-9]{1,3})?(?![0-9]|[.-][0-9])"
)
"""A decimal fraction; none is a card that somebody has cut after its third digit or later."""


def find_numbers(text: str) -> Iterator[Found]:
    """All of them, some more than once."""
    if not any(map(str.isdigit, text)):
        return
    yield from _ibans(text)
    text = _without_times(text)
    yield from _cards(text)
    yield from _phones(text)


def _without_times(text: str) -> str:
    """The text with letters in place of dates, times and decimal fractions."""

    def fraction(match: re.Match[str]) -> str:
        before = match.string[max(0, match.start() - 40) : match.start()]
        return match[0] if _PHONE_WORD.search(before) else "d" * len(match[0])

    return _FRACTION.sub(fraction, _DATE.sub(lambda match: "d" * len(match[0]), text))


# --- with check digits --------------------------------------------------------------------------------------
_BY_COUNTRY = (
    "NO15 BE16 DK18 FI18 FK18 FO18 GL18 NL18 SD18 MK19 SI19 AT20 BA20 EE20 KZ20 LT20 LU20 MN20 "
    "XK20 CH21 HR21 LI21 LV21 BG22 BH22 CR22 DE22 GB22 GE22 IE22 ME22 RS22 VA22 AE23 GI23 IL23 "
    "IQ23 OM23 SO23 TL23 AD24 CZ24 ES24 MD24 PK24 RO24 SA24 SE24 SK24 TN24 VG24 LY25 PT25 ST25 "
    "IS26 TR26 BI27 DJ27 FR27 GR27 IT27 MC27 MR27 SM27 AL28 AZ28 BY28 CY28 DO28 GT28 HN28 HU28 "
    "LB28 NI28 PL28 SV28 BR29 EG29 PS29 QA29 UA29 JO30 KW30 MU30 YE30 MT31 SC31 LC32 RU33"
)
IBAN_LENGTHS = {each[:2]: int(each[2:]) for each in _BY_COUNTRY.split()}
"""Country → letters and digits of its IBANs (registry of ISO 13616, release 99)."""


def _ibans(text: str) -> Iterator[Found]:
    for match in _IBAN.finditer(text):
        start, end = match.span(1)
        places = [place for place in range(start, end) if text[place].isalnum()]
        shown = "".join(text[place] for place in places)
        lengths = [IBAN_LENGTHS.get(shown[:2].upper(), 0)]
        if not lengths[0]:
            continue  # "US 10 people", "PM 12": no such country has IBANs
        if shown[:2].isupper():
            # One of another length than its country's is found up to where a group ends.
            lengths += (n for n in range(len(places), 14, -1) if _ends_group(text, places, n))
        elif places[3] - places[0] != 3:
            continue  # "at 23 degrees"
        for length in lengths:
            if length <= len(shown) and _is_of_one_case(shown[1:length]) and is_iban(shown[:length].upper()):
                yield Found(start, places[length - 1] + 1, "iban")
                break


def _is_of_one_case(shown: str) -> bool:
    """Whether its letters are all capitals or all small ones: "DE 10 people went there" is a sentence."""
    return shown in (shown.upper(), shown.lower())


def _ends_group(text: str, places: list[int], count: int) -> bool:
    """Whether no letter or digit follows the first `count` of those at `places`."""
    after = places[count - 1] + 1
    return after >= len(text) or not text[after].isalnum()


def is_iban(compact: str) -> bool:
    """Whether its check digits are right (ISO 13616: mod 97 is 1). `compact`: capitals and digits."""
    turned = compact[4:] + compact[:4]
    return int("".join(str(int(each, 36)) for each in turned)) % 97 == 1


def _cards(text: str) -> Iterator[Found]:
    for match in _CARD.finditer(text):
        places = [place for place in range(match.start(), match.end()) if text[place].isdigit()]
        digits = "".join(text[place] for place in places)
        for start, length in _windows(text, places):
            if is_card(digits[start : start + length]):
                yield Found(places[start], places[start + length - 1] + 1, "card")
                break


def _windows(text: str, places: list[int]) -> Iterator[tuple[int, int]]:
    """Start and length of what may be a card's digits: from a group's beginning to a group's end."""
    count = len(places)
    begins = [n for n in range(count) if n == 0 or places[n - 1] + 1 != places[n]]
    ends = {n + 1 for n in range(count) if n == count - 1 or places[n] + 1 != places[n + 1]}
    for start in begins:
        for length in range(19, 11, -1):
            if start + length in ends:
                yield start, length


def is_card(digits: str) -> bool:
    """Whether its check digit is right (Luhn), and it has as many digits as cards have."""
    if not 12 <= len(digits) <= 19 or len(set(digits)) < 2:
        return False
    total = 0
    for place, each in enumerate(reversed(digits)):
        value = int(each) * (1 + place % 2)
        total += value - 9 * (value > 9)
    return total % 10 == 0


# --- without ------------------------------------------------------------------------------------------------
def _phones(text: str) -> Iterator[Found]:
    for match in _RUN.finditer(text):
        kind = _kind_of(match[0], text[max(0, match.start() - 40) : match.start()])
        if kind:
            yield Found(match.start(), match.end(), kind)
    for match in _LOCAL_PHONE.finditer(text):
        yield Found(match.start(), match.end(), "phone")


def _kind_of(run: str, before: str) -> str:
    """phone, number, or nothing."""
    groups = _GROUP.findall(run)
    digits = "".join(groups)
    count = len(digits)
    if run.startswith("+"):
        return "phone" if count >= 6 else ""
    if _PHONE_WORD.search(before) and count >= 6:
        return "phone"
    if digits.startswith("00") and count >= 8 and digits.strip("0"):
        return "phone"
    is_split = len(groups) > 1
    if digits.startswith("0") and count >= (7 if is_split else 8) and len(groups[0]) > 1:
        return "phone"
    if run[0] in "([" and count >= 7:
        return "phone"
    if count < LEAST_DIGITS or len(set(digits)) < 2:
        return ""
    if all(len(group) <= 2 for group in groups) and _is_list(groups):
        return ""
    return "phone" if is_split and count <= 15 else "number"


def _is_list(groups: list[str]) -> bool:
    """Whether these small numbers are a list: they rise or fall evenly, or are all 0 and 1."""
    values = [int(group) for group in groups]
    if set(values) <= {0, 1}:
        return True
    steps = {after - before for before, after in pairwise(values)}
    if len(steps) <= 2:
        return True
    return any(len(group) == 2 for group in groups) and any(len(group) == 1 for group in groups)
