"""User code by module path: loading it, and the digest by which nodes notice that their code differs.

It lies in folders of the node, or, if it travels with its job, in one folder that only this job's processes
see (ADR-0051).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from bus.wire.secret_urls import hidden
from schemas.callables import OWN_PACKAGES, misnamed
from schemas.errors import BadModel
from schemas.job_file.code import imported_modules, is_installed
from workers.sandbox.confinement import CODE_PATH

_OWN = OWN_PACKAGES
_ROOT = Path(__file__).parents[1]
_only: list[Path] = []
"""The one folder of this process's user code; empty: those of the node."""


def use_only(folder: str) -> tuple[str, ...]:
    """Makes `folder` the only place of user code in this process, before any was imported.

    The node's own folders leave `sys.path`, so that nothing is imported from them by mistake.

    Returns:
        The node's folders.
    """
    former = folders()
    os.environ[CODE_PATH] = folder
    _only[:] = [Path(os.path.realpath(folder))]
    kept = [
        path for path in sys.path if path and ((real := Path(path).resolve()) == _ROOT or real not in former)
    ]
    sys.path[:] = [str(_only[0]), *kept]
    importlib.invalidate_caches()
    return tuple(map(str, former))


def load(factory: str, ours: frozenset[str] = frozenset()) -> Callable[..., Any]:
    """The callable that `module:name` names: defined in one of `folders()`, or one of `ours`.

    Raises:
        BadModel: It is defined elsewhere, there is no such module, the import fails, the module has no such
            name, or the name is not callable.
    """
    module_name, _, name = factory.partition(":")
    if reason := misnamed(factory, ours):
        raise BadModel(reason)
    _extend_path()
    if factory not in ours:
        _check_place(factory, _find(module_name.partition(".")[0]))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise BadModel(f"{factory}: there is no module {error.name!r} {_where_to_put_it()}") from None
        raise BadModel(f"{factory}: importing {module_name} failed: {describe(error)}") from error
    except Exception as error:  # user code may raise anything
        raise BadModel(f"{factory}: importing {module_name} failed: {describe(error)}") from error
    target = getattr(module, name, None)
    if target is None:
        raise BadModel(f"{factory}: module {module_name} ({module.__file__}) has no {name!r}")
    if not callable(target):
        raise BadModel(f"{factory}: {name} is a {type(target).__name__}, not a function or class")
    if factory not in ours:
        _check_definition(factory, target)
    return target  # type: ignore[no-any-return]  # callable() narrows Any to an unknown callable


def folders() -> list[Path]:
    """The folders of users' code: the working directory, and those of `--code` and `$DMSC_CODE_PATH`.

    A job whose code travels with it has its own folder instead, and no other.
    """
    if _only:
        return list(_only)
    paths = [os.getcwd(), *filter(None, os.environ.get(CODE_PATH, "").split(os.pathsep))]
    return [Path(os.path.realpath(path)) for path in dict.fromkeys(paths)]


def _where_to_put_it() -> str:
    if _only:
        return "in the code that came with the job; look at code.folder, code.include and code.exclude"
    return (
        f"here; put it into the working directory or its folder on ${CODE_PATH}, "
        "or send it along with the job (`code: FOLDER`, `--code`)"
    )


def _check_place(factory: str, spec: ModuleSpec | None) -> None:
    """Refuses a module outside of `folders()` before the import, which would run it."""
    if spec is None:
        return
    places = (
        [spec.origin] if spec.origin and spec.has_location else [*(spec.submodule_search_locations or ())]
    )
    for place in places:
        if not _is_code(Path(place)):
            raise BadModel(
                f"{factory}: {spec.name} lies in {Path(place).parent}, which is no folder of users' code; "
                "name it with --code where the node is started, or put your own module there"
            )


def _check_definition(factory: str, target: Any) -> None:
    """Refuses a callable that the user's module has imported from elsewhere."""
    function = target.func if isinstance(target, functools.partial) else target
    module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
    file = getattr(module, "__file__", None)
    if file is None or not _is_code(Path(file)):
        where = "Python itself" if module is None else module.__name__
        raise BadModel(f"{factory}: it is imported there, from {where}; name a function or class of your own")


def _is_code(path: Path) -> bool:
    real = path.resolve()
    parents = [folder for folder in folders() if real.is_relative_to(folder)]
    return bool(parents) and (not is_installed(real) or any(is_installed(folder) for folder in parents))


def describe(error: BaseException) -> str:
    """An error in one line: type, first line of the text, and the last place in user code.

    Secrets that the code was given are replaced by their names.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = hidden(str(error)).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if frame.filename[0] != "<" and not is_installed(path) and not _ours(path):
            return f"{text} ({Path(frame.filename).name}:{frame.lineno})"
    return text


def code_digest(*factories: str) -> str:
    """SHA-256 over the source files of these `module:name` factories.

    These are all `.py` files of the factory's top-level package (or its one module file), and recursively
    those of every user module that they import. Installed packages, the standard library, and DMSC's own
    modules other than the factory's file are left out: their versions are checked elsewhere. File names are
    relative to the package's folder, so that the digest does not depend on the folder's place.

    Of code that travels with its job all files count: it may read others than modules.

    Raises:
        BadModel: A module that a factory names does not exist.
    """
    _extend_path()
    files: dict[str, Path] = {}
    for folder in _only:
        files |= {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    pending = [factory.partition(":")[0] for factory in factories]
    seen: set[str] = set()
    while pending:
        module = pending.pop()
        top = module.partition(".")[0]
        spec = _find(module if top in _OWN else top)
        origin = Path(spec.origin) if spec and spec.origin and os.path.isfile(spec.origin) else None
        if spec is None:
            raise BadModel(f"there is no module {module!r} {_where_to_put_it()}")
        if top in _OWN or (origin is not None and is_installed(origin)):
            own_spec = _find(module)
            if own_spec is not None and own_spec.origin and os.path.isfile(own_spec.origin):
                files[module] = Path(own_spec.origin)
            continue
        if top in seen:
            continue
        seen.add(top)
        for label, path in _sources(top, spec):
            files[label] = path
            pending.extend(name for name in imported_modules(path.read_bytes()) if _is_users(name))
    digest = hashlib.sha256()
    for label in sorted(files):
        digest.update(f"{label} {hashlib.sha256(files[label].read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _extend_path() -> None:
    paths = [] if _only else [os.getcwd()]
    paths += filter(None, os.environ.get(CODE_PATH, "").split(os.pathsep))
    for folder in reversed([os.path.abspath(path) for path in paths]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
            importlib.invalidate_caches()


def _find(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None


def _sources(top: str, spec: ModuleSpec) -> Iterator[tuple[str, Path]]:
    """(label, file) of a package's or a plain module's sources."""
    if spec.submodule_search_locations is None:
        if spec.origin is not None:
            yield Path(spec.origin).name, Path(spec.origin)
        return
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).rglob("*.py")):
            yield f"{top}/{path.relative_to(folder).as_posix()}", path


def _is_users(name: str) -> bool:
    if name in _OWN or name in sys.stdlib_module_names:
        return False
    spec = _find(name)
    if spec is None:
        return False
    if spec.origin is not None and spec.has_location:
        return not is_installed(Path(spec.origin))
    return bool(spec.submodule_search_locations) and not any(
        is_installed(Path(folder)) for folder in spec.submodule_search_locations or ()
    )


def _ours(path: Path) -> bool:
    """Whether a file is DMSC's own, even if DMSC runs from a checkout."""
    return any(path.is_relative_to(_ROOT / package) for package in _OWN)
