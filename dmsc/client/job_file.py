"""Reads a job file (YAML or JSON), applies `--set` overrides and checks the result before anything is sent.

Each problem is reported on one line with its place: `job.yaml:12: training.steps: …`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    from schemas.data_set.build_file import DataBuildSpec
    from schemas.job import JobSpec

M = TypeVar("M", bound="BaseModel")


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads `3e-4` as a number; PyYAML reads it as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d[\d_]*)?(\.\d*)?([eE][-+]?\d+)$|^[-+]?(\d[\d_]*\.\d*|\.\d+)$|^[-+]?\.(inf|nan)$",
        re.IGNORECASE,
    ),
    list("-+0123456789."),
)

_path = re.compile(r"([\w.\-\[\]]+): ")
"""The begin of a line of `explain`: `training.optimizer.lr: …`, `parallel.replicas[1]: …`."""


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read and check a job file.

    Args:
        path: The file. JSON works as well, because it is YAML.
        overrides: Items `key.path=value`, applied in this order; values are read as YAML.

    Raises:
        BadJob: The file is wrong; the text has one line per problem, each with file and line.
    """
    from schemas.job import JobSpec

    spec = load_document(path, JobSpec, "a job is a mapping of keys (name:, model:, training: …)", overrides)
    return beside(spec, path.parent)


def load_build(path: Path, overrides: Sequence[str] = ()) -> DataBuildSpec:
    """Read and check the file of a build of a data set; see `load_job`.

    Raises:
        BadJob: The file is wrong.
    """
    from schemas.data_set.build_file import DataBuildSpec
    from schemas.job_file.code import CodeSpec

    what = "a build is a mapping of keys (name:, source:, steps: …)"
    spec = load_document(path, DataBuildSpec, what, overrides)
    if spec.code is None or spec.code.folder is None:
        return spec
    folder = (path.parent / Path(spec.code.folder).expanduser()).absolute()
    before = spec.code.model_dump(include={"include", "exclude", "requirements"})
    return spec.model_copy(update={"code": CodeSpec(folder=str(folder), **before)})


def beside(spec: JobSpec, folder: Path) -> JobSpec:
    """The job of a file in this folder, from which its own folder of code is looked for."""
    if spec.code is None or spec.code.folder is None:
        return spec
    return with_code(spec, folder / Path(spec.code.folder).expanduser())


def with_code(spec: JobSpec, folder: Path) -> JobSpec:
    """The job with the code of this folder; what its file says of patterns and requirements stays.

    A folder in a job file is relative to that file, one of the command line to the working directory.
    """
    from schemas.job_file.code import CodeSpec

    before = {} if spec.code is None else spec.code.model_dump(include={"include", "exclude", "requirements"})
    return spec.model_copy(update={"code": CodeSpec(folder=str(folder.absolute()), **before)})


def named_urls(spec: JobSpec) -> tuple[str, ...]:
    """The files and stores that a job names. A mesh made for this one job permits them (`--allow-url`)."""
    from schemas.job_file.data_set_use import SCHEME as DATA_SET
    from schemas.models.reference import SCHEME as MODEL
    from schemas.urls import BUS, SECRET, STDLIB, fixed_part, local_path

    named = (*spec.data.urls().values(), spec.weights_url, spec.resume_from, spec.artifacts)
    urls = [url for url in named if url and not url.startswith((BUS, SECRET, STDLIB, DATA_SET, MODEL))]
    return tuple(url if (path := local_path(url)) is None else fixed_part(path) for url in urls)


def load_document(path: Path, model: type[M], what: str, overrides: Sequence[str] = ()) -> M:
    """Read and check any YAML file that a person writes; `what` describes what it should contain.

    Raises:
        BadJob: The file is wrong; the text has one line per problem, each with file and line.
    """
    from pydantic import ValidationError

    from schemas.errors import BadJob

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadJob(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadJob(f"{path}: not UTF-8 text (byte {error.start})") from error
    root = _compose(path, text)
    _refuse_duplicates(path, root)
    loader = _Loader("")
    try:
        body = loader.construct_document(root)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: for example a number of 5,000 digits, May 40
        raise BadJob(f"{path}: {_one_line(error)}") from error
    finally:
        loader.dispose()
    if not isinstance(body, dict):
        raise BadJob(f"{path}:1: {what}, not {type(body).__name__}")
    places: dict[tuple[str, ...], str] = {}
    for override in overrides:
        keys = apply_override(body, override)
        places[keys] = f"--set {override}"
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise BadJob("\n".join(_problems(error, model, path, root, places))) from error


def _compose(path: Path, text: str) -> yaml.Node:
    from schemas.errors import BadJob

    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadJob(f"{path}:{line}: not YAML: {error.problem or _one_line(error)}") from error
    except yaml.YAMLError as error:
        raise BadJob(f"{path}: not YAML: {_one_line(error)}") from error
    if node is None:
        raise BadJob(f"{path}: the file is empty")
    return node


def _refuse_duplicates(path: Path, node: yaml.Node) -> None:
    """Raise `BadJob` for a key that occurs twice: YAML silently keeps the last, but it is a mistake."""
    from schemas.errors import BadJob

    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(path, item)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if isinstance(key.value, str) and key.value in lines:
            raise BadJob(
                f"{path}:{line}: {key.value}: already given on line {lines[key.value]}; keep one of them"
            )
        if isinstance(key.value, str):
            lines[key.value] = line
        _refuse_duplicates(path, value)


def apply_override(body: dict[str, Any], override: str) -> tuple[str, ...]:
    """Apply one override `key.path=value` to `body`; return the path of keys."""
    from schemas.errors import BadJob

    name, equals, value = override.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise BadJob(f"--set {override}: write it as key.path=value, for example --set training.steps=20")
    try:
        parsed = yaml.load(value, Loader=_Loader)
    except yaml.YAMLError as error:
        raise BadJob(f"--set {override}: the value is not YAML: {_one_line(error)}") from error
    if isinstance(parsed, dict) and not value.lstrip().startswith("{"):
        parsed = value.strip()  # a value such as `stdlib:` is text, although YAML reads a mapping
    target = body
    for key in keys[:-1]:
        below = target.setdefault(key, {})
        if not isinstance(below, dict):
            raise BadJob(f"--set {override}: {key} is a value ({below!r}), it has no keys below it")
        target = below
    target[keys[-1]] = parsed
    return keys


def _problems(
    error: ValidationError,
    model: type[BaseModel],
    path: Path,
    root: yaml.Node,
    places: dict[tuple[str, ...], str],
) -> list[str]:
    from schemas.explain import explain

    problems = []
    for line in explain(error, model):
        named = _path.match(line)
        keys = tuple(re.findall(r"[^.\[\]]+", named.group(1))) if named else ()
        place = next((text for prefix, text in places.items() if keys[: len(prefix)] == prefix), None)
        problems.append(f"{place or f'{path}:{_line_of(root, keys)}'}: {line}")
    return problems


def _line_of(root: yaml.Node, keys: tuple[str, ...]) -> int:
    """The line of the deepest node on the path of keys that exists in the file."""
    node, line = root, root.start_mark.line + 1
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            pair = next(((k, v) for k, v in node.value if k.value == key), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and key.isdigit() and int(key) < len(node.value):
            node = node.value[int(key)]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
