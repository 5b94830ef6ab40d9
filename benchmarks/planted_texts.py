"""Texts with personal data and secrets planted in them, made without any of the redaction's own code.

Persons' data are Faker's, in the shapes of twenty countries; secrets have the shapes that their services
document, and some that no list has. Each may be disguised: blanks of every width between digits and around @,
digits of other scripts, fullwidth letters, invisible characters, other dashes, `(at)` and `[dot]`. A text
comes in chunks that cut what is planted. Other texts have only numbers, dates, prices and code that name
nobody.
"""

from __future__ import annotations

import random
import re
import string
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.emptiness import NothingMeasured

LOCALES = (
    *("en_US", "en_GB", "en_CA", "en_AU", "en_IN", "de_DE", "de_AT", "de_CH", "fr_FR", "es_ES", "it_IT"),
    *("nl_NL", "pl_PL", "sv_SE", "da_DK", "no_NO", "pt_BR", "ja_JP", "zh_CN", "ko_KR"),
)
DIGITS = ("０", "٠", "۰", "०", "০", "𝟎", "𝟘", "𝟢", "𝟶")
"""The zero of each script; its nine others follow it."""
BLANKS = (" ", "  ", "\u00a0", "\u2009", "\u202f", "\u2007", "\u3000")
INVISIBLE = ("\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad")
DASHES = ("-", "\u2010", "\u2011", "\u2012", "\u2013", "\u2212")
FRAMES = {
    "email": ("write to {}", "my address is {}, thanks", "{}", "Contact: {}", "(mail {})"),
    "phone": (
        "call me at {}",
        "my number is {}",
        "tel. {}",
        "Phone: {}",
        "you can reach me under {}",
        "mobile {} please",
    ),
    "card": ("pay with {}", "my card is {}", "{} is the number", "card: {}, valid"),
    "iban": ("transfer to {}", "IBAN {}", "account {} at my bank", "{}"),
    "ip": ("the server {} is down", "from {}", "ping {}", "host {} answered"),
    "secret": ("the key is {}", "use {}", "token {}", "export KEY={}", "{}"),
    "password": ("my password is {}", "password: {}", "login ann / pwd={}", '"password": "{}"'),
}


@dataclass(frozen=True, slots=True)
class PlantedText:
    """`chunks` make the text; `planted` are the kind and the original of what is in it."""

    chunks: tuple[str, ...]
    planted: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        return "".join(self.chunks)


class Planter:
    """Makes texts by a seed. Raises `NothingMeasured` where Faker is not installed."""

    def __init__(self, seed: int) -> None:
        try:
            from faker import Faker
        except ImportError:
            raise NothingMeasured(
                "faker is not installed", "", "pip install 'dmsc[bench-backflow]'"
            ) from None
        self._random = random.Random(seed)
        self._fakers: list[Any] = [Faker(locale) for locale in LOCALES]
        for number, faker in enumerate(self._fakers):
            faker.seed_instance(seed * 100 + number)
        self._makers: dict[str, Callable[[], str]] = {
            "email": lambda: str(self._faker.ascii_email()),
            "phone": lambda: str(self._faker.phone_number()),
            "card": self._card,
            "iban": self._iban,
            "ip": self._ip,
            "secret": self._secret,
            "password": self._password,
        }

    @property
    def _faker(self) -> Any:
        return self._random.choice(self._fakers)

    def planted(self, kind: str | None = None) -> PlantedText:
        """A text with one or two things planted, each disguised in every second text."""
        chance = self._random
        parts, planted = [self._sentence()], []
        for _ in range(chance.choice((1, 1, 2))):
            chosen = kind or chance.choice(list(self._makers))
            value = self._makers[chosen]()
            shown = self._disguised(chosen, value) if chance.random() < 0.5 else value
            parts += [chance.choice(FRAMES[chosen]).format(shown), self._sentence()]
            planted.append((chosen, value))
        return PlantedText(self._chunks(chance.choice((" ", ". ", "\n")).join(parts)), tuple(planted))

    def harmless(self) -> PlantedText:
        """A text that names nobody."""
        count = self._random.randint(2, 5)
        return PlantedText(self._chunks(" ".join(self._sentence() for _ in range(count))), ())

    # --- what is planted ------------------------------------------------------------------------------------
    def _card(self) -> str:
        digits = str(self._faker.credit_card_number())
        if self._random.random() < 0.5:
            return digits
        mark = self._random.choice((" ", "-"))
        return mark.join(digits[place : place + 4] for place in range(0, len(digits), 4))

    def _iban(self) -> str:
        value = str(self._faker.iban())
        if self._random.random() < 0.5:
            return value
        return " ".join(value[place : place + 4] for place in range(0, len(value), 4))

    def _ip(self) -> str:
        return str(self._faker.ipv4() if self._random.random() < 0.6 else self._faker.ipv6())

    def _secret(self) -> str:
        letters, hexadecimal = string.ascii_letters + string.digits, "0123456789abcdef"

        def drawn(count: int, of: str = letters) -> str:
            return "".join(self._random.choice(of) for _ in range(count))

        return self._random.choice(
            (
                lambda: f"sk-proj-{drawn(48)}",
                lambda: f"sk-ant-api03-{drawn(40)}",
                lambda: f"sk_live_{drawn(24)}",
                lambda: f"ghp_{drawn(36)}",
                lambda: f"github_pat_{drawn(22)}_{drawn(59)}",
                lambda: f"glpat-{drawn(20)}",
                lambda: f"xoxb-{drawn(11, string.digits)}-{drawn(12, string.digits)}-{drawn(24)}",
                lambda: f"AKIA{drawn(16, string.ascii_uppercase + string.digits)}",
                lambda: f"AIza{drawn(35)}",
                lambda: f"hf_{drawn(34)}",
                lambda: f"npm_{drawn(36)}",
                lambda: f"SG.{drawn(22)}.{drawn(43)}",
                lambda: f"eyJhbGciOiJIUzI1NiJ9.{drawn(60)}.{drawn(43)}",
                lambda: drawn(40, letters + "/+"),
                lambda: drawn(64, hexadecimal),
                lambda: f"AC{drawn(32, hexadecimal)}",
                lambda: f"acme_{drawn(32)}",
                lambda: f"{drawn(8)}.{drawn(32)}",
            )
        )()

    def _password(self) -> str:
        return str(self._faker.password(length=self._random.randint(8, 16), special_chars=False))

    # --- disguises ------------------------------------------------------------------------------------------
    def _disguised(self, kind: str, value: str) -> str:
        if kind in ("secret", "password"):
            return self._with_invisible(value)
        ways = [self._with_invisible, self._fullwidth]
        if kind == "email":
            ways += [self._spelled, lambda text: text.replace("@", f"{self._blank()}@{self._blank()}")]
        elif kind == "ip":
            ways += [lambda text: text.replace(".", "[.]"), lambda text: text.replace(".", " . ")]
        else:
            ways += [self._other_digits, self._other_digits, self._other_marks, self._spaced]
        return self._random.choice(ways)(value)

    def _blank(self) -> str:
        return self._random.choice(BLANKS)

    def _with_invisible(self, text: str) -> str:
        for _ in range(self._random.randint(1, 4)):
            place = self._random.randint(1, len(text) - 1)
            text = text[:place] + self._random.choice(INVISIBLE) + text[place:]
        return text

    def _fullwidth(self, text: str) -> str:
        return "".join(chr(ord(each) + 0xFEE0) if "!" <= each <= "~" else each for each in text)

    def _spelled(self, text: str) -> str:
        at, dot = self._random.choice(
            ((" (at) ", " (dot) "), ("[at]", "[dot]"), (" at ", " dot "), ("(at)", "."), (" [at] ", "."))
        )
        local, _, domain = text.partition("@")
        return f"{local}{at}{domain.replace('.', dot)}"

    def _other_digits(self, text: str) -> str:
        zero = ord(self._random.choice(DIGITS))
        return "".join(chr(zero + int(each)) if each in string.digits else each for each in text)

    def _other_marks(self, text: str) -> str:
        blank, dash = self._blank(), self._random.choice(DASHES)
        return text.replace(" ", blank).replace("-", dash)

    def _spaced(self, text: str) -> str:
        return self._random.choice((" ", "\u2009", "\u200b")).join(each for each in text if each != " ")

    # --- what names nobody ----------------------------------------------------------------------------------
    def _sentence(self) -> str:
        chance, faker = self._random, self._fakers[0]
        number, fraction = chance.randint, chance.random
        return str(
            chance.choice(
                (
                    faker.sentence,
                    faker.sentence,
                    lambda: f"The meeting of {faker.date()} at {faker.time()} took {number(5, 180)} minutes.",
                    lambda: f"It costs {number(1, 9999):,}.{number(10, 99)} dollars for {number(2, 99)}.",
                    lambda: f"loss {fraction():.6f} after {number(1, 99_999)} steps, {fraction() / 1000:.2e}",
                    lambda: (
                        f"Version {number(0, 9)}.{number(0, 30)}.{number(0, 30)} needs 3.{number(9, 14)}."
                    ),
                    lambda: f"for index in range({number(2, 5000)}): total += {fraction():.3f}",
                    lambda: f"Add {number(50, 900)} g of flour and bake at {number(150, 240)} degrees.",
                    lambda: f"def {faker.word()}_{faker.word()}(self, size: int = {number(0, 255)}) -> None:",
                    lambda: (
                        f"In {number(1850, 2025)} about {number(10, 999)},{number(100, 999)} lived there."
                    ),
                )
            )()
        )

    def _chunks(self, text: str) -> tuple[str, ...]:
        cuts = sorted(
            self._random.randint(0, len(text)) for _ in range(self._random.randint(0, len(text) // 4))
        )
        return tuple(text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True))


MOST_LEFT = 5
"""So many letters and digits in a row of what was planted may be left by chance."""


def core(text: str) -> str:
    """The letters and digits of a text, plain, in small letters: what a reader would make of it."""
    plain = []
    for each in unicodedata.normalize("NFKC", text):
        digit = unicodedata.digit(each, None)
        plain.append(str(digit) if digit is not None else each.lower() if each.isalnum() else "")
    return "".join(plain)


def is_left(value: str, text: str) -> bool:
    """Whether a part of what was planted can still be read in the text, between what was put in its place."""
    planted = core(value)
    size = min(len(planted), MOST_LEFT + 1)
    pieces = [core(piece) for piece in re.split(r"\[[A-Z]+\]", text)]
    windows = (planted[place : place + size] for place in range(len(planted) - size + 1))
    return any(window in piece for window in windows for piece in pieces)
