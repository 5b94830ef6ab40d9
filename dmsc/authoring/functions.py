"""Functions and classes of a notebook or script as the files of a job's `code`.

What lies in a module of its own travels as that module's file. What was defined in `__main__` is written down
as source, together with the names that it uses there, if it is self-contained: functions, classes, modules,
literals. Else it is pickled by cloudpickle (extra `notebook`); then the nodes need the same Python, and a
torch of the same release. Either way it is code, and falls under the rights of code.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import inspect
import linecache
import pickletools
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

from schemas.callables import LOSSES, OWN_PACKAGES
from schemas.errors import BadInput, BadJob
from schemas.job_file.code import imported_modules, is_installed

MODULE = "from_notebook"
"""The module of a job's code that has what was defined in `__main__`."""

Way = Literal["auto", "source", "pickle"]

_LITERAL_CHARACTERS = 100_000
_PICKLED = f'''"""Functions of a notebook, pickled there by cloudpickle."""

import functools
import pickle
import sys
from pathlib import Path

for _name, _found in pickle.loads(Path(__file__).with_name("{MODULE}.pickle").read_bytes()).items():
    _target = _found.func if isinstance(_found, functools.partial) else _found
    if getattr(sys.modules.get(_target.__module__), _target.__qualname__, None) is not _target:
        _target.__module__ = __name__  # it came by value: it is this module's now
    globals()[_name] = _found
'''


class NotSelfContained(Exception):
    """Something can't be written down as source; the text says why."""


@dataclass(slots=True)
class NotebookCode:
    """Files by name, what they need, and `module:callable` of each object by its role."""

    names: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    requirements: tuple[str, ...] = ()
    python: str = ""


def as_files(objects: Mapping[str, Any], way: Way = "auto") -> NotebookCode:
    """The files of a job's code that define these objects.

    Args:
        objects: role (`model`, `loss`, `data`) to a function, a class, or a `module:callable`. For `data`
            also a data set itself, which is pickled.
        way: `source` or `pickle` for what was defined in `__main__`; `auto`: source where that is possible.

    Raises:
        BadJob: an object can't travel that way; one line.
    """
    code = NotebookCode()
    local: dict[str, ModuleType] = {}
    here: dict[str, Any] = {}
    for role, value in objects.items():
        if isinstance(value, str):
            code.names[role] = value
        elif (name := _name_elsewhere(value, local)) is not None:
            code.names[role] = name
        else:
            here[role] = _callable(role, value)
    if here:
        _write_here(code, here, local, way)
    for module in local.values():
        code.files |= _files_of(module)
    return code


def _callable(role: str, value: Any) -> Any:
    if inspect.isfunction(value) or inspect.isclass(value) or isinstance(value, functools.partial):
        return value
    if role == "data" and hasattr(value, "__getitem__"):
        return lambda: value
    if role == "model" and hasattr(value, "state_dict"):
        raise BadJob("model: give a function or class that makes the model, not a model that is made already")
    raise BadJob(
        f"{role}: a {type(value).__name__} can't be called; give a function, a class or module:callable"
    )


def _name_elsewhere(value: Any, local: dict[str, ModuleType]) -> str | None:
    """`module:callable` of what a module on disk defines; None for what `__main__` does."""
    module_name, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    for known in LOSSES:  # torch defines `nn.MSELoss` in `nn.modules.loss`
        place, _, loss = known.partition(":")
        if loss == name and str(module_name).startswith("torch.nn"):
            return f"{place}:{loss}"
    module = sys.modules.get(str(module_name))
    if module is None or _is_main(module) or "." in name or getattr(module, name, None) is not value:
        return None
    _note_local(module, local)
    return f"{module_name}:{name}"


def _write_here(code: NotebookCode, here: dict[str, Any], local: dict[str, ModuleType], way: Way) -> None:
    if way != "pickle":
        try:
            source = SourceText()
            for role, value in here.items():
                code.names[role] = f"{MODULE}:{source.define(value)}"
        except NotSelfContained as error:
            if way == "source":
                raise BadJob(
                    f"{error}, so it can't be written down as source; by='pickle' sends it"
                ) from None
            why = str(error)
        else:
            code.files[f"{MODULE}.py"] = source.text().encode()
            local.update(source.local)
            return
    else:
        why = "by='pickle'"
    data = _pickle(here, why)
    for name in _named_modules(data):
        _note_local(sys.modules[name], local)
    code.files |= {f"{MODULE}.py": _PICKLED.encode(), f"{MODULE}.pickle": data}
    code.names |= {role: f"{MODULE}:{role}" for role in here}
    code.python = f"{sys.version_info.major}.{sys.version_info.minor}"
    code.requirements = ("cloudpickle", *_same_torch())


def _pickle(objects: dict[str, Any], why: str) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise BadInput(
            f"{why}, so it would have to be pickled: pip install 'dmsc[notebook]', or put it into a module "
            "and name its folder as code"
        ) from None
    try:
        return bytes(cloudpickle.dumps(objects))
    except Exception as error:  # any object's own __reduce__ may raise anything
        text = " ".join(str(error).split())
        raise BadJob(f"{', '.join(objects)}: can't be pickled: {type(error).__name__}: {text}") from None


def _same_torch() -> tuple[str, ...]:
    try:
        release = importlib.metadata.version("torch").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return ()
    return (f"torch=={'.'.join(release)}.*",)


def _named_modules(data: bytes) -> Iterator[str]:
    """The loaded modules that a pickle refers to by name."""
    for _, argument, _ in pickletools.genops(data):
        if isinstance(argument, str):
            for name in argument.split(" ")[:1]:
                if name in sys.modules:
                    yield name


class SourceText:
    """A module's text, made of definitions of `__main__` and what they use. Each is written once."""

    def __init__(self) -> None:
        self.local: dict[str, ModuleType] = {}
        self._imports: dict[str, None] = {}
        self._definitions: dict[str, None] = {}
        self._names: dict[str, Any] = {}

    def define(self, value: Any) -> str:
        """Writes down a function or class; returns its name in the module.

        Raises:
            NotSelfContained: it, or something that it uses, is not self-contained.
        """
        name = getattr(value, "__name__", "")
        if isinstance(value, functools.partial) or not name.isidentifier():
            raise NotSelfContained(f"{name or type(value).__name__} has no name of its own")
        if self._is_new(name, value):
            text = _source(value)
            scope = _scope(value)
            for used in sorted(_free_names(text)):
                if used in scope and used != name:
                    self._use(used, scope[used])
            self._definitions[text] = None
        return str(name)

    def text(self) -> str:
        parts = ["\n".join(self._imports), *self._definitions]
        return "\n\n\n".join(filter(None, parts)) + "\n"

    def _is_new(self, name: str, value: Any) -> bool:
        """Whether a name is to be written down now; not for one that is, or is being, written."""
        if name in self._names and self._names[name] is not value:
            raise NotSelfContained(f"two different things are called {name}")
        is_new = name not in self._names
        self._names[name] = value
        return is_new

    def _use(self, name: str, value: Any) -> None:
        """Makes `name` mean `value` in the module."""
        if isinstance(value, ModuleType):
            _note_local(value, self.local)
            self._imports[f"import {value.__name__} as {name}"] = None
        elif inspect.isfunction(value) or inspect.isclass(value):
            self._use_defined(name, value)
        elif _is_literal(value):
            if self._is_new(name, value):
                self._definitions[f"{name} = {value!r}"] = None
        else:
            raise NotSelfContained(f"it uses {name}, a {type(value).__name__}")

    def _use_defined(self, name: str, value: Any) -> None:
        module, place = sys.modules.get(value.__module__), str(value.__qualname__)
        if module is None or _is_main(module):
            own = self.define(value)
            if own != name:
                self._definitions[f"{name} = {own}"] = None
            return
        if getattr(module, place, None) is not value:
            raise NotSelfContained(f"it uses {name}, which {value.__module__} does not show")
        _note_local(module, self.local)
        self._imports[f"from {value.__module__} import {place} as {name}"] = None


def _source(value: Any) -> str:
    if isinstance(value, FunctionType) and value.__closure__:
        raise NotSelfContained(f"{value.__name__} uses variables of the function around it")
    if "." in value.__qualname__:
        raise NotSelfContained(f"{value.__name__} is defined inside of something else")
    try:
        text = textwrap.dedent(_class_in_cell(value) or inspect.getsource(value)).rstrip()
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        raise NotSelfContained(f"{value.__name__} has no source here") from None
    if len(tree.body) != 1 or getattr(tree.body[0], "name", "") != value.__name__:
        raise NotSelfContained(f"{value.__name__} has no source of its own")
    return text


def _class_in_cell(value: Any) -> str:
    """The source of a class of a notebook, whose module is no file; empty: it has one, or it is not clear.

    A class's functions know in which cell it stands; one without is looked for in all cells.
    """
    if not inspect.isclass(value) or hasattr(sys.modules[value.__module__], "__file__"):
        return ""
    codes = (getattr(getattr(each, "__func__", each), "__code__", None) for each in vars(value).values())
    own = (linecache.getlines(code.co_filename) for code in codes if code is not None)
    cells = list(filter(None, own)) or [
        entry[2] for entry in linecache.cache.values() if len(entry) == 4 and entry[1] is None
    ]
    found = {text for lines in cells for text in _classes(lines, value.__name__)}
    return found.pop() if len(found) == 1 else ""


def _classes(lines: list[str], name: str) -> Iterator[str]:
    """The definitions of a class in a cell."""
    try:
        body = ast.parse("".join(lines)).body
    except SyntaxError:
        return
    for found in body:
        if isinstance(found, ast.ClassDef) and found.name == name:
            first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
            yield "".join(lines[first - 1 : found.end_lineno])


def _scope(value: Any) -> dict[str, Any]:
    if isinstance(value, FunctionType):
        return value.__globals__
    return vars(sys.modules[value.__module__])


def _free_names(text: str) -> set[str]:
    """The global names that a definition uses."""
    found: set[str] = set()
    pending = [symtable.symtable(text, "<definition>", "exec")]
    top = pending[0]
    while pending:
        table = pending.pop()
        pending.extend(table.get_children())
        found.update(
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (symbol.is_global() or table is top)
        )
    return found


def _is_literal(value: Any) -> bool:
    text = repr(value)
    if len(text) > _LITERAL_CHARACTERS:
        return False
    try:
        read = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return type(read) is type(value) and bool(read == value)


# --- modules on disk ----------------------------------------------------------------------------------------
def _is_main(module: ModuleType) -> bool:
    return module.__name__ == "__main__"


def _note_local(module: ModuleType, local: dict[str, ModuleType]) -> None:
    """Notes the whole package of a module that is a user's file, and those that its files import."""
    top = module.__name__.partition(".")[0]
    if top in local or top in OWN_PACKAGES or top in sys.stdlib_module_names or top == "__main__":
        return
    package = sys.modules.get(top, module)
    if not any(not is_installed(path) for path in _places(package)):
        return
    local[top] = package
    for content in _files_of(package).values():
        for name in imported_modules(content):
            if name in sys.modules:
                _note_local(sys.modules[name], local)


def _places(module: ModuleType) -> list[Path]:
    if module.__dict__.get("__path__") is not None:
        return [Path(folder) for folder in module.__path__]
    file = getattr(module, "__file__", None)
    return [] if file is None else [Path(file)]


def _files_of(module: ModuleType) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for place in _places(module):
        if place.is_dir():
            for path in sorted(place.rglob("*.py")):
                files[f"{module.__name__}/{path.relative_to(place).as_posix()}"] = path.read_bytes()
        elif place.suffix == ".py":
            files[place.name] = place.read_bytes()
    return files
