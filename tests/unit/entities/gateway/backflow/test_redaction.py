"""What is taken out of texts before they are stored, and what is left."""

from __future__ import annotations

import pytest

from entities.gateway.backflow.number_shapes import is_card, is_iban
from entities.gateway.backflow.plain_form import plain_form
from entities.gateway.backflow.redaction import redact

GONE: dict[str, tuple[str, ...]] = {
    "email": (
        "ann.lee+shop@mail.example.com",
        "ann@exämple.de",
        "ａｎｎ＠example．com",
        "ann @ example . com",
        "ann (at) example (dot) com",
        "ann[at]example[.]com",
        "ann at example dot com",
        "a\u200bnn@exam\u00adple.com",
        "ann%40example.com",
        "ann&#64;example.com",
        "ann\\u0040example.com",
    ),
    "card": (
        "4111111111111111",
        "4111 1111 1111 1111",
        "4111-1111-1111-1111",
        "4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
        "４１１１ １１１１ １１１１ １１１１",
        "٤١١١١١١١١١١١١١١١",
        "4111\u00a01111\u20091111\u202f1111",
        "4111.1111.1111.1111",
        "3782 822463 10005",
        "4111 1111\n1111 1111",
        "4111.111111111111",
    ),
    "iban": (
        "DE89370400440532013000",
        "DE89 3704 0044 0532 0130 00",
        "de89-3704-0044-0532-0130-00",
        "GB29 NWBK 6016 1331 9268 19",
        "ＤＥ89 3704 0044 0532 0130 00",
        "NO93 8601 1117 947",
        "gb29nwbk60161331926819",
    ),
    "phone": (
        "+49 30 1234567",
        "+1 (415) 555-0123",
        "(415) 555-0123",
        "415.555.0123",
        "0049 30 1234567",
        "030/1234567",
        "01 23 45 67 89",
        "+44 20 7946 0958 ext. 12",
        "＋４９ ３０ １２３４５６７",
        "+49\u201130\u20111234567",
    ),
    "ip": (
        "192.168.1.17",
        "10 . 0 . 0 . 1",
        "192[.]168[.]1[.]17",
        "2001:db8::8a2e:370:7334",
        "fe80::1",
        "00:1B:44:11:3A:B7",
    ),
    "secret": (
        "sk-proj-abcdEFGH1234ijklMNOP5678",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
        "xoxb-2345-6789-abcdefghijkl",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY12",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    ),
}
LEFT = (
    "The meeting of 2026-11-29 18:34:21 took 90 minutes; the next one is on 3.12.2026.",
    "Of 1,234 users 987 answered, which is 80.0162 %; pi is 3.14159265358979.",
    "for i in range(10): print(i, i ** 2)",
    "The password is required. The secret is out; a token is a word.",
    "Chapters 1 2 3 4 5 6 7 8 9 10 11 and the years 1914-1918, 2010-2015.",
    "std::vector<int> a; x = y at z; see section 4.2.1 of version 12.4.7",
    "this_is_a_long_identifier_name_2 and AnotherVeryLongClassNameOfTests",
    "Preheat to 220 degrees, 45 minutes, 350 g of flour, 2 eggs.",
    "SELECT name FROM users WHERE age > 30 LIMIT 100",
    *(f"DE {number} people of the town went there" for number in range(10, 100)),
    *(f"US{number} GOES THROUGH ALL OF THEM" for number in range(10, 100)),
)


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in GONE.items() for text in texts])
def test_what_names_a_person_or_opens_a_door_is_taken_out(kind: str, text: str) -> None:
    found = redact([f"Please note {text}, thank you."])
    assert found.texts == (f"Please note [{kind.upper()}], thank you.",)
    assert found.counts == {kind: 1}


@pytest.mark.parametrize("text", LEFT)
def test_what_names_nobody_is_left(text: str) -> None:
    assert redact([text]).texts == (text,)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("password: hunter2", "password: [SECRET]"),
        ("DB_PASSWORD=correct-horse", "DB_PASSWORD=[SECRET]"),
        ('{"api_key": "abc123"}', '{"api_key": "[SECRET]"}'),
        ("my password is S3cret!pw ok", "my password is [SECRET] ok"),
        ("https://ann:pw1234@host/x", "https://[SECRET]host/x"),
        ("Authorization: Bearer abc.def-123456", "Authorization: Bearer [SECRET]"),
        ("call 555-0123 now", "call [PHONE] now"),
        ("customer 123456789", "customer [NUMBER]"),
    ],
)
def test_what_is_named_as_a_secret_goes_and_its_name_stays(text: str, left: str) -> None:
    assert redact([text]).texts == (left,)


def test_a_private_key_goes_whole_or_broken_off() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----"
    assert redact([f"a {key} b"]).texts == ("a [SECRET] b",)
    assert redact([f"a {key[:-30]}"]).texts == ("a [SECRET]",)


def test_what_is_split_over_messages_goes_from_both() -> None:
    found = redact(["my card is 4111 1111", "1111 1111, expires soon"])
    assert found.texts == ("my card is [CARD]", "[CARD], expires soon")
    assert found.counts == {"card": 1}


@pytest.mark.parametrize(
    ("pieces", "left", "kind"),
    [
        (("write to ann.lee@exam", "ple.com today"), ("write to [EMAIL]", "[EMAIL] today"), "email"),
        (("use sk-proj-abcdEFGH", "1234ijklMNOP5678."), ("use [SECRET]", "[SECRET]."), "secret"),
        (("the host 192.16", "8.1.17 is up"), ("the host [IP]", "[IP] is up"), "ip"),
        (("my card 4111 11", "11 11", "11 1111"), ("my card [CARD]", "[CARD]", "[CARD]"), "card"),
        (("of blue", "bird"), ("of [HIDDEN]", "[HIDDEN]"), "hidden"),
    ],
)
def test_what_goes_on_in_the_next_text_without_a_break_goes_from_both(
    pieces: tuple[str, ...], left: tuple[str, ...], kind: str
) -> None:
    found = redact(pieces, hide=("bluebird",))
    assert found.texts == left
    assert found.counts == {kind: 1}
    assert redact(pieces[1:], hide=("bluebird",), before=pieces[0]).texts == left[1:]
    assert redact(pieces[:-1], hide=("bluebird",), behind=pieces[-1]).texts == left[:-1]


def test_what_lies_beside_the_texts_is_neither_returned_nor_counted() -> None:
    found = redact(["all is well"], before="ann@example.com.", behind="4111 1111 1111 1111")
    assert (found.texts, found.counts) == (("all is well",), {})


def test_texts_of_the_services_own_are_taken_out_in_any_case() -> None:
    found = redact(["Project  BLUEBIRD and ｂｌｕｅｂｉｒｄ"], hide=("bluebird",))
    assert found.texts == ("Project  [HIDDEN] and [HIDDEN]",)


def test_places_are_those_of_the_text_itself() -> None:
    text = "ﬀ 👩‍👩‍👧 4111 1111 1111 1111 ﷺ ann@example.com é"
    assert redact([text]).texts == ("ﬀ 👩‍👩‍👧 [CARD] ﷺ [EMAIL] é",)
    assert plain_form("１２\u200b３").text == "123"


def test_long_texts_of_one_kind_take_linear_time() -> None:
    for text in (
        "a" * 200_000,
        "1" * 50_000,
        "a." * 50_000,
        "@" * 50_000,
        "1 " * 50_000,
        "a at " * 20_000,
        "-eyJ" * 20_000,
        "AT11 " * 10_000,
        ":" * 50_000,
    ):
        redact([text])


def test_check_digits() -> None:
    assert is_card("4111111111111111")
    assert not is_card("4111111111111112")
    assert is_iban("DE89370400440532013000")
    assert not is_iban("DE89370400440532013001")
