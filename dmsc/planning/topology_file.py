"""The network between nodes, from a file: GraphML, or YAML with `kind: fat_tree | dragonfly | links`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from entities.orchestrator.planning.plan_requests import MeshNetwork
from entities.planner.network_topology import (
    NetworkTopology,
    topology_from,
    topology_from_graphml,
)
from entities.planner.plan_request import NoPlan
from schemas.errors import BadInput


def mesh_network(path: Path) -> MeshNetwork:
    """The network of a mesh; raises as `read_topology_file` does."""
    return MeshNetwork(topology=read_topology_file(path), name=path.name)


def check_has(path: Path, node: str, agents: Sequence[str]) -> None:
    """That a topology has this machine, by its node's name or by each agent's.

    Raises:
        BadInput: it can't be read, is none, or lacks the machine.
    """
    hosts = set(read_topology_file(path).hosts)
    if node not in hosts and not hosts.issuperset(agents):
        shown = ", ".join(sorted(hosts)[:6])
        raise BadInput(
            f"{path}: has no host {node}, as this node is called, nor {' and '.join(agents)}: hosts are "
            f"{shown}; name them as the nodes are named"
        )


def read_topology_file(path: Path) -> NetworkTopology:
    """Reads a topology.

    Raises:
        BadInput: it can't be read, or is none: what, where, and what to give instead.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path}: can't be read: {error.strerror}: name a topology file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 text (byte {error.start}): give GraphML or YAML") from error
    try:
        if text.lstrip().startswith("<"):
            return topology_from_graphml(path.name, text)
        body = yaml.safe_load(text)
        if not isinstance(body, dict):
            raise BadInput(f"{path}: neither GraphML nor YAML with kind: fat_tree, dragonfly or links")
        return topology_from(path.name, body)
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: not YAML: {str(error).partition(chr(10))[0]}") from error
    except NoPlan as refused:
        raise BadInput(str(refused)) from refused
