"""The network between nodes, from a file: GraphML, or YAML with `kind: fat_tree | dragonfly | links`."""

from __future__ import annotations

from pathlib import Path

import yaml

from entities.planner.plan_request import NoPlan
from entities.planner.search.network_topology import (
    NetworkTopology,
    topology_from,
    topology_from_graphml,
)
from schemas.errors import BadInput


def read_topology_file(path: Path) -> NetworkTopology:
    """Reads a topology.

    Raises:
        BadInput: it can't be read, or is none: what, where, and what to give instead.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: can't be read: {error}") from error
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
