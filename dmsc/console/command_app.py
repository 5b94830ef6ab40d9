"""A typer application whose commands may take dataclasses: each field of one is an option of the command.

A setting is then spelled once: the field has the type, the default and the help. The command gets the
dataclass and hands it on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import GenericAlias, NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup
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


class ListsByDefault(TyperGroup):
    """Commands of which `list` is meant where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def option(
    usage: str,
    help: str | None = None,
    *,
    min: float | None = None,
    max: float | None = None,
    show_default: bool = True,
    hidden: bool = False,
) -> Any:
    """An option of a command, for `Annotated`.

    `usage` has its names, what stands for its value, and the environment variable that is taken without it:
    `--output -o FILE $OUTPUT`.
    """
    words = usage.split()
    names = [word for word in words if word.startswith("-")]
    variable = next((word[1:] for word in words if word.startswith("$")), None)
    metavar = next((word for word in words if not word.startswith(("-", "$"))), None)
    return typer.Option(
        *names,
        metavar=metavar,
        help=help,
        envvar=variable,
        min=min,
        max=max,
        show_default=show_default,
        hidden=hidden,
    )


def argument(
    metavar: str | None,
    help: str | None = None,
    *,
    min: float | None = None,
    max: float | None = None,
    show_default: bool = False,
) -> Any:
    """An argument of a command, for `Annotated`."""
    return typer.Argument(metavar=metavar, help=help, min=min, max=max, show_default=show_default)


@dataclass(frozen=True, slots=True)
class FieldOption:
    """An option of the command line that a field of a dataclass stands for."""

    name: str
    info: ParameterInfo
    parameter: inspect.Parameter


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command as typer takes it: with one parameter for each option.

    A parameter that is a dataclass becomes the parameters of its options. A tuple is an option that may be
    repeated. An option that is not typed gives the default of the parameter or of the field.
    """
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(kind := parameter.annotation) and isinstance(kind, type):
            groups[parameter.name] = kind
            parameters += [option.parameter for option in options_of(kind)]
        else:
            parameters.append(_parameter(parameter.name, parameter.annotation, parameter.default))

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        typed = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if value is not None and value != []
        }
        for name, kind in groups.items():
            own = [option.name for option in options_of(kind) if option.name in typed]
            typed[name] = kind(**{key: typed.pop(key) for key in own})
        return command(**typed)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def options_of(kind: type[Any]) -> list[FieldOption]:
    """The options that a dataclass's fields stand for, in order.

    A field is an option if `typer.Option` or `typer.Argument` annotates it.
    """
    hints = get_type_hints(kind, include_extras=True)
    options = []
    for field in fields(kind):
        info = next((item for item in get_args(hints[field.name]) if isinstance(item, ParameterInfo)), None)
        if info is not None:
            default: Any = inspect.Parameter.empty if field.default is MISSING else field.default
            default = default if field.default_factory is MISSING else None
            options.append(FieldOption(field.name, info, _parameter(field.name, hints[field.name], default)))
    return options


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """The parameter as typer takes it: a list for a tuple, and None where the default is made later."""
    value_type, *metadata = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if get_origin(value_type) is tuple:
        value_type = GenericAlias(list, get_args(value_type)[:1])
        default = default if default is inspect.Parameter.empty else None
    if default is None and NoneType not in get_args(value_type):
        value_type = value_type | None
    shown: Any = Annotated[(value_type, *metadata)] if metadata else value_type
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=shown)


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
