"""The section `code`: modules of the user's that travel with the job (ADR-0051), and their archive's rules.

A client packs a folder into a ZIP archive, stores it once under the SHA-256 of its bytes, and submits that
digest. Whoever unpacks it holds it to the same rules again: an archive may come from any client.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from schemas.base import Part
from schemas.callables import OWN_PACKAGES
from schemas.marks import Url

CODE = "code"
"""The folder of archives in the bus's object store: `code/USER/SHA256`."""

ARCHIVE_BYTES = 64 << 20
"""Most bytes of an archive."""
UNPACKED_BYTES = 256 << 20
"""Most bytes of its files together."""
ARCHIVE_FILES = 10_000
"""Most files of an archive: half of what the sandbox looks through in a folder of code."""
MOST_RATIO = 100
"""Most bytes of a file that one byte of its compressed form may stand for; clients store denser files as they
are."""
RATIO_FREE_BYTES = 1 << 20
"""Up to this size a file may be as dense as it likes."""
_NAME_BYTES = 255
_PATH_BYTES = 1_024
_DEEPEST = 32
_MODULE_SUFFIXES = ("py", "pyc", "so", "pyd")
_SITE = frozenset({"sitecustomize", "usercustomize"})
"""Modules that an interpreter imports by itself when it starts."""

Glob = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


def _requirement(text: str) -> str:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        found = Requirement(text)
    except InvalidRequirement as error:
        problem = str(error).splitlines()[0]
        raise ValueError(
            f"{text!r} is no requirement (PEP 508): {problem}; for example einops>=0.7"
        ) from None
    if found.url is not None:
        raise ValueError(f"{text!r} names a URL, but nodes install nothing; name the package and its version")
    return text


PackageRequirement = Annotated[
    str, StringConstraints(min_length=1, max_length=300), AfterValidator(_requirement)
]
"""PEP 508: a package's name, and the versions that will do."""


class CodeSpec(Part):
    """A folder of Python modules that is uploaded with the job; its callables are named as `module:callable`.

    In a job file it may also be written `code: FOLDER`. A client replaces `folder`, `include` and `exclude`
    by `sha256` and `bytes`, and the gateway adds `url`.
    """

    folder: str | None = Field(
        None, max_length=4_096, description="on the client's machine; relative to the job file's folder"
    )
    include: tuple[Glob, ...] = Field(
        (), max_length=64, description="patterns of files that travel (*.py, data/**); default: all"
    )
    exclude: tuple[Glob, ...] = Field((), max_length=256, description="patterns of files that do not travel")
    requirements: tuple[PackageRequirement, ...] = Field(
        (),
        max_length=256,
        description="installed packages that it needs, as in PEP 508; nodes install nothing",
    )
    python: str = Field(
        "",
        pattern=r"^(3\.\d{1,2})?$",
        description="the only Python that can read it: it has pickled functions",
    )
    sha256: Digest | None = Field(None, description="of the uploaded archive")
    bytes: int = Field(0, ge=0, le=ARCHIVE_BYTES, description="of the uploaded archive")
    url: Url | None = Field(None, description="where the archive is; the gateway says so")

    @model_validator(mode="before")
    @classmethod
    def _folder_alone(cls, value: Any) -> Any:
        return {"folder": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _named(self) -> CodeSpec:
        if (self.folder is None) == (self.sha256 is None):
            raise ValueError("name a folder, for example `code: .`")
        return self


def archive_name(user: str, sha256: str) -> str:
    """The object's name of a user's archive. Users share none, so that nobody learns what others store."""
    return f"{CODE}/{user}/{sha256}"


def runs_foreign_code(document: Any) -> str:
    """The first key of a job's document that lets a library run what it downloads; empty if none does."""
    pending: list[tuple[str, Any]] = [("", document)]
    while pending:
        place, value = pending.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                path = f"{place}.{key}" if place else str(key)
                if key == "trust_remote_code" and inner:
                    return path
                pending.append((path, inner))
        elif isinstance(value, list | tuple):
            pending.extend((f"{place}[{index}]", inner) for index, inner in enumerate(value))
    return ""


def refuse_name(name: str) -> str:
    """Why a file of this name may not be in an archive; empty if it may.

    Args:
        name: a relative path, with `/`.
    """
    if not name or not name.isprintable() or "\\" in name or name.startswith("/"):
        return f"{name!r} is no relative path"
    parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        return f"{name!r} leads out of its folder, or round about"
    if any(part.startswith(".") for part in parts):
        return f"{name!r} is hidden: names that begin with a dot do not travel"
    if len(name.encode()) > _PATH_BYTES or any(len(part.encode()) > _NAME_BYTES for part in parts):
        return f"{name[:60]!r}… is too long: at most {_PATH_BYTES} bytes, {_NAME_BYTES} each part"
    if len(parts) > _DEEPEST:
        return f"{name[:60]!r}… is too deep: at most {_DEEPEST} parts"
    return _shadow(parts)


def _shadow(parts: list[str]) -> str:
    """Why a module of this name would take the place of one that everything else imports."""
    top = parts[0]
    if len(parts) > 1:
        stem, _, suffix = parts[1].partition(".")
        if len(parts) > 2 or stem != "__init__" or suffix.rpartition(".")[2] not in _MODULE_SUFFIXES:
            return ""  # a folder without `__init__` stands behind any module of its name
        module = top
    else:
        module, _, suffix = top.partition(".")
        if suffix.rpartition(".")[2] not in _MODULE_SUFFIXES:
            return ""
    if module in OWN_PACKAGES:
        owner = "DMSC"
    elif module in sys.stdlib_module_names or module in _SITE:
        owner = "Python itself"
    else:
        return ""
    return f"{'/'.join(parts)} has the name of a module of {owner}: rename it, or list it under code.exclude"


def refuse_twins(names: Iterable[str]) -> str:
    """Why these names can't be files of one folder; empty if they can: each once, none also a folder, and
    no more folders than there may be files."""
    seen: set[str] = set()
    folders: set[str] = set()
    for name in names:
        if name in seen:
            return f"{name!r} is there twice"
        seen.add(name)
        parts = name.split("/")
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    if len(folders) > ARCHIVE_FILES:
        return f"{len(folders):,} folders, at most {ARCHIVE_FILES:,} are made"
    both = next(iter(sorted(seen & folders)), None)
    return f"{both!r} is a file and a folder" if both else ""


def imported_modules(source: bytes) -> set[str]:
    """Top-level names of the modules that a source file imports; none of what is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def is_installed(path: Path) -> bool:
    """Whether a file belongs to the interpreter or to an installed distribution, and is no user's own."""
    resolved = path.resolve()
    if {"site-packages", "dist-packages"} & set(resolved.parts):
        return True
    return resolved.is_relative_to(Path(sysconfig.get_paths()["stdlib"]).resolve())
