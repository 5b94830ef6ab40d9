"""Runs a benchmark's sections on meshes: each to its end or its limit, and no process of it stays."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Mapping

import psutil

from benchmarks.fault_figures import FaultFigure, FaultSheet, Plan
from benchmarks.harness.command import say, some_of
from benchmarks.harness.emptiness import told
from bus.logs import configure_logging
from dmsc.process.interrupts import interrupts

MARK = "DMSC_BENCH_SECTIONS"
"""In the environment of everything that this process starts, however far it is removed from it."""
GONE_S = 10.0

Section = Callable[[argparse.Namespace, FaultSheet], Awaitable[None]]
"""Measures one thing; its docstring's first line says what. Adds each figure as soon as it is known."""


def add_only(parser: argparse.ArgumentParser, names: Mapping[str, Section]) -> None:
    """The option `--only`: some of the sections, in the order given."""
    parser.add_argument(
        "--only", type=some_of(names), default=tuple(names), metavar="NAMES", help="sections, with commas"
    )


def run_and_exit(options: argparse.Namespace, sections: Mapping[str, Section]) -> None:
    """Run `options.only` of the sections, and exit: with 0 if all of them came to their end.

    `options` has `out`, the file for the figures, and `limit`, minutes for a section.
    """
    configure_logging(level="error")
    sheet = FaultSheet(options.out)
    try:
        ended = asyncio.run(_all(options, sections, sheet))
    except asyncio.CancelledError:  # by Ctrl-C or SIGTERM
        sys.exit(f"interrupted; what was measured so far is in {options.out}")
    print(sheet.summary, file=sys.stderr)
    sys.exit(0 if ended and sheet.figures else 1)


async def _all(options: argparse.Namespace, sections: Mapping[str, Section], sheet: FaultSheet) -> bool:
    """Whether all sections came to their end."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    whole = True
    with interrupts():
        try:
            for name in options.only:
                whole = await _section(name, options, sections[name], sheet) and whole
                if left := await asyncio.to_thread(_left_behind, mark):
                    sheet.add(Plan(section=name).at_most("processes left behind", len(left), "", 0))
        finally:
            await asyncio.to_thread(_left_behind, mark)  # also after an interrupt
    return whole


async def _section(name: str, options: argparse.Namespace, section: Section, sheet: FaultSheet) -> bool:
    """Whether the section came to its end."""
    began, whole = time.monotonic(), True
    say(f"{name}: {str(section.__doc__).splitlines()[0]}")
    try:
        async with asyncio.timeout(60 * options.limit) as limit:
            await section(options, sheet)
    except Exception as error:
        whole = False
        if told(error) is None:
            traceback.print_exc()
        why = f"ended early: {told(error) or str(error) or type(error).__name__}"
        if limit.expired():
            why = f"ended early: not done within {options.limit:g} minutes (--limit)"
        sheet.add(FaultFigure(section=name, name="the section itself", value=None, kept=False, note=why))
    say(f"{name}: {time.monotonic() - began:.0f} s")
    return whole


def _descendants(mark: str) -> list[psutil.Process]:
    """Processes that we, or what we started, have started and that still live."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(MARK) == mark and process.pid != os.getpid()
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # another user's, or it has just ended
    return found


def _left_behind(mark: str) -> list[psutil.Process]:
    """What is left after a moment's patience; it is killed."""
    _, left = psutil.wait_procs(_descendants(mark), timeout=GONE_S)
    for process in left:
        process.kill()
    return list(left)
