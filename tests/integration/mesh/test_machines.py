"""Machines that come for a job and go after it: from none to the first step, and back to none (ADR-0175)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from bus import subjects
from bus.messaging.key_value import Change
from bus.server.embedded import EmbeddedServer
from entities.provisioner.drivers.local_driver import LOCK
from schemas.errors import NoResponders, Unavailable
from schemas.gateway_api import MeshStatus
from schemas.job import JobSpec
from schemas.machines.records import Machine, MachineState, PoolRecord
from schemas.registry import InstanceState
from tests.integration.dmsc.command_line import running, wait_for
from tests.integration.mesh.conftest import Mesh, running_mesh, tiny_job
from tests.integration.mesh.expected_weights import check_weights, check_weights_at
from tests.integration.mesh.own_mesh import CLUSTERS, OwnMesh, Witness, users_file
from tests.patience import NEVER_S, PATIENCE_S
from tests.waiting import eventually

STAGES = 2


def pools_file(folder: Path, **pool: Any) -> Path:
    """One pool of processes of this machine; each goes at once when it has no work."""
    rules = {
        "driver": "local",
        "most": 3,
        "slots": 1,
        "idle_s": 0.5,
        "boot_s": NEVER_S,
        "options": ["--allow-url", str(Path(argparse.__file__).parent)],
        **pool,
    }
    path = folder / "pools.yaml"
    path.write_text(yaml.safe_dump({"name": "t", "pools": {"here": rules}}))
    return path


def two_stages(name: str) -> JobSpec:
    return tiny_job(name, training={"steps": 3}, parallel={"stages": STAGES})


@contextlib.contextmanager
def nothing_stays(state: Path) -> Iterator[None]:
    """Ends what a failed test leaves: local machines outlive their provisioner."""
    try:
        yield
    finally:
        for file in state.glob(f"machines/*/*{LOCK}"):
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.killpg(int(file.read_text()), signal.SIGKILL)


# --- a mesh with a guard, by its commands ---------------------------------------------------------------
@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh whose own nodes have no slots."""
    state = tmp_path_factory.mktemp("machines") / "state"
    with nothing_stays(state), running_mesh(state, "--slots", "0", "--cluster", "a") as mesh:
        yield mesh


def pool_of(mesh: Mesh) -> dict[str, Any]:
    (pool,) = json.loads(mesh.printed("machines", "list", "--json"))["pools"]
    assert isinstance(pool, dict)
    return pool


def test_a_job_gets_its_machines_and_they_go_when_it_is_done(empty: Mesh) -> None:
    folder = empty.state.parent
    refused = empty.dmsc("run", "provisioner", "--pools", str(pools_file(folder)))
    assert refused.returncode == 2
    assert "pools.here.credential: missing: the bus lets in nobody without one" in refused.stderr
    empty.printed("credential", "agent", "--cluster", "a", "-o", str(folder / "a.cred"))
    pools = pools_file(folder, credential="a.cred", price=0.5, budget=100)

    nobody = empty.dmsc("machines")
    assert nobody.returncode == 3
    assert "no provisioner runs: `dmsc run provisioner --pools FILE` starts one" in nobody.stderr
    with running(
        "run", "provisioner", "--pools", str(pools), "--state", str(empty.state), cwd=folder
    ) as provisioner:
        provisioner.until("provisioner ready")
        wait_for(lambda: "no job lacks slots" in empty.printed("machines", "dry-run"))
        job = empty.client.submit(two_stages("from-none")).job
        check_weights(empty.client, job)

        wait_for(lambda: not pool_of(empty)["machines"], lambda: str(pool_of(empty)))
        pool = pool_of(empty)
        assert {each["id"] for each in pool["ended"]} == {"t-here-1", "t-here-2"}
        for machine in pool["ended"]:
            assert machine["ordered_for"] == job
            assert f"{job} lacks {STAGES} of {STAGES} slots" in machine["because"]
            assert "no work for" in machine["reason"]
        assert 0 < pool["spent"] < 1
        assert not list(empty.state.glob(f"machines/here/*{LOCK}"))
        listed = empty.printed("machines", "list", "--all")
        assert "here (local): 0 of 3 machines" in listed
        assert job in listed

        # By hand: within the cap, and given back by its name.
        too_many = empty.dmsc("machines", "order", "here", "--count", "4")
        assert too_many.returncode != 0
        assert "4 asked for, and 3 may be ordered now (most 3)" in too_many.stderr
        empty.printed("machines", "order", "here", "--reason", "a look")
        assert "a look" in empty.printed("machines", "list")
        empty.printed("machines", "release", "t-here-3", "--reason", "seen")
        wait_for(lambda: not pool_of(empty)["machines"], lambda: str(pool_of(empty)))
        assert pool_of(empty)["ended"][0]["reason"] == "seen"
        assert "no machine t-here-3" in empty.dmsc("machines", "release", "t-here-3").stderr
        assert "0 failures forgotten" in empty.printed("machines", "reset", "here")


# --- one that is killed ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> Iterator[OwnMesh]:
    """A mesh without any node, and a provisioner."""
    folder = tmp_path_factory.mktemp("killed")
    mesh = OwnMesh(folder, [server])
    pools, state = pools_file(folder, cluster="a", most=2 * STAGES), folder / "state"
    with nothing_stays(state):
        try:
            mesh.start("registry", ["run", "service-registry"])
            mesh.start("authorizer", ["run", "authorizer", "--tokens", str(users_file(folder))])
            mesh.start("smo-1", ["run", "orchestrator"])
            for cluster in CLUSTERS:
                mesh.start(f"router-{cluster}", ["run", "router", "--cluster", cluster])
                mesh.start(f"gateway-{cluster}", ["run", "gateway", "--cluster", cluster])
            command = ["run", "provisioner", "--bus", ",".join(mesh.urls), "--state", str(state)]
            mesh.start("provisioner", [*command, "--pools", str(pools)])
            yield mesh
        finally:
            mesh.stop_all()


@pytest_asyncio.fixture
async def user(own: OwnMesh) -> AsyncIterator[Witness]:
    async with own.client() as client:
        await eventually(lambda: is_there(client), "not ready", 0.05)
        yield client


async def is_there(client: Witness) -> bool:
    dead = client.mesh.processes.keys() - client.mesh.alive().keys()
    assert not dead, "\n".join(f"{name} ended: {client.mesh.last_words(name)}" for name in dead)
    try:
        status = await client.ask("mesh.read")
    except (Unavailable, NoResponders):
        return False
    assert isinstance(status, MeshStatus)
    active = {each.sid for each in status.services if each.state is InstanceState.ACTIVE}
    return {"gateway-a", "router-a", "provisioner", "orchestrator", "authorizer"} <= active


class Machines:
    """All that was ever written of the machines, by whoever led; and kills of a process at the first of a
    state."""

    def __init__(self, mesh: OwnMesh, victim: str) -> None:
        self._victim = victim
        self.states: dict[str, list[MachineState]] = {}
        self.last: PoolRecord | None = None
        self.most = 0
        self.killed: list[MachineState] = []
        self.due: list[MachineState] = []
        self._mesh = mesh

    async def written(self, change: Change) -> None:
        record = change.message
        if not isinstance(record, PoolRecord):
            return
        self.last = record
        self.most = max(self.most, len(record.machines))
        for machine in (*record.machines, *record.ended):
            self._note(machine)

    def _note(self, machine: Machine) -> None:
        states = self.states.setdefault(machine.id, [])
        if states[-1:] != [machine.state]:
            states.append(machine.state)
            if self.due[:1] == [machine.state]:
                self.killed.append(self.due.pop(0))
                self._mesh.kill(self._victim)
                self._mesh.start(self._victim)


@pytest.mark.parametrize(
    ("victim", "moments"),
    [
        ("provisioner", [MachineState.ORDERED, MachineState.STARTING, MachineState.JOINED]),
        ("provisioner", [MachineState.DRAINING, MachineState.RELEASED]),
        ("smo-1", [MachineState.ORDERED, MachineState.JOINED]),
    ],
    ids=["provisioner, while they come", "provisioner, while they go", "orchestrator"],
)
async def test_whoever_is_killed_nothing_is_ordered_twice(
    own: OwnMesh, user: Witness, victim: str, moments: list[MachineState]
) -> None:
    seen = Machines(own, victim)
    pools = user.bus.bucket(subjects.MACHINE_POOL)
    present = await pools.get(leader=True, pool="here")
    before = 0 if present is None else present.message.number
    watch = await pools.watch(seen.written)
    seen.due = list(moments)
    job = await user.submit(two_stages("killed"))
    await check_weights_at(user, job)
    async with asyncio.timeout(PATIENCE_S):
        await eventually(
            lambda: seen.last is not None and seen.last.number > before and not seen.last.machines,
            lambda: str(seen.last),
        )
    await watch.stop()
    assert seen.killed == moments
    assert seen.last is not None
    assert seen.last.number - before == STAGES, "a machine too many was ordered"
    assert seen.most == STAGES
    assert seen.last.failures == 0
    for number in range(before + 1, before + STAGES + 1):
        states = seen.states[f"t-here-{number}"]
        assert states.count(MachineState.ORDERED) == 1
        log = (own.folder / "state" / "machines" / "here" / f"t-here-{number}.log").read_text()
        assert log.count('"event": "metrics"') == 1, "its process was started twice"
    assert not list(own.folder.glob(f"state/machines/here/*{LOCK}"))
