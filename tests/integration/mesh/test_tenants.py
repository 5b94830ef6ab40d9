"""`dmsc up --tenant red --tenant blue`: two meshes on one server, with doors, users, jobs of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dmsc.client.async_client import AsyncClient
from dmsc.client.client import Client
from dmsc.launch.mesh import running_mesh
from dmsc.launch.mesh_options import MeshOptions
from dmsc.state.settings import find_gateway
from dmsc.state.state_folder import MeshFile, StateFolder
from schemas.errors import BadInput, Refused
from schemas.gateway_api import MeshStatus
from schemas.job import JobSpec
from schemas.registry import InstanceState
from tests.integration.dmsc.command_line import Running, dmsc, running, wait_for
from tests.integration.mesh.conftest import done, tiny_job
from tests.warm_processes import incubator

PORTS = ("--nats-port", "0", "--http-port", "0")


@dataclass
class Host:
    """A running host and its tenants' folders."""

    folder: StateFolder
    process: Running

    def file(self, tenant: str) -> MeshFile:
        file = self.folder.tenant(tenant).mesh()
        assert file is not None
        return file

    def client(self, tenant: str, token: str | None = None) -> Client:
        """At the tenant's own gateways; as its administrator, or with another's token."""
        return Client(list(self.file(tenant).gateways.values()), token=token or self.token(tenant))

    def said(self) -> str:
        return self.process.output

    def token(self, tenant: str) -> str:
        return self.folder.tenant(tenant).token() or ""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("host")
    asked = (
        "up",
        "--tenant",
        "red",
        "--tenant",
        "blue",
        "--cluster",
        "a",
        "--slots",
        "2",
        "--policy",
        "none",
        *PORTS,
    )
    asked += ("--allow-url", __file__)  # what `short_job` learns
    with running(*asked, cwd=folder, warm=True, **incubator()) as process:
        process.until("tenants ready")
        yield Host(StateFolder(folder / ".dmsc"), process)
        process.interrupt()
        assert process.wait() == 0
    assert StateFolder(folder / ".dmsc" / "tenants" / "red").owner() is None


async def added_user(host: Host, tenant: str, name: str) -> str:
    async with AsyncClient(list(host.file(tenant).gateways.values()), token=host.token(tenant)) as client:
        token = (await client.add_user(name, "viewer")).token
    assert token is not None
    return token


def services(status: MeshStatus) -> set[str]:
    return {one.sid for one in status.services if one.state is InstanceState.ACTIVE}


def short_job(name: str) -> JobSpec:
    return tiny_job(name, data={"source": __file__}, training={"steps": 3})


def test_both_train_at_once_with_the_same_names_and_know_nothing_of_each_other(host: Host) -> None:
    with host.client("red") as red, host.client("blue") as blue:
        # brokers come later
        wait_for(lambda: services(red.mesh()) == services(blue.mesh()), lambda: "the SIDs differ")
        jobs = {client: client.submit(short_job("same")) for client in (red, blue)}
        for client, job in jobs.items():
            done(client, job.job)
            assert [one.job for one in client.jobs()] == [job.job]
        hashes = {client.weights(job.job).sha256 for client, job in jobs.items()}
        assert len(hashes) == 1, "the same job, the same weights, in either"


def test_a_token_of_one_opens_nothing_of_the_other(host: Host) -> None:
    ruth = asyncio.run(added_user(host, "red", "ruth"))
    with host.client("red", ruth) as at_home:
        assert at_home.mesh().services
    for token in (ruth, host.token("red")):
        with host.client("blue", token) as abroad, pytest.raises(Refused):
            abroad.mesh()


def test_what_is_the_hosts_is_with_the_host(host: Host) -> None:
    for name in ("red", "blue"):
        tenant = host.folder.tenant(name)
        assert not tenant.guard_file.exists(), "who has the guard's keys may put anybody anywhere"
        assert tenant.path.stat().st_mode & 0o077 == 0
    assert host.folder.bus_token() is None, "and the host has no root of its own"
    assert "monitoring" not in next(host.folder.store.glob("*.ports")).read_text()
    with pytest.raises(BadInput, match=r"tenants/red' or --state '.*tenants/blue'"):
        find_gateway(state=host.folder.path)
    with pytest.raises(BadInput, match="start it with --tenant blue --tenant red"):
        asyncio.run(started(MeshOptions(state=host.folder.path)))


async def started(options: MeshOptions) -> None:
    async with running_mesh(options, print):
        pass


def test_one_killed_or_stopped_leaves_the_other_at_work(host: Host) -> None:
    with host.client("blue") as blue:
        killed = host.file("red").children["control-plane"]  # its authorizer, its gateway, and all the rest
        os.kill(killed, signal.SIGKILL)
        done(blue, blue.submit(short_job("meanwhile")).job)
        wait_for(lambda: host.file("red").children["control-plane"] != killed, host.said)
        stopped = dmsc("down", "--state", str(host.folder.tenant("red").path), cwd=host.folder.path)
        assert stopped.returncode == 0, stopped.stderr
        assert services(blue.mesh())
    assert host.process.process.poll() is None, "the host goes on"
