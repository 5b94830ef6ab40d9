"""Explains errors in a user's document, one line each: the path of the key, the problem and the remedy.

    training.stepz: unknown key; did you mean training.steps?
    parallel.replicas: 'two' does not fit; give a whole number or a list of whole numbers

The gateway answers with these lines, and the command line prints them.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from schemas.base import DATA_SET_NAME_PATTERN, SAMPLE_NAME_PATTERN, TOKEN_PATTERN

_SHOWN = 60
_LONGEST_KEY = 200
_MOST_LINES = 100
"""Wrong places that are told one by one: each costs time, and documents of strangers may have a million."""
_MOST_PLACES = 10_000
"""Wrong places that are looked at: details of each take half a kilobyte."""
_USUAL = 1e5
_OR_NULL = " or null"
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
_PATTERNS = {
    TOKEN_PATTERN: "1 to 120 letters, digits, _ or -",
    DATA_SET_NAME_PATTERN: "1 to 64 letters, digits, _ or -, a letter or digit first",
    SAMPLE_NAME_PATTERN: "1 to 120 letters, digits or _, no digit first",
}
_FACTORY = "module:callable, for example my_models.gpt:build"


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per wrong place in a document that should be a `model`, in the order of the errors.

    Where there are very many, the last line says how many more.
    """
    if (count := error.error_count()) > _MOST_PLACES:
        return [f"the document: {count:,} of its keys and values do not fit, too many to name them"]
    grouped: dict[str, tuple[list[ErrorDetails], FieldInfo | None, type[BaseModel]]] = {}
    errors = error.errors(include_url=False)
    places = [details["loc"] for details in errors]
    for details in errors[:_MOST_LINES]:
        own = details["loc"]
        if details["type"] == "too_short" and any(loc[: len(own)] == own != loc for loc in places):
            continue  # caused by invalid items, which have lines of their own
        if details["type"] == "default_factory_not_called":
            continue  # it follows another value, which has a line of its own
        path, field, owner = _locate(details["loc"], model)
        grouped.setdefault(path, ([], field, owner))[0].append(details)
    lines = [_line(path, found, field, owner, model) for path, (found, field, owner) in grouped.items()]
    if count > _MOST_LINES:
        lines.append(f"the document: {count - _MOST_LINES:,} more of its keys and values do not fit")
    return lines


def _line(
    path: str,
    found: list[ErrorDetails],
    field: FieldInfo | None,
    owner: type[BaseModel],
    root: type[BaseModel],
) -> str:
    first = found[0]
    kind = first["type"]
    if first["loc"][-1:] == ("[key]",):
        return f"{path.removesuffix('.[key]')}: it is no name; give {_pattern_words(first)}"
    if kind == "extra_forbidden":
        return f"{path}: unknown key{_suggest(path, owner, root)}"
    if kind == "missing":
        return f"{path}: missing; give {_expected(field)}"
    if kind in ("value_error", "assertion_error"):
        text = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return f"{path}: {text}" if path else text
    if kind == "json_invalid":
        return f"not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    shown = _show(first["input"])
    if kind == "literal_error":
        allowed = [str(value) for value in _literals(field)]
        near = difflib.get_close_matches(str(first["input"])[:_SHOWN], allowed, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        return f"{path}: {shown} is not one of {', '.join(allowed) or first['ctx']['expected']}{meant}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        inside = f"a mapping with {', '.join(owner.model_fields)}" if field is None else _expected(field)
        return f"{path or 'the document'}: {shown} does not fit; give {inside}"
    if kind == "string_too_long":
        most = first["ctx"]["max_length"]
        return f"{path}: {shown} has {len(first['input']):,} characters, and {most:,} are the most"
    return (
        f"{path}: {shown} does not fit; give {_expected(field, first['input'], element=path.endswith(']'))}"
    )


def _locate(
    loc: tuple[int | str, ...], model: type[BaseModel]
) -> tuple[str, FieldInfo | None, type[BaseModel]]:
    """The dotted path without pydantic's union tags, the field there, and the model that it belongs to."""
    path = ""
    owner, field = model, None
    inside: type[BaseModel] | None = model
    named = False  # whether the next part is the name of an entry of a mapping
    tagged = False  # whether it is known which alternative of a union this is about
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        if len(part) > _LONGEST_KEY:
            part = part[: _SHOWN - 1] + "…"
        if named:
            path, named = f"{path}.{part}", False
        elif inside is not None and part == inside.__name__:
            tagged = True  # the tag of a union: the rest is about this alternative
        elif inside is not None and (tagged or not _is_tag(part, inside, field)):
            tagged = False
            owner, field = inside, inside.model_fields.get(part)
            path += f".{part}" if path else part
            inside = _submodel(field.annotation) if field is not None else None
            named = inside is not None and field is not None and _is_mapping(field.annotation)
        elif field is not None and _is_mapping(field.annotation):
            path += f".{part}"
            field = FieldInfo.from_annotation((get_args(field.annotation) or (Any,))[-1])
        else:
            break  # the tag of a union: the rest is about the alternative that was tried
    return path, field, owner


def _is_tag(part: str, inside: type[BaseModel], field: FieldInfo | None) -> bool:
    """Whether pydantic names the alternative of a union here that it has tried, and no key."""
    if field is None or part in inside.model_fields:
        return False
    alternatives = [each for each in get_args(field.annotation) if each is not type(None)]
    return get_origin(field.annotation) in (Union, types.UnionType) and len(alternatives) > 1


def _suggest(path: str, owner: type[BaseModel], root: type[BaseModel]) -> str:
    *parents, key = path.split(".")
    prefix = ".".join(parents)
    near = difflib.get_close_matches(key, list(owner.model_fields), 1, cutoff=0.6)
    if near:
        return f"; did you mean {prefix + '.' if prefix else ''}{near[0]}?"
    everywhere = dict(_paths(root))
    for cutoff in (1.0, 0.8):
        elsewhere = difflib.get_close_matches(key, list(everywhere), 1, cutoff=cutoff)
        if elsewhere:
            return f"; did you mean {everywhere[elsewhere[0]]}?"
    return f"; {prefix or 'the document'} has {', '.join(owner.model_fields)}"


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, dotted path) of every key in the tree, deepest first, so that a dict keeps the shallowest."""
    for name, field in model.model_fields.items():
        inside = _submodel(field.annotation)
        if inside is not None:
            yield from _paths(inside, f"{prefix}{name}.")
    for name in model.model_fields:
        yield name, prefix + name


def _submodel(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _submodel(inner)
        if found is not None:
            return found
    return None


def _is_mapping(annotation: Any) -> bool:
    origin = get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _pattern_words(error: ErrorDetails) -> str:
    pattern = error.get("ctx", {}).get("pattern")
    return _PATTERNS.get(str(pattern), "a fitting one")


def _literals(field: FieldInfo | None) -> tuple[Any, ...]:
    if field is None:
        return ()
    return tuple(_literals_of(field.annotation))


def _literals_of(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Union, types.UnionType):
        for inner in get_args(annotation):
            yield from _literals_of(inner)


def _expected(field: FieldInfo | None, value: Any = None, *, element: bool = False) -> str:
    """The valid values in words: type, bounds, pattern. With `element`, those of one item of the list."""
    if field is None:
        return "a fitting value"
    if element:
        return _type_words(_element(field.annotation), value)
    for note in field.metadata:
        pattern = getattr(note, "pattern", None)
        if pattern in _PATTERNS:
            return _PATTERNS[pattern]
        if pattern is not None and ":" in pattern:
            return _FACTORY
    words, null, _ = _type_words(field.annotation, value).partition(_OR_NULL)
    return words + _bounds(field.metadata, value) + null


def _type_words(annotation: Any, value: Any = None) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_words(inner, value) for inner in args)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in args)
    if origin is typing.Annotated:
        for note in args[1:]:
            if getattr(note, "pattern", None) in _PATTERNS:
                return _PATTERNS[note.pattern]
        notes = [note for part in args[1:] for note in getattr(part, "metadata", [part])]
        return _type_words(args[0], value) + _bounds(notes, value)
    if origin in (tuple, list):
        plural = _plural(_type_words(args[0], value).removeprefix("a ")) if args else "values"
        if args and args[-1] is not Ellipsis and origin is tuple:
            return f"a list of {len(args)} {plural}"
        return f"a list of {plural}" if not plural[:1].isdigit() else f"a list of names ({plural})"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with {', '.join(annotation.model_fields)}"
    if _is_mapping(annotation):
        return "a mapping"
    return _NAMES.get(annotation, getattr(annotation, "__name__", "a fitting value"))


def _element(annotation: Any) -> Any:
    """The type of the items of a list in `annotation`; the annotation itself if there is no list."""
    for inner in (annotation, *get_args(annotation)):
        if get_origin(inner) in (tuple, list):
            return next(iter(get_args(inner)), inner)
    return next(iter(get_args(annotation)), annotation)


def _plural(words: str) -> str:
    """The plural of a type's words, with its bounds after it if it has some."""
    cut = re.search(r" [≥>≤<]", words)
    return f"{words}s" if cut is None else f"{words[: cut.start()]}s{words[cut.start() :]}"


def _bounds(metadata: list[Any], value: Any) -> str:
    """The bounds of a number; a very large upper bound is shown only for a value above it."""
    words = []
    for note in metadata:
        match note:
            case Ge(ge=least):
                words.append(f"≥ {least:g}")
            case Gt(gt=least):
                words.append(f"> {least:g}")
            case Le(le=most):
                words += _upper("≤", most, value)
            case Lt(lt=most):
                words += _upper("<", most, value)
    return " " + " and ".join(words) if words else ""


def _upper(sign: str, most: Any, value: Any) -> list[str]:
    if most < _USUAL:
        return [f"{sign} {most:g}"]
    return [f"{sign} {most:,}"] if isinstance(value, int | float) and value >= most else []


def _show(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of some {value.bit_length() * 3 // 10} digits"
    try:
        text = repr(value)
    except ValueError:  # the interpreter refuses to print very long numbers, also in lists
        return f"a {type(value).__name__} with a number of thousands of digits"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
