"""Traffic matrices over a topology with tunnels, in the form of FIGRET (Liu et al., SIGCOMM 2024).

NAME.json     networkx node-link: nodes with `id` 0…n-1, directed links with source, target, capacity
tunnels.txt   a line per pair: `0 1:0-2-6-1,0-4-6-1`
*.hist[.gz]   a line per matrix: n² numbers, row-major (source, target), in the unit of capacity
*.opt         a line per matrix of the .hist beside it: the least possible maximum link utilisation
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.policy_data.forms import WrongForm, read_json, read_text

Floats = NDArray[np.float64]
Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A directed topology.

    Attributes:
        nodes: n.
        links: source and target of each, in the file's order.
        capacity: `(links,)`, in the file's unit.
        tunnels: pair → paths, each a tuple of link indices, shortest first as in the file.
    """

    nodes: int
    links: tuple[Pair, ...]
    capacity: Floats
    tunnels: dict[Pair, tuple[tuple[int, ...], ...]]

    def incidence(self) -> Floats:
        """`(links, nodes²)`: which links the first tunnel of each pair uses."""
        used = np.zeros((len(self.links), self.nodes**2))
        for (source, target), paths in self.tunnels.items():
            used[list(paths[0]), source * self.nodes + target] = 1.0
        return used


def load_network(folder: Path) -> Network:
    """`FOLDER/FOLDER.json` and `FOLDER/tunnels.txt`.

    Raises:
        WrongForm: missing, or of another form.
    """
    path = folder / f"{folder.name}.json"
    graph = read_json(path)
    try:
        nodes = len(graph["nodes"])
        links = tuple((int(link["source"]), int(link["target"])) for link in graph["links"])
        capacity = np.array([float(link["capacity"]) for link in graph["links"]])
    except (KeyError, TypeError, ValueError) as error:
        expected = "nodes, and links with source, target, capacity"
        raise WrongForm(path, f"not a node-link graph ({expected}): {error!r}") from error
    wrong = [link for link in links if not all(0 <= end < nodes for end in link)]
    if wrong or not links:
        raise WrongForm(path, f"{nodes} nodes, but links {wrong[:3]}")
    return Network(
        nodes=nodes, links=links, capacity=capacity, tunnels=_tunnels(folder / "tunnels.txt", links)
    )


def _tunnels(path: Path, links: tuple[Pair, ...]) -> dict[Pair, tuple[tuple[int, ...], ...]]:
    index = {link: at for at, link in enumerate(links)}
    found: dict[Pair, tuple[tuple[int, ...], ...]] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            pair, paths = line.split(":")
            source, target = (int(end) for end in pair.split())
            hops = [[int(node) for node in one.split("-")] for one in paths.split(",")]
            found[source, target] = tuple(tuple(index[link] for link in pairwise(one)) for one in hops)
        except (KeyError, ValueError) as error:
            raise WrongForm(
                path, f"not `source target:a-b-c,…` over links of the topology: {error!r}", line=number
            ) from error
    return found


def load_matrices(path: Path, nodes: int) -> Floats:
    """Demands of a `.hist[.gz]`, shape `(matrices, nodes²)`, row-major source, target.

    Raises:
        WrongForm: missing, a line of another length, something that is no number or negative.
    """
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        row = np.array(line.split(), dtype=object)
        if len(row) != nodes**2:
            raise WrongForm(path, f"{len(row)} numbers instead of {nodes}² = {nodes**2}", line=number)
        try:
            values = row.astype(float)
        except ValueError as error:
            raise WrongForm(path, str(error), line=number) from error
        if not np.all(values >= 0):  # also NaN
            raise WrongForm(path, "a demand is negative or NaN", line=number)
        rows.append(values)
    if not rows:
        raise WrongForm(path, "empty; a line per matrix was expected")
    return np.stack(rows)


def load_optimum(path: Path) -> Floats:
    """Least maximum link utilisations of an `.opt`, shape `(matrices,)`.

    Raises:
        WrongForm: missing, or a line that is no number.
    """
    values = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            try:
                values.append(float(line))
            except ValueError as error:
                raise WrongForm(path, str(error), line=number) from error
    if not values:
        raise WrongForm(path, "empty; a line per matrix was expected")
    return np.array(values)
