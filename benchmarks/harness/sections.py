"""A benchmark of several sections, each a module: one that fails says so, and the next one follows."""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Protocol

from benchmarks.harness.emptiness import told

EXTRA = "bench-policies"
"""Whatever sections need beside DMSC."""
OURS = ("benchmarks", "bus", "dmsc", "entities", "policies", "schemas", "workers")


class SectionTable(Protocol):
    """What sections add their figures to."""

    def begin(self, section: str, what: str) -> None: ...

    def end(self, took_s: float) -> None: ...


def run_sections(names: Sequence[str], modules: Mapping[str, str], bench: SectionTable) -> bool:
    """Whether all sections came to their end.

    Args:
        names: Those that run, in order.
        modules: Name → module with `run(bench)`, whose docstring's first line says what it measures.
        bench: What each section is given.
    """
    whole = True
    for name in names:
        began = time.monotonic()
        try:
            section = import_module(modules[name])
            bench.begin(name, str(section.__doc__).splitlines()[0])
            with warnings.catch_warnings():
                warnings.filterwarnings("error", r"(Mean of empty slice|Degrees of freedom <= 0)")
                section.run(bench)
        except ModuleNotFoundError as error:
            if (package := (error.name or "").partition(".")[0]) in OURS:
                raise
            whole = False
            print(f"{name}: {package} is not installed: pip install 'dmsc[{EXTRA}]'", file=sys.stderr)
        except Exception as error:
            whole = False
            if (line := told(error)) is not None:
                print(f"{name}: {line}", file=sys.stderr)
            else:
                traceback.print_exc()
        bench.end(time.monotonic() - began)
    return whole
