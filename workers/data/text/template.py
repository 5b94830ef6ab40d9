"""A chat template: a conversation as text, and which of its characters are answers.

Templates are written for inference. Which part of a rendered conversation an answer is, they say only if they
have `{% generation %}` blocks. Else it is found by rendering: the conversation up to the answer with the
prompt to answer, and up to and with the answer, are beginnings of the whole. Where they are not, because a
template treats the last answer otherwise, the answer is what changes if another one stands in its place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bus.files.artifacts import open_filesystem
from bus.wire.secret_urls import hidden
from schemas.errors import BadData, BadInput
from schemas.job_file.text import is_template_text
from workers.data.text.tokenizer import TextTokenizer
from workers.data.text.tokenizer_files import library

Message = Mapping[str, Any]

ANSWERS = "assistant"
_MOST_BYTES = 1 << 20
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode: they mark places in a rendered text, and stand in no other one."""
_STAND_IN = f"{_OPEN}answer{_CLOSE}"


class RenderedConversation(NamedTuple):
    """A conversation's text, and the half-open ranges of characters that are answers."""

    text: str
    answers: tuple[tuple[int, int], ...]


class UnfitConversation(Exception):
    """The template can't render this conversation, or it has no answer; the text says why."""


class ChatTemplate:
    """A template that is compiled, in jinja's sandbox.

    Args:
        text: The template.
        where: How messages call it.
        arguments: What it sees besides the conversation.
        kind: A class of environments of jinja's sandbox; None: jinja's own, which sets no limits.

    Raises:
        BadData: It is not Jinja, or jinja2 is not installed here.
    """

    def __init__(
        self, text: str, where: str, arguments: Mapping[str, Any], kind: Callable[..., Any] | None = None
    ) -> None:
        jinja2 = library("jinja2", where, key="data.template")
        sandbox = library("jinja2.sandbox", where, key="data.template")
        self._errors: type[Exception] = jinja2.TemplateError
        self.where = where
        self.digest = hashlib.sha256(json.dumps([text, dict(arguments)], sort_keys=True).encode()).hexdigest()
        self._arguments = dict(arguments)
        self._marks_answers = "generation %}" in text or "generation -%}" in text
        environment = (kind or sandbox.ImmutableSandboxedEnvironment)(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _generation_blocks(jinja2)],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = self._refuse
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise BadData(f"{where}, line {error.lineno}: {error.message}") from None

    def _refuse(self, text: str) -> None:
        raise self._errors(text)

    def render(
        self, messages: Sequence[Message], others: Mapping[str, Any], *, answers: bool
    ) -> RenderedConversation:
        """Renders a conversation.

        Args:
            messages: The whole conversation.
            others: What else the template may ask of the row, as `tools`.
            answers: Whether the answers are looked for.

        Raises:
            UnfitConversation: It can't be rendered, or no answer is found in it.
        """
        if not self._marks_answers:
            text = self._text(messages, others)
            return RenderedConversation(text, self._found(text, messages, others) if answers else ())
        marked = self._text(messages, others)
        text, ranges = _unmarked(marked)
        if answers and not ranges:
            raise UnfitConversation(f"{self.where} marks no answer of it by generation blocks")
        return RenderedConversation(text, tuple(ranges))

    def prompt(self, messages: Sequence[Message], others: Mapping[str, Any]) -> str:
        """The conversation as a model gets it, up to where its answer begins.

        Raises:
            UnfitConversation: It can't be rendered.
        """
        return _unmarked(self._text(messages, others, prompt=True))[0]

    def _text(self, messages: Sequence[Message], others: Mapping[str, Any], *, prompt: bool = False) -> str:
        values = {**others, **self._arguments, "messages": messages, "add_generation_prompt": prompt}
        try:
            return str(self._template.render(values))
        except Exception as error:  # a template may fail like any program
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            remedy = (
                "; a sample may not depend on the day: give the date by data.template_arguments"
                if "strftime_now" in reason
                else ""
            )
            raise UnfitConversation(f"{self.where} fails: {reason[:200]}{remedy}") from None

    def _found(
        self, whole: str, messages: Sequence[Message], others: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        found = tuple(
            self._answer(whole, messages, index, others)
            for index, message in enumerate(messages)
            if message["role"] == ANSWERS
        )
        if not found:
            raise UnfitConversation(f"no message has the role {ANSWERS}")
        return found

    def _answer(
        self, whole: str, messages: Sequence[Message], index: int, others: Mapping[str, Any]
    ) -> tuple[int, int]:
        before = self._text(messages[:index], others, prompt=True) if index else None
        until = self._text(messages[: index + 1], others)
        start = len(before) if before and whole.startswith(before) else None
        end = len(until) if whole.startswith(until) else None
        if start is None or end is None:
            first, last = self._replaced(whole, messages, index, others)
            start = first if start is None else start
            if end is None:
                alone = self._text(_with_stand_in(messages[: index + 1], index), others)
                behind = alone.rpartition(_STAND_IN)[2]
                end = last + _common(behind, whole[last:])
        if start >= end:
            raise UnfitConversation(f"{self.where} renders nothing of message {index + 1}")
        return start, end

    def _replaced(
        self, whole: str, messages: Sequence[Message], index: int, others: Mapping[str, Any]
    ) -> tuple[int, int]:
        """The range that changes with the message's content."""
        other = self._text(_with_stand_in(messages, index), others)
        if other.count(_STAND_IN) != 1:
            raise UnfitConversation(
                f"{self.where} does not show which part of its text message {index + 1} is; mark answers "
                "in it by {% generation %} … {% endgeneration %}"
            )
        before, _, behind = other.partition(_STAND_IN)
        start = _common(before, whole)
        same = _common(behind[::-1], whole[start:][::-1])
        return start, len(whole) - same


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _with_stand_in(messages: Sequence[Message], index: int) -> list[Message]:
    changed = list(messages)
    content: Any = _STAND_IN
    if isinstance(messages[index].get("content"), list):
        content = [{"type": "text", "text": _STAND_IN}]
    changed[index] = {**messages[index], "content": content}
    return changed


def _unmarked(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks of generation blocks, and the ranges between them."""
    parts: list[str] = []
    ranges: list[tuple[int, int]] = []
    length = 0
    for number, part in enumerate(marked.split(_OPEN)):
        answer, closed, rest = part.partition(_CLOSE)
        if number and closed:
            ranges.append((length, length + len(answer)))
        parts += [answer, rest]
        length += len(answer) + len(rest)
    return "".join(parts), [(start, end) for start, end in ranges if end > start]


def _generation_blocks(jinja2: Any) -> Any:
    """The extension that transformers' templates may use: `{% generation %}` … `{% endgeneration %}`."""
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    return GenerationBlocks


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as templates expect it, not escaped for HTML."""
    allowed = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def open_template(
    template: str,
    arguments: Mapping[str, Any],
    tokenizer: TextTokenizer,
    fetched: Mapping[str, Path] = {},
) -> ChatTemplate:
    """The template that a job names: a text, a file, or the tokenizer's own.

    Raises:
        BadData: There is none, or it is no template.
    """
    tokens = {f"{name}_token": text for name, text in tokenizer.tokens._asdict().items() if text}
    seen = {**tokens, **arguments}
    if not template:
        if not tokenizer.chat_template:
            raise BadData(
                f"data.tokenizer {tokenizer.name} has no chat template; give data.template, or a tokenizer's "
                "folder with one"
            )
        return ChatTemplate(tokenizer.chat_template, f"the chat template of {tokenizer.name}", seen)
    if is_template_text(template):
        return ChatTemplate(template, "data.template", seen)
    return ChatTemplate(_read(template, fetched), f"data.template {template}", seen)


def _read(template: str, fetched: Mapping[str, Path]) -> str:
    try:
        filesystem, path = open_filesystem(str(fetched.get(template, template)))
        content: bytes = filesystem.cat_file(path, end=_MOST_BYTES)
        return content.decode()
    except BadInput as error:
        raise BadData(f"data.template {error.text}") from None
    except UnicodeDecodeError as error:
        raise BadData(f"data.template {template} is not UTF-8 at byte {error.start:,}") from None
    except OSError as error:
        reason = hidden(str(error.strerror or error))
        raise BadData(f"data.template {template} can't be read: {reason}") from None
