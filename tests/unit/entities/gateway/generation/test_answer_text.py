"""Tokens to text: whole characters, stops across pieces, the same pieces wherever one begins again."""

from __future__ import annotations

from entities.gateway.generation.answer_text import AnswerText, TextPiece
from entities.gateway.generation.token_rates import TokenBuckets, TokenRate
from entities.tokens.byte_tokens import Utf8Tokenizer
from schemas.services.generation import GeneratedToken


def pieces(data: bytes, stop: tuple[str, ...] = (), *, ends: str = "length") -> list[TextPiece]:
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
