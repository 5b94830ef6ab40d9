"""Builds of a data set whose every part is killed meanwhile: is their digest that of an undisturbed one?

    python -m benchmarks.data_build_kills [--kills 50] [--replicas 1,2,4] [--unit-kib 128] [--seed 0] [--json]

The standard library's sources become windows of bytes without near duplicates, in small units: first
undisturbed, then once for each number of `--replicas`, with at least so many kills each, evenly over the
units. The seed draws who is killed: the process of a unit, a node agent, a gateway, the leading
orchestrator, or the server. Each fault asserts that it fired: the process lived when it was killed, and units
were left to be done. Exit code 1 if a digest differs, rows do not add up, a build failed or took over a unit
of an earlier one, or fewer kills came about.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.meshes import BenchMesh, open_mesh
from bus import subjects
from bus.logs import configure_logging
from dmsc.client.job_file import load_build
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.builds import BuildRecord, BuildState
from schemas.errors import DmscError
from schemas.leadership import Leadership

BUILD_FILE = Path(__file__).parents[1] / "examples" / "data-build" / "build.yaml"
VICTIMS = ("unit", "agent", "gateway", "orchestrator", "server")
PATIENCE_S = 90.0
"""For a victim to live again, and for a mesh whose parts were killed to answer."""
LOOK_S = 0.1

SPARE = 1.25
"""Kills that are attempted for each that is asked for: the last units are soon done."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BuildFigures:
    """What one build came to."""

    replicas: int
    kills: dict[str, int]
    units: int
    seconds: float
    rows_in: int
    kept: int
    dropped: int
    digest: str

    @property
    def adds_up(self) -> bool:
        return self.rows_in == self.kept + self.dropped


async def patiently(what: str, find: Callable[[], Awaitable[T | None]]) -> T:
    """What it finds, asked again while it finds nothing, or nobody answers.

    Raises:
        SystemExit: Nothing within `PATIENCE_S`.
    """
    last = "nothing was found"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if (found := await find()) is not None:
                return found
        except DmscError as error:
            last = str(error)
        await asyncio.sleep(LOOK_S)
    raise SystemExit(f"{what}: not within {PATIENCE_S:g} s: {last}")


class Killer:
    """Kills the parts of a mesh. The supervisor of the mesh starts them again."""

    def __init__(self, mesh: BenchMesh, seed: int) -> None:
        self._mesh = mesh
        self._random = random.Random(seed)

    async def kill(self, build: str) -> str:
        """Kill a process that lives; return which of `VICTIMS` it was."""
        victim = self._random.choice(VICTIMS)

        async def struck() -> bool | None:
            found = await self._process(victim, build)
            if found is None or found.status() == psutil.STATUS_ZOMBIE:
                return None
            found.kill()
            return True

        async def alive() -> bool | None:
            try:
                return await struck()
            except psutil.NoSuchProcess:
                return None  # it ended by itself, or is being started again

        await patiently(f"{victim} to kill", alive)
        return victim

    async def _process(self, victim: str, build: str) -> psutil.Process | None:
        if victim == "unit":
            found = units_of(build)
            return self._random.choice(found) if found else None
        if victim == "orchestrator":
            entry = await self._mesh.bus.bucket(subjects.LEADERSHIP).get(leader=True, role="orchestrator")
            leads = None if entry is None else entry.message
            return psutil.Process(leads.pid) if isinstance(leads, Leadership) else None
        file = self._mesh.running.folder.mesh()
        children = {} if file is None else file.children
        name = "bus" if victim == "server" else victim
        pids = [pid for child, pid in sorted(children.items()) if child.partition("-")[0] == name]
        return psutil.Process(self._random.choice(pids)) if pids else None


def units_of(build: str) -> list[psutil.Process]:
    """The processes that work on units of a build."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if " ".join(process.cmdline()).startswith(f"dmsc {build} "):
                found.append(process)
    return found


async def built(mesh: BenchMesh, spec: DataBuildSpec, killer: Killer, kills: int, units: int) -> BuildFigures:
    """One build, with at least so many kills, evenly over so many units.

    Raises:
        SystemExit: It failed, took over units of an earlier build, or ended before enough kills.
    """
    began, most = time.monotonic(), int(SPARE * kills)
    build = (await mesh.client.build(spec)).build
    killed: Counter[str] = Counter()

    async def record() -> BuildRecord:
        return await patiently(build, lambda: mesh.client.build_record(build))

    found = await record()
    while not found.ended:
        done = sum(phase.committed for phase in found.phases)
        if killed.total() < most and done >= units * (killed.total() + 1) // (most + 2):
            killed[victim := await killer.kill(build)] += 1
            say(f"{build}: {done} of {units} units, killed {killed.total()} of {kills}: {victim}")
        await asyncio.sleep(LOOK_S)
        found = await record()
    if found.state is not BuildState.DONE:
        raise SystemExit(f"{build} ended {found.state.value}: {found.reason}")
    if killed.total() < kills:
        raise SystemExit(f"{build} ended after {killed.total()} of {kills} kills: choose fewer")
    if reused := sum(phase.reused for phase in found.phases):
        raise SystemExit(f"{build} took over {reused} units of an earlier build: nothing was compared")
    manifest = await patiently(
        "the manifest", lambda: mesh.client.data_set_manifest(spec.name, found.version)
    )
    return BuildFigures(
        replicas=spec.units_at_a_time[1],
        kills=dict(killed),
        units=sum(phase.units for phase in found.phases),
        seconds=time.monotonic() - began,
        rows_in=manifest.rows_in,
        kept=sum(manifest.kept.values()),
        dropped=sum(manifest.dropped.values()),
        digest=found.digest or "",
    )


async def measure(options: argparse.Namespace) -> list[BuildFigures]:
    configure_logging(level="error")
    say(f"seed {options.seed}")
    spec = load_build(BUILD_FILE).model_copy(update={"unit_bytes": options.unit_kib << 10})
    async with open_mesh(separate=True, orchestrators=2) as mesh:
        killer = Killer(mesh, options.seed)
        calm = spec.model_copy(update={"replicas": 2})
        found = [await built(mesh, calm, killer, 0, 0)]
        say(row(found[0]))
        for replicas in options.replicas:
            struck = spec.model_copy(update={"replicas": replicas})
            found.append(await built(mesh, struck, killer, options.kills, found[0].units))
            say(row(found[-1]))
    return found


def row(found: BuildFigures) -> str:
    kills = ", ".join(f"{found.kills[name]} {name}" for name in VICTIMS if name in found.kills)
    books = f"{found.rows_in:6} = {found.kept:5} + {found.dropped:5}"
    numbers = f"{found.replicas:8} {found.units:5} {found.seconds:5.0f}"
    return f"{numbers}  {books}  {found.digest[:16]}  {kills or 'undisturbed'}"


def lines(found: list[BuildFigures]) -> Iterator[str]:
    yield f"replicas units     s  {'in = kept + dropped':22}  {'digest':16}  kills"
    yield from map(row, found)
    if wrong := [str(one.replicas) for one in found if not one.adds_up]:
        raise SystemExit(f"rows do not add up with replicas: {', '.join(wrong)}")
    if len({one.digest for one in found}) > 1:
        raise SystemExit("the digests differ")


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    parser = command(
        __doc__,
        kills=(50, "of each build that is disturbed"),
        unit_kib=(128, "KiB of sources in a unit"),
        seed=(0, "draws who is killed"),
    )
    parser.add_argument("--replicas", type=numbers, default=(1, 2, 4), help="a build for each, with commas")
    bench(parser, measure, lines)
