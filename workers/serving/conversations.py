"""A conversation as a prompt, by a tokenizer's chat template, within limits of work and size (ADR-0132).

Templates come with tokenizers, so they are strangers' programs. Jinja's sandbox keeps them from objects, but
not from running forever or filling memory. Here every loop, call and sum is counted, and every text measured.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

try:
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError:
    raise ImportError("chat templates need jinja2 at the gateways: pip install 'dmsc[text]'") from None

from schemas.errors import BadInput
from workers.data.text.template import ChatTemplate, Message, UnfitConversation
from workers.data.text.tokenizer import TextTokenizer

MOST_MESSAGE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateLimits:
    """What one rendering may use.

    Attributes:
        characters: Of any text that it makes, on its way or as its result; and entries of a list.
        steps: Turns of loops, calls and sums.
        number: The largest that a function or filter is called with: a width, a count, an indentation.
        render_s: Seconds.
    """

    characters: int = 8 << 20
    steps: int = 200_000
    number: int = 10_000
    render_s: float = 2.0


_ROLES = ("system", "developer", "user", "assistant")


class _Budget(threading.local):
    """What the rendering of this thread has used: gateways render several conversations at a time."""

    steps = 0
    until = 0.0


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget for each rendering; `begin` sets it anew, for the thread that calls."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.limits = TemplateLimits()
        self._budget = _Budget()
        self.filters = {name: self._measured(function) for name, function in self.filters.items()}
        self.filters |= {"__counted": self._counted, "__measured": self._fits}
        self.globals["range"] = self._range

    def begin(self) -> None:
        """A rendering begins."""
        self._budget.steps, self._budget.until = 0, time.monotonic() + self.limits.render_s

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "__counted", [], [], None, None)
        self._measure_joined(template)
        template.set_environment(self)
        return template

    def _measure_joined(self, node: nodes.Node) -> None:
        """Puts `a ~ b` into a filter that measures it."""
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(node, field, nodes.Filter(value, "__measured", [], [], None, None))
            elif isinstance(value, list):
                value[:] = [
                    nodes.Filter(item, "__measured", [], [], None, None)
                    if isinstance(item, nodes.Concat)
                    else item
                    for item in value
                ]
        for child in node.iter_child_nodes():
            measured = isinstance(child, nodes.Filter) and child.name == "__measured"
            self._measure_joined(child.node if measured else child)  # type: ignore[attr-defined]

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or method of the template."""
        __self._step()
        if __obj is not __self.globals["range"]:
            __self._refuse_large((*args, *kwargs.values()))
        __self._refuse_growth(getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None), args)
        return __self._fits(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes a sum, product, power or formatted text."""
        self._step()
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(other, int):
                    self._refuse_size(len(one) * other)
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
            raise SecurityError("it computes a large power")
        if operator == "%" and isinstance(left, str):
            self._refuse_widths(left)
        return self._fits(super().call_binop(context, operator, left, right))

    def _step(self) -> None:
        budget = self._budget
        budget.steps += 1
        if budget.steps > self.limits.steps:
            raise SecurityError(f"it takes more than {self.limits.steps:,} steps")
        if time.monotonic() > budget.until:  # at each: one alone may work on a text of megabytes
            raise SecurityError(f"it takes more than {self.limits.render_s:g} s")

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _range(self, *numbers: int) -> range:
        self._step()
        found = range(*numbers)
        if len(found) > self.limits.steps:
            raise SecurityError(f"it counts to {len(found):,}")
        return found

    def _fits(self, value: Any) -> Any:
        self._step()
        if isinstance(value, str | list | tuple | dict):
            self._refuse_size(len(value))
        elif isinstance(value, int) and value.bit_length() > 256:
            raise SecurityError("it computes a number of more than 256 bits")
        return value

    def _refuse_size(self, size: int) -> None:
        if size > self.limits.characters:
            raise SecurityError(f"it makes something longer than {self.limits.characters:,}")

    def _refuse_widths(self, text: str) -> None:
        digits = "".join(character if character.isdigit() else " " for character in text).split()
        if any(len(number) > 4 for number in digits):
            raise SecurityError("it formats a text with a large width")

    def _refuse_large(self, arguments: Iterable[Any]) -> None:
        """Widths, counts and the like; what they do to a text is measured too late."""
        for value in arguments:
            if isinstance(value, int) and abs(value) > self.limits.number:
                raise SecurityError(f"it calls something with a number above {self.limits.number:,}")

    def _refuse_growth(self, name: str, subject: Any, arguments: Sequence[Any]) -> None:
        """Refuses what would make a long text of short ones, before it does."""
        if isinstance(subject, str) and name == "replace" and len(arguments) > 1:
            self._refuse_size(len(subject) + subject.count(str(arguments[0])) * len(str(arguments[1])))
        elif isinstance(subject, str) and name == "join" and isinstance(arguments[0], list | tuple):
            self._refuse_size(sum(len(str(part)) + len(subject) for part in arguments[0]))
        elif isinstance(subject, str) and name in ("format", "format_map"):
            self._refuse_widths(subject)

    def _measured(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self._step()
            self._refuse_large((*args, *kwargs.values()))
            values = args[1:] if hasattr(function, "jinja_pass_arg") else args
            name = function.__name__.removeprefix("do_").removeprefix("sync_do_")
            if name == "join":
                self._refuse_growth(name, str(values[1]) if len(values) > 1 else "", values[:1])
            elif values:
                self._refuse_growth(name, values[0], values[1:])
            return self._fits(function(*args, **kwargs))

        return measured


class Conversations:
    """Conversations of one service as prompts.

    Args:
        tokenizer: The service's tokenizer.
        template: A template in place of the tokenizer's own.

    Raises:
        BadInput: There is no template, or it is none.
    """

    def __init__(self, tokenizer: TextTokenizer, template: str = "") -> None:
        text = template or tokenizer.chat_template
        if not text:
            raise BadInput(
                f"the tokenizer {tokenizer.name} has no chat template: ask for completions, or give the "
                "service a template"
            )
        seen = {f"{name}_token": token for name, token in tokenizer.tokens._asdict().items() if token}
        made: list[LimitedEnvironment] = []

        def environment(**options: Any) -> LimitedEnvironment:
            made.append(LimitedEnvironment(**options))
            return made[0]

        try:
            self._template = ChatTemplate(text, "the chat template", seen, environment)
        except SecurityError as error:
            raise BadInput(f"the chat template: {error}") from None
        self._environment = made[0]

    def prompt(self, messages: Sequence[Message], others: Mapping[str, Any] | None = None) -> str:
        """The text whose continuation is the answer; its special tokens are written out.

        Args:
            messages: With `role` and `content` each.
            others: What else the template may ask for.

        Raises:
            BadInput: A message is none, there are too many, or the template refuses them or its limits.
        """
        _check(messages)
        self._environment.begin()
        try:
            return self._template.prompt(messages, others or {})
        except UnfitConversation as error:
            raise BadInput(f"messages: {error}") from None


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise BadInput("messages: give at least one")
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise BadInput(f"messages[{index}].role: {str(role)[:40]!r} is none of {', '.join(_ROLES)}")
        if not isinstance(content, str) and not _is_text_parts(content):
            raise BadInput(f"messages[{index}].content: give a text, or parts of the type text")
    size = len(json.dumps(list(messages), ensure_ascii=False).encode())
    if size > MOST_MESSAGE_BYTES:
        raise BadInput(f"messages: {size:,} bytes are more than the {MOST_MESSAGE_BYTES:,} that are allowed")


def _is_text_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )
