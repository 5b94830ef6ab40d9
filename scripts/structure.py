"""What the product's structure comes to: files, imports, levels and circles of its packages.

    python scripts/structure.py            # a table of the product's packages
    python scripts/structure.py --pairs entities.orchestrator

`tests/unit/repository/test_structure.py` holds what is demanded of it. Imports for types alone count: a
reader follows them like any other.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("bus", "dmsc", "entities", "policies", "schemas", "workers")
TABLE = (
    "entities.orchestrator",
    "bus",
    "workers",
    "entities.gateway",
    "dmsc",
    "entities",
    "policies",
    "schemas",
)


@dataclass(frozen=True)
class Structure:
    """The product's modules and who imports whom; re-exports of packages are looked through."""

    files: Mapping[str, Path]
    trees: Mapping[str, ast.Module]
    imports: Mapping[str, frozenset[str]]

    def below(self, package: str) -> dict[str, frozenset[str]]:
        """The imports among the modules of a package, with all that it contains."""
        mine = {name for name in self.files if _is_below(name, package)}
        return {name: self.imports[name] & mine for name in mine}

    def rooms(self, package: str) -> dict[str, set[str]]:
        """The imports among a package's rooms: its packages, and its own files, each counted as one."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, imported in self.below(package).items():
            here = _room(name, package)
            if here is None:
                continue
            found[here] |= {
                there for other in imported if (there := _room(other, package)) not in (None, here)
            }
        return dict(found)

    def files_in(self, package: str) -> list[str]:
        """The files that lie in the package itself."""
        return [
            name
            for name, path in self.files.items()
            if name.rpartition(".")[0] == package and path.name != "__init__.py"
        ]

    def packages(self) -> list[str]:
        return sorted(name for name, path in self.files.items() if path.name == "__init__.py")


def read_structure(root: Path = ROOT) -> Structure:
    files: dict[str, Path] = {}
    for top in PRODUCT:
        for path in sorted((root / top).rglob("*.py")):
            files[".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = path
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    origins = {
        name: _origins(trees[name], files) for name, path in files.items() if path.name == "__init__.py"
    }
    imports = {name: frozenset(_imports(tree, files, origins)) for name, tree in trees.items()}
    return Structure(files, trees, imports)


def levels(imports: Mapping[str, Iterable[str]]) -> int:
    """How many levels the imports have: the longest way down, circles taken as one place."""
    groups = circles(imports, least=1)
    of = {name: index for index, group in enumerate(groups) for name in group}
    depth: dict[int, int] = {}
    for index, group in enumerate(groups):  # what is imported comes before what imports it
        below = {of[other] for name in group for other in imports[name]} - {index}
        depth[index] = 1 + max((depth[other] for other in below), default=0)
    return max(depth.values(), default=0)


def circles(imports: Mapping[str, Iterable[str]], least: int = 2) -> list[list[str]]:
    """Groups of modules that import each other, directly or not (Tarjan, 1972), the imported ones first."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            cut = stack.index(name)
            group = sorted(stack[cut:])
            del stack[cut:]
            if len(group) >= least:
                found.append(group)

    for name in sorted(imports):
        if name not in number:
            visit(name)
    return found


def _is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _room(name: str, package: str) -> str | None:
    """The package or file directly below `package` in which a module lies; none for its `__init__`."""
    return None if name == package else name[len(package) + 1 :].partition(".")[0]


def _origins(tree: ast.Module, files: Mapping[str, Path]) -> dict[str, str]:
    """Name → the module that a package's `__init__` takes it from."""
    return {
        alias.asname or alias.name: module for module, aliases in _from_ours(tree, files) for alias in aliases
    }


def _statements(tree: ast.AST) -> Iterable[ast.AST]:
    """All statements, those inside others too; expressions, most of a tree, have no imports in them."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, ())
            if isinstance(inner, list):
                waiting += inner


def _from_ours(tree: ast.Module, files: Mapping[str, Path]) -> Iterable[tuple[str, list[ast.alias]]]:
    for node in _statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module in files:
            yield node.module, node.names


def _imports(
    tree: ast.Module, files: Mapping[str, Path], origins: Mapping[str, Mapping[str, str]]
) -> Iterable[str]:
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
    for package, aliases in _from_ours(tree, files):
        for alias in aliases:
            module = f"{package}.{alias.name}"
            yield module if module in files else _origin(package, alias.name, origins)


def _origin(module: str, name: str, origins: Mapping[str, Mapping[str, str]]) -> str:
    while name in origins.get(module, {}):
        module = origins[module][name]
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", metavar="PACKAGE", help="which rooms of a package import which")
    options = parser.parse_args()
    structure = read_structure()
    if options.pairs:
        for room, others in sorted(structure.rooms(options.pairs).items()):
            print(f"{room:24} → {', '.join(sorted(others)) or '-'}")
        return
    print(f"{'package':24}{'files':>7}{'imports':>9}{'levels':>8}{'rooms':>8}{'pairs':>8}{'levels':>8}")
    for package in TABLE:
        inside, rooms = structure.below(package), structure.rooms(package)
        print(
            f"{package:24}{len(inside):7}{sum(map(len, inside.values())):9}{levels(inside):8}"
            f"{len(rooms):8}{sum(map(len, rooms.values())):8}{levels(rooms):8}"
        )
    for group in circles(structure.imports):
        print("circle:", ", ".join(group))


if __name__ == "__main__":
    main()
