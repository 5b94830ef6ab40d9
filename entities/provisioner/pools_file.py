"""The file of pools. What is wrong in it is said in one line, before anything is ordered."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import ValidationError

from schemas.errors import BadInput
from schemas.explain import explain
from schemas.machines.pools import MachinePool, PoolsFile
from schemas.names import misplaced

EXAMPLE = "examples/pools.yaml"
MOST_PREFIX = 50
"""Characters before a machine's number: Kubernetes allows names of Jobs 63."""


def parse_pools(text: str, where: str) -> PoolsFile:
    """Reads pools.

    Args:
        text: YAML; see `examples/pools.yaml`.
        where: the file's name, for errors.

    Raises:
        BadInput: one line: what is wrong, where, and what to give.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadInput(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, Mapping):
        raise BadInput(f"{where}: give pools, as {EXAMPLE} does")
    try:
        return PoolsFile.model_validate(document)
    except ValidationError as error:
        raise BadInput(f"{where}: {explain(error, PoolsFile)[0]}") from None


def read_pools(path: Path, *, guarded: bool) -> PoolsFile:
    """Reads the file of pools, and looks whether each has what its machines need to join.

    Args:
        path: the file; relative paths in it are of its folder.
        guarded: the bus wants credentials.

    Raises:
        BadInput: one line, also where the file or a credential can't be read.
    """
    try:
        found = parse_pools(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise BadInput(f"{path}: {why}: give a file like {EXAMPLE}") from None
    pools = {}
    for name, pool in found.pools.items():
        if (why := misplaced(pool.cluster, f"{found.name}-{name}-1")) is not None:
            raise BadInput(f"{path}: pools.{name}: {why}")
        for what, words in () if pool.commands is None else pool.commands.programs:
            if shutil.which(words[0]) is None:
                raise BadInput(
                    f"{path}: pools.{name}.commands.{what}: there is no program {words[0]!r}: install it, or"
                    " give its path"
                )
        if pool.kubernetes is not None:
            pools[name] = _checked_pods(pool, f"{found.name}-{name}", path, f"pools.{name}", guarded)
            continue
        place = f"{path}: pools.{name}.credential"
        if not pool.credential:
            if guarded and pool.driver == "local":
                make = f"dmsc credential agent --cluster {pool.cluster} -o FILE"
                raise BadInput(f"{place}: missing: the bus lets in nobody without one; make it with `{make}`")
            pools[name] = pool
            continue
        credential = (path.parent / pool.credential).absolute()
        if not os.access(credential, os.R_OK) or not credential.is_file():
            raise BadInput(
                f"{place}: {credential} can't be read: give a file that `dmsc credential agent` wrote"
            )
        pools[name] = pool.model_copy(update={"credential": str(credential)})
    return found.model_copy(update={"pools": pools})


def _checked_pods(pool: MachinePool, prefix: str, path: Path, place: str, guarded: bool) -> MachinePool:
    """The pool with the place of its kubeconfig.

    Raises:
        BadInput: its pods could not join, or be named.
    """
    rules = pool.kubernetes
    assert rules is not None
    if len(prefix) > MOST_PREFIX:
        raise BadInput(
            f"{path}: {place}: the names of its pods begin with {prefix}, {len(prefix)} characters, of which"
            f" Kubernetes allows {MOST_PREFIX}: shorten the pool's name, or `name`"
        )
    if guarded and not rules.secret:
        raise BadInput(
            f"{path}: {place}.kubernetes.secret: missing: the bus lets in nobody without a credential; name"
            f" a Secret as `dmsc secrets --kubernetes` prints it, dmsc-node-{pool.cluster}"
        )
    if not rules.kubeconfig:
        return pool
    file = (path.parent / Path(rules.kubeconfig).expanduser()).absolute()
    if not os.access(file, os.R_OK) or not file.is_file():
        raise BadInput(
            f"{path}: {place}.kubernetes.kubeconfig: {file} can't be read: give a file, or leave it out"
            " for the pod's service account, or as kubectl finds it"
        )
    return pool.model_copy(update={"kubernetes": rules.model_copy(update={"kubeconfig": str(file)})})
