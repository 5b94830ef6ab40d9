"""The Internet Topology Zoo: a tar.gz of GraphML files (or another of that form), and which are held out."""

from __future__ import annotations

import tarfile
from hashlib import blake2b
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.policy_data.forms import WrongForm
from policies.contrib.topology_file import Topology, read_topology

FILE = Path("topo/topology_zoo_graphml.tar.gz")
TEST_PERCENT = 30


def is_held_out(topology: Topology) -> bool:
    """Decided by the name alone, so that neither training nor anyone's choice moves it. A network in several
    years (Geant2001, Geant2009) is on one side."""
    family = topology.name.rstrip("0123456789").encode()
    return blake2b(family, digest_size=4).digest()[0] * 100 // 256 < TEST_PERCENT


def load_topologies(path: Path, *, least: int = 8, most: int = 40) -> list[Topology]:
    """Those with `least` to `most` nodes in which traffic has a choice: two or more independent cycles.

    Raises:
        WrongForm: missing, or of another form.
    """
    found = []
    try:
        with tarfile.open(path) as archive:
            for member in sorted(archive.getmembers(), key=lambda one: one.name):
                file = archive.extractfile(member) if member.name.endswith(".graphml") else None
                topology = read_topology(Path(member.name).stem, file.read()) if file is not None else None
                if topology is not None and least <= topology.nodes <= most:
                    links = len(topology.capacity) // 2
                    if links - topology.nodes + 1 >= 2:
                        found.append(topology)
    except (OSError, tarfile.TarError, ElementTree.ParseError, ValueError) as error:
        raise WrongForm(path, f"not a tar.gz of GraphML files: {error}") from error
    if not found:
        raise WrongForm(path, f"no network of {least} to {most} nodes with two cycles in it")
    return found
