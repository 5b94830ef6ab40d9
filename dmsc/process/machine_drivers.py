"""How the provisioner's pools get their machines: what is run here, which commands, which pods."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from entities.provisioner.drivers.command_driver import CommandDriver
from entities.provisioner.drivers.local_driver import LocalDriver
from schemas.machines.demand import POOL_LABEL

if TYPE_CHECKING:
    from dmsc.state.settings import BusAddress
    from entities.provisioner.drivers.machine_driver import MachineDriver
    from schemas.machines.pools import MachinePool

STOP_GRACE = 10.0
"""Seconds in which an agent that is ended moves what it has: less than `LocalDriver` waits for its end."""


def driver_of(mesh: str, name: str, pool: MachinePool, address: BusAddress, state: Path) -> MachineDriver:
    """The driver of a pool.

    Args:
        mesh: the name in the file of pools.
        name: the pool's.
        address: the bus that its machines join.
        state: the folder below which local machines have their files.
    """
    secrets = {"DMSC_BUS": ",".join(address.servers)}
    if pool.credential:
        secrets["DMSC_CREDENTIAL"] = pool.credential
    if pool.commands is not None:
        fields = {"pool": name, "cluster": pool.cluster, "slots": str(pool.slots)}
        return CommandDriver(pool.commands, fields, secrets)
    join = ["--cluster", pool.cluster, "--slots", str(pool.slots)]
    join += [word for label in labels_of(name, pool) for word in ("--label", label)]
    if (rules := pool.kubernetes) is not None:
        from entities.provisioner.drivers.kubernetes_driver import KubernetesApi, KubernetesDriver
        from entities.provisioner.drivers.kubernetes_manifest import MachinePods

        api = KubernetesApi(rules.kubeconfig, rules.context, rules.namespace, timeout_s=rules.timeout_s)
        bus, words = rules.bus or secrets["DMSC_BUS"], [*join, *pool.options]
        return KubernetesDriver(api, MachinePods(mesh=mesh, pool=name, rules=rules, bus=bus, join=words))
    if address.token and not pool.credential:  # a mesh without a guard, whose bus has one token for all
        secrets["DMSC_BUS_TOKEN"] = address.token
    folder = state / "machines" / name
    command = [
        *(sys.executable, "-m", "dmsc", "join", secrets["DMSC_BUS"]),
        *("--node", "{machine}", *join),
        *("--logs", str(folder / "logs"), "--metrics-port", "0", "--grace", f"{STOP_GRACE:g}"),
        *pool.options,
    ]
    return LocalDriver(folder, command, secrets)


def labels_of(name: str, pool: MachinePool) -> list[str]:
    """The labels of the nodes of a pool, as `dmsc join` takes them."""
    return [f"{key}={value}" for key, value in sorted({**pool.labels, POOL_LABEL: name}.items())]
