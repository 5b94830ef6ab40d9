"""docs/machines.md has every key of a pool, and the states of machines as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

from schemas.machines.pools import MachinePool
from schemas.machines.records import MACHINE_TRANSITIONS

PAGE = (Path(__file__).parents[4] / "docs" / "machines.md").read_text()


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", cell))


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    text = PAGE.partition(f"## {heading}\n")[2]
    table = text[text.index("\n|") :].partition("\n\n")[0] if "\n|" in text else ""
    return [line.strip("|").split("|") for line in table.strip().splitlines()[2:]]


def test_each_key_of_a_pool_is_described() -> None:
    described = [names(cells[0]) for cells in rows("Pools")]
    assert set().union(*described) == set(MachinePool.model_fields)


def test_the_states_are_those_of_the_code() -> None:
    drawn = {state: names(cells[2]) for cells in rows("A machine's states") for state in names(cells[0])}
    assert drawn == {
        state.value: {each.value for each in following} for state, following in MACHINE_TRANSITIONS.items()
    }
