"""A typer application whose commands may take dataclasses: each field of one is an option of the command.

A setting is then spelled once: the field has the type, the default and the help. The command gets the
dataclass and hands it on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

Command = TypeVar("Command", bound=Callable[..., Any])


class CommandApp(typer.Typer):
    """An application whose commands may take dataclasses of options."""

    def command(self, *arguments: Any, **settings: Any) -> Callable[[Command], Command]:
        register = super().command(*arguments, **settings)

        def add(command: Command) -> Command:
            register(with_options(command))
            return command

        return add

    def panel(self, name: str, *commands: Callable[..., None]) -> None:
        """Add commands under their functions' names, in one panel of the help."""
        for command in commands:
            self.command(rich_help_panel=name)(command)


@dataclass(frozen=True, slots=True)
class FieldOption:
    """An option of the command line that a field of a dataclass stands for."""

    name: str
    info: ParameterInfo
    parameter: inspect.Parameter


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with one parameter for each option of the dataclasses that it takes."""
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(kind := parameter.annotation) and isinstance(kind, type):
            groups[parameter.name] = kind
            parameters += [option.parameter for option in options_of(kind)]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    if not groups:
        return command

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        for name, kind in groups.items():
            typed = {option.name: values.pop(option.name) for option in options_of(kind)}
            values[name] = kind(
                **{
                    key: tuple(value) if isinstance(value, list) else value
                    for key, value in typed.items()
                    if value is not None and value != []
                }
            )
        return command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def options_of(kind: type[Any]) -> list[FieldOption]:
    """The options that a dataclass's fields stand for, in order.

    A field is an option if `typer.Option` or `typer.Argument` annotates it. A tuple is an option that may be
    repeated. An option that is not typed gives the field's default.
    """
    hints = get_type_hints(kind, include_extras=True)
    options = []
    for field in fields(kind):
        hint: Any = hints[field.name]
        value_type, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        info = next((item for item in metadata if isinstance(item, ParameterInfo)), None)
        if info is None:
            continue
        default: Any = inspect.Parameter.empty if field.default is MISSING else field.default
        if get_origin(value_type) is tuple:
            value_type, default = list[get_args(value_type)[0]] | None, None
        elif field.default_factory is not MISSING:
            value_type, default = value_type | None, None
        annotation = Annotated[value_type, info]
        options.append(
            FieldOption(
                field.name,
                info,
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
                ),
            )
        )
    return options


def option_words(options: Any, *names: str) -> tuple[str, ...]:
    """The words of a command line that give these fields of a dataclass the values that they have here.

    A field without a value (None, False, an empty tuple) has no words.
    """
    words: list[str] = []
    for option in options_of(type(options)):
        value = getattr(options, option.name)
        if option.name not in names or value is None or value is False:
            continue
        flag = str(option.info.default)  # typer's name for the first word of a declaration
        if value is True:
            words.append(flag)
        else:
            for item in value if isinstance(value, tuple) else (value,):
                words += [flag, str(item)]
    return tuple(words)
