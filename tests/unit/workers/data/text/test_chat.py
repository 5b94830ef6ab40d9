"""Of a conversation only the answers count, whatever the template does with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import BadData
from tests.builders.text import CHATML, IndexedSamples, bpe, lines, opened, saved_bpe
from workers.data.samples import UnreadableSample
from workers.data.text.template import ChatTemplate, UnfitConversation
from workers.data.text.text_samples import IGNORED, TextSamples

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi <|im_end|> there"},
    {"role": "assistant", "content": "  Hello.\n"},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Bye ½"},
]
TRIMS_ITS_END = (
    "{% set text %}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n\n{% endfor %}{% endset %}"
    "{{ text | trim }}{% if add_generation_prompt %}\n\n[assistant] {% endif %}"
)
TREATS_THE_LAST_OTHERWISE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}"
    "{{ m.content.strip() }}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_PROMPT = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}[INST] "
    "{{ m.content }} [/INST]{% endif %}{% endfor %}"
)
WITH_BLOCKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }};"
    "{% endgeneration %}"
    "{% else %}Q:{{ m.content }};{% endif %}{% endfor %}"
)


def answers(template: str, messages: list[dict[str, Any]] = TALK, **arguments: Any) -> list[str]:
    text, ranges = ChatTemplate(template, "template", arguments).render(messages, {}, answers=True)
    return [text[start:end] for start, end in ranges]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["Hello.<|im_end|>\n", "Bye ½<|im_end|>\n"]),
        (TRIMS_ITS_END, ["  Hello.\n", "Bye ½"]),
        (TREATS_THE_LAST_OTHERWISE, ["Hello.</s>\n", "<think></think>Bye ½</s>\n"]),
        (WITHOUT_PROMPT, ["   Hello.\n</s>", " Bye ½</s>"]),
        (WITH_BLOCKS, ["  Hello.\n;", "Bye ½;"]),
    ],
    ids=["chatml", "trims", "last", "no prompt", "blocks"],
)
def test_answers(template: str, expected: list[str]) -> None:
    found = answers(template)
    assert [each.rstrip("\n") for each in found] == [each.rstrip("\n") for each in expected]


def test_a_template_renders_as_transformers_does(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_file=saved_bpe(tmp_path), eos_token="<|endoftext|>")
    for template in (CHATML, TREATS_THE_LAST_OTHERWISE, "{{ eos_token }}{{ messages | tojson }}{# a ½ #}"):
        plain.chat_template = template
        mine = ChatTemplate(template, "template", {"eos_token": "<|endoftext|>"})
        assert mine.render(TALK, {}, answers=False).text == plain.apply_chat_template(TALK, tokenize=False)


def talk(folder: Path, rows: list[Any], **fields: Any) -> IndexedSamples:
    folder.mkdir(exist_ok=True)
    path = lines(folder / "talk.jsonl", rows)
    more = {"tokenizer": saved_bpe(folder), "template": CHATML, "sample_tokens": 128} | fields
    return opened(path, folder / "spool", kind="chat", **more)


def test_targets_are_the_answers_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    samples = talk(tmp_path, [{"messages": TALK}])
    assert isinstance(samples, TextSamples)
    sample = samples[0]
    plain = Tokenizer.from_str(bpe())
    text = ChatTemplate(CHATML, "template", {}).render(TALK, {}, answers=False).text
    ids = plain.encode(text).ids
    assert sample["inputs"][: len(ids) - 1].tolist() == ids[:-1]
    counted = sample["targets"] != IGNORED
    assert plain.decode(sample["targets"][counted].tolist(), skip_special_tokens=False) == (
        "Hello.<|im_end|>\nBye ½<|im_end|>\n"
    )
    assert (sample["targets"][counted] == np.array([*ids[1:], 0] + [0] * (128 - len(ids)))[counted]).all()


def test_everything_may_count(tmp_path: Path) -> None:
    sample = talk(tmp_path, [{"messages": TALK[:2]}], loss_on="everything")[0]
    assert (sample["targets"] != IGNORED).sum() == (sample["attention_mask"] == 1).sum()


@pytest.mark.parametrize("packing", ["best_fit", "concatenate"])
def test_packed_conversations_count_the_same_tokens(tmp_path: Path, packing: str) -> None:
    rows = [{"messages": TALK[index : index + 2]} for index in (1, 3)] * 5

    def targets(samples: IndexedSamples) -> list[int]:
        assert isinstance(samples, TextSamples)
        found = [samples[index]["targets"] for index in range(len(samples))]
        return sorted(each for row in found for each in row[row != IGNORED].tolist())

    packed = targets(talk(tmp_path, rows, packing=packing, sample_tokens=64))
    alone = targets(talk(tmp_path, rows))
    assert packed == alone if packing == "best_fit" else set(packed) == set(alone)


def test_bad_rows_are_unreadable_samples_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    rows: list[Any] = [
        {"messages": TALK},
        {"messages": [{"from": "human", "value": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": "hello"},
        {"messages": []},
        {"messages": TALK[:2]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{not json\n")
    samples = opened(
        path,
        tmp_path / "spool",
        kind="chat",
        tokenizer=saved_bpe(tmp_path),
        template=CHATML,
        sample_tokens=128,
    )
    assert isinstance(samples, TextSamples)
    expected = [
        "line 2: message 1 has no role, but from, value; a message is {role, content}",
        r"line 3: message 1 \(user\) has no content",
        "line 4: messages is no list of messages",
        "line 5: it has no message",
        "line 6: no message has the role assistant",
        "line 7: not JSON",
    ]
    assert len(samples) == 7
    for index, reason in enumerate(expected, 1):
        with pytest.raises(UnreadableSample, match=reason):
            samples[index]
    with pytest.raises(BadData, match=r"line 2: .*; data.on_bad_document: skip"):
        talk(tmp_path / "packed", [*rows[:6], {"messages": 1}], packing="best_fit")


def test_an_answer_beyond_the_sample_is_unreadable(tmp_path: Path) -> None:
    samples = talk(
        tmp_path, [{"messages": [{"role": "user", "content": "long " * 99}, TALK[-1]]}], sample_tokens=16
    )
    with pytest.raises(
        UnreadableSample, match=r"has no answer in its first 16 tokens; raise data.sample_tokens"
    ):
        samples[0]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for %}", r"data.template, line 1: Expected an expression"),
        (
            "{{ messages[9].content }}",
            "the first: talk.jsonl, line 1: data.template fails: list object has no element 9",
        ),
        ("{{ raise_exception('no system') }}", "data.template fails: no system"),
        ("{{ strftime_now('%d') }}", "give the date by data.template_arguments"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__'"),
        ("{% for x in range(99999999) %}{% endfor %}", "data.template fails: Range too big"),
        ("{{ messages[0].content }}", "renders nothing of message 3|which part"),
    ],
)
def test_a_template_that_fails_is_named(tmp_path: Path, template: str, expected: str) -> None:
    with pytest.raises(BadData, match=expected) as caught:
        talk(tmp_path, [{"messages": TALK}], template=template)
    assert "\n" not in caught.value.text


def test_the_template_may_be_the_tokenizers_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(CHATML)
    expected = talk(tmp_path, [{"messages": TALK}])[0]
    by_file = talk(tmp_path, [{"messages": TALK}], template=str(tmp_path / "own.jinja"))[0]
    saved_bpe(tmp_path)
    with pytest.raises(BadData, match=r"has no chat template; give data.template"):
        talk(tmp_path, [{"messages": TALK}], template="")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    own = talk(tmp_path, [{"messages": TALK}], template="", tokenizer=str(tmp_path))[0]
    assert expected["targets"].tolist() == by_file["targets"].tolist() == own["targets"].tolist()
    with pytest.raises(BadData, match=r"data.template .*no.jinja can't be read"):
        talk(tmp_path, [{"messages": TALK}], template=str(tmp_path / "no.jinja"))


def test_a_text_that_is_no_conversation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(BadData, match=r"kind chat reads JSON lines and Parquet files; say data.format"):
        opened(tmp_path / "a.txt", tmp_path / "spool", kind="chat", template=CHATML)
    with pytest.raises(BadData, match=r"line 1 has no field 'messages', but text; say data.field"):
        talk(tmp_path, [{"text": "x"}])


def test_an_answer_that_the_template_hides_is_not_guessed() -> None:
    with pytest.raises(UnfitConversation, match="does not show which part of its text message 3 is"):
        answers("{% for m in messages %}{{ m.content | length }}{{ loop.last }}{% endfor %}")
