"""Tokens to text: whole characters, stops across pieces, the same pieces wherever one begins again."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from entities.gateway.generation.answer_text import AnswerPiece, AnswerText
from entities.gateway.generation.token_rates import TokenBuckets, TokenRate
from entities.tokens.byte_tokens import Utf8Tokenizer
from schemas.services.generation import GeneratedToken


def pieces(data: bytes, stop: tuple[str, ...] = (), *, ends: str = "length") -> list[AnswerPiece]:
    text = AnswerText(Utf8Tokenizer(), stop)
    found = []
    for place, byte in enumerate(data):
        last = ends if place == len(data) - 1 else ""
        made = GeneratedToken.model_validate(
            {"session": 1, "fence": 1, "position": place, "token": byte, "ends": last}
        )
        if (piece := text.add(made)) is not None:
            found.append(piece)
    return found


def test_a_character_comes_when_it_is_whole() -> None:
    found = pieces("aé€".encode())
    assert [(piece.number, piece.text) for piece in found] == [(1, "a"), (3, "é"), (6, "€")]
    assert [len(piece.told) for piece in found] == [1, 2, 3]
    assert pieces("é".encode()[:1])[-1].text == "�"


def test_a_stop_is_held_back_and_is_no_part_of_the_answer() -> None:
    found = pieces(b"ab\n\nc", ("\n\n",))
    assert "".join(piece.text for piece in found) == "ab"
    assert (found[-1].ends, found[-1].number) == ("stop", 4)
    # What looked like a stop and is none comes with the next character.
    assert [piece.text for piece in pieces(b"a\nb", ("\n\n",))] == ["a", "\nb"]
    assert pieces(b"a\n", ("\n\n",))[-1] == pieces(b"a\n", ("\n\n",))[-1]
    assert "".join(piece.text for piece in pieces(b"a\n", ("\n\n",))) == "a\n"


class Words(Utf8Tokenizer):
    """Each token is one of these texts."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.words[token] for token in tokens)

    def text(self) -> Words:
        return self

    def add(self, token: int) -> str:
        return self.words[token]

    def end(self) -> str:
        return ""


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_a_stop_is_found_wherever_tokens_cut_the_text(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """The one that is whole first, and of these the longest."""
    cut = []
    while left := text[sum(map(len, cut)) :]:
        cut.append(left[: data.draw(st.integers(1, 5))])
    answer, released = AnswerText(Words(cut), stops), ""
    for place in range(len(cut)):
        made = GeneratedToken(
            session=1, fence=1, position=place, token=place, ends="length" if place == len(cut) - 1 else ""
        )
        if (piece := answer.add(made)) is not None:
            released += piece.text
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    assert released == text[: min(ends)[1] if ends else len(text)]


def test_the_text_of_a_stop_token_is_left_out() -> None:
    found = pieces(b"ab!", ends="stop")
    assert "".join(piece.text for piece in found) == "ab"
    assert found[-1].ends == "stop"


def test_a_user_waits_once_their_tokens_are_used_up() -> None:
    buckets = TokenBuckets(TokenRate(per_s=10, burst=100))
    assert buckets.wait_s("ruth", 0.0) == 0
    buckets.charge("ruth", 150, 0.0)
    assert buckets.wait_s("ruth", 0.0) == 5.1
    assert buckets.wait_s("rob", 0.0) == 0
    assert buckets.wait_s("ruth", 6.0) == 0
