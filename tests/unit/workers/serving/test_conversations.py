"""Chat templates: what transformers renders, and refusals of what would run forever or fill memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from schemas.errors import BadInput
from workers.data.text.tokenizer import ByteTokenizer
from workers.serving.conversations import Conversations

CHATML = (
    "{%- for message in messages %}<|im_start|>{{ message.role ~ '\n' ~ message.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hello 123456789"}]


def conversations(template: str) -> Conversations:
    return Conversations(ByteTokenizer(), template)


def test_a_prompt_ends_where_the_answer_begins() -> None:
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello 123456789<|im_end|>\n"
    assert conversations(CHATML).prompt(MESSAGES) == expected + "<|im_start|>assistant\n"


def test_it_is_what_transformers_renders() -> None:
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{{ m | tojson }}{{ ns.n }}"
        "{{ m.content.split(' ') | join(', ') }}{{ range(3) | list }}{{ '%5d' % ns.n }}{% endfor %}"
    )
    rendered, _ = chat.render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=True)
    assert conversations(template).prompt(MESSAGES) == rendered[0]


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% for a in range(999999999) %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set x = namespace(t='a') %}{% for i in range(60) %}{% set x.t = x.t ~ (x.t ~ 'b') %}{% endfor %}",
        "{% set x = namespace(t='aa') %}{% for i in range(60) %}{% set x.t = x.t + x.t %}{% endfor %}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ 'a'.rjust(999999999) }}",
        "{{ 'a' | center(999999999) }}",
        "{% set x = 'a' * 9999 %}{{ x.replace('', x) }}",
        "{% set x = 'a' * 9999 %}{{ x | replace('a', x) }}",
        "{{ (['a' * 99999] * 9999) | join }}",
        "{{ ''.join(['a' * 99999] * 9999) }}",
        "{{ messages.__class__.__mro__ }}{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_does_harm_is_refused_in_one_line(template: str) -> None:
    with pytest.raises(BadInput, match=r"^messages: the chat template fails: .") as refused:
        conversations(template).prompt(MESSAGES)
    assert "\n" not in refused.value.text


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "messages: give at least one"),
        ([{"role": "tool", "content": ""}], r"messages\[0\].role: 'tool' is none of system"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: give a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content"),
        ([{"role": "user", "content": "x" * (5 << 20)}], "messages: 5,.* bytes are more than"),
    ],
)
def test_messages_that_are_none_are_named(messages: list[dict[str, object]], text: str) -> None:
    with pytest.raises(BadInput, match=text):
        conversations(CHATML).prompt(messages)


def test_a_service_without_a_template_says_what_to_do() -> None:
    with pytest.raises(BadInput, match=r"bytes has no chat template: ask for completions"):
        conversations("")
    with pytest.raises(BadInput, match="chat template, line 1"):
        conversations("{% if %}")


def test_a_rendering_gets_no_more_steps_because_another_one_begins() -> None:
    loop = "{% for a in range(150000) %}{% endfor %}"
    middle = "{{ messages[0].content.strip() }}"
    served = conversations("{% if messages | length > 1 %}" + loop + middle + loop + "{% endif %}")
    begun = []

    class Interrupted(str):
        def strip(self, *_: object) -> str:
            with ThreadPoolExecutor(1) as thread:
                begun.append(thread.submit(served.prompt, MESSAGES[:1]).result())
            return ""

    with pytest.raises(BadInput, match="fails: it takes more than"):
        served.prompt([{"role": "user", "content": Interrupted("a")}, *MESSAGES])
    assert begun == [""]
