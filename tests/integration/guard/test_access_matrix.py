"""A part of `make audit`'s matrix: every kind of credential tries what it may not, on a live server."""

from __future__ import annotations

from pathlib import Path

from benchmarks.access_matrix import handed_on
from benchmarks.access_matrix.parties import PARTIES
from benchmarks.access_matrix.trial import Findings, Trial, all_probes
from benchmarks.access_matrix.widened import MUTANTS, finds
from benchmarks.access_matrix.world import running

EACH = 24
"""Of the probes of one kind of credential; others of the next."""


async def test_no_credential_has_an_effect_that_the_table_does_not_know(tmp_path: Path) -> None:
    found = Findings()
    async with running(tmp_path) as world:
        places = {name: [one.subject for one in said] for name, said in world.planted.items()}
        for number, party in enumerate(PARTIES):
            probes = all_probes(party, world.configs, places)[number % EACH :: EACH]
            found.add(await Trial(world, party).run(probes))
        found.add(await handed_on.run(world))
        assert found.wrong == [], "\n".join(one.text for one in found.wrong)
        assert found.probes.total() > 5_000


async def test_widened_permissions_are_found(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        for mutant in MUTANTS[::6]:
            assert await finds(world, mutant) is not None, mutant.title
