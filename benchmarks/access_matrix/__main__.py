"""`python -m benchmarks.access_matrix [--party TITLE] [--mutants] [--all]`; see the package.

Told: for each kind of credential how much was tried, and each probe whose effect is not in the table. With
`--mutants` the guard's lists are then widened, one at a time, and each must be found. Exit code 1 otherwise,
and where too little was tried.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.access_matrix import handed_on
from benchmarks.access_matrix.parties import PARTIES
from benchmarks.access_matrix.trial import Findings, Trial
from benchmarks.access_matrix.widened import MUTANTS, finds
from benchmarks.access_matrix.world import World, running
from bus.logs import configure_logging

TOLD_MOST = 40
LEAST_PROBES, LEAST_WIDENED = 5_000, 20


async def run(only: str | None, mutants: bool) -> tuple[Findings, list[str]]:
    """What is wrong, and which widenings were not found."""
    with tempfile.TemporaryDirectory(prefix="dmsc-matrix-") as folder:
        async with running(Path(folder)) as world:
            found = await everybody(world, only)
            known = frozenset((one.party, one.probe) for one in found.wrong)
            return found, await overlooked(world, only, known) if mutants else []


async def everybody(world: World, only: str | None) -> Findings:
    found = Findings()
    for party in PARTIES:
        if only in (None, party.title):
            began = time.monotonic()
            its = await Trial(world, party).run()
            print(
                f"  {party.title:32}{its.probes.total():7,} probes{len(its.wrong):6} wrong"
                f"{time.monotonic() - began:8.1f} s",
                flush=True,
            )
            found.add(its)
    if only is None:
        its = await handed_on.run(world)
        print(f"  {handed_on.TITLE:32}{its.probes.total():7,} probes{len(its.wrong):6} wrong", flush=True)
        found.add(its)
    return found


async def overlooked(world: World, only: str | None, known: frozenset[tuple[str, str]]) -> list[str]:
    missed = []
    for mutant in MUTANTS:
        if only in (None, mutant.party):
            wrong = await finds(world, mutant, known)
            effect = "NOT FOUND" if wrong is None else f"{wrong.probe} → {wrong.effect}"
            print(f"  {mutant.title}: {effect[:160]}", flush=True)
            if wrong is None:
                missed.append(mutant.title)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--party", metavar="TITLE", help="one kind of credential alone")
    parser.add_argument("--mutants", action="store_true", help="widen the guard's lists: is each found?")
    parser.add_argument("--all", action="store_true", help="tell all that is wrong")
    given = parser.parse_args()
    configure_logging(level="critical")  # that services bury what they can't read is wanted here
    found, missed = asyncio.run(run(given.party, given.mutants))
    told = found.wrong if given.all else found.wrong[:TOLD_MOST]
    for one in told:
        print(f"WRONG {one.text}")
    if len(told) < len(found.wrong):
        print(f"      and {len(found.wrong) - len(told)} more (--all)")
    tried = found.probes.total()
    print(f"who may do what: {tried:,} probes, {len(found.wrong)} wrong")
    if given.mutants:
        print(f"who may do what: {len(MUTANTS) - len(missed)} of {len(MUTANTS)} widened lists found")
    short = [] if given.party else too_little(tried, len(MUTANTS) if given.mutants else None)
    for line in short:
        print(f"who may do what: {line}: something is not tried any more")
    return 1 if found.wrong or missed or short else 0


def too_little(probes: int, widened: int | None) -> list[str]:
    """What was tried too seldom. `widened`: how many lists were; None: that was left out."""
    said = [f"fewer than {LEAST_PROBES:,} probes"] if probes < LEAST_PROBES else []
    if widened is not None and widened < LEAST_WIDENED:
        said.append(f"fewer than {LEAST_WIDENED} widened lists")
    return said


if __name__ == "__main__":
    sys.exit(main())
