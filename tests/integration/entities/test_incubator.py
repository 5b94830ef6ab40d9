"""Fork servers out of an incubator: what one is there, and what it costs when it is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from dmsc.launch.incubation import incubating
from entities.cluster.fork_server_client import ForkServerClient, Spawned
from entities.cluster.fork_server_process import INCUBATOR
from tests.integration.entities.cluster_mesh import HERE, STAND_IN_TORCH, alive
from tests.patience import PATIENCE_S
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere fork servers are started afresh")

CHILDREN = HERE.parent / "workers"


@pytest.fixture
def incubator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """One with a torch that is there at once."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parents[2]), str(STAND_IN_TORCH)]))
    monkeypatch.delenv(INCUBATOR, raising=False)
    before = {child.pid for child in psutil.Process().children()}
    with incubating(tmp_path / "incubator.log") as found:
        monkeypatch.setenv(INCUBATOR, found[INCUBATOR])
        (mine,) = (child for child in psutil.Process().children() if child.pid not in before)
        yield mine
    assert not mine.is_running()


@asynccontextmanager
async def fork_server(folder: Path, name: str = "a-n") -> AsyncIterator[ForkServerClient]:
    async with ForkServerClient(name=name, logs=folder, code_path=[str(CHILDREN)]) as client:
        await client.wait_ready(PATIENCE_S)
        yield client


async def waiting(client: ForkServerClient, name: str, folder: Path) -> Spawned:
    """A child that runs until it is told to end."""
    here = folder / f"{name}.here"
    payload = {"do": "wait", "here": str(here)}
    child = await client.spawn(name, "fork_children.child", payload, log_path=folder / f"{name}.log")
    await eventually(here.exists)
    return child


def pid_of(client: ForkServerClient) -> int:
    assert client.pid is not None
    return client.pid


async def test_nodes_of_a_machine_have_fork_servers_from_one_incubator(
    incubator: psutil.Process, tmp_path: Path
) -> None:
    async with fork_server(tmp_path, "a-n") as a, fork_server(tmp_path, "b-n") as b:
        for client in (a, b):
            process = psutil.Process(pid_of(client))
            assert process.ppid() == incubator.pid
            assert os.getsid(process.pid) == process.pid
            line = " ".join(process.cmdline())
            assert "-m workers.process.fork_server" in line
            assert f"--agent {os.getpid()} " in line
        children = [
            await waiting(client, f"child-{number}", tmp_path) for number, client in enumerate((a, b))
        ]
        ended = await a.stop(children[0], 5.0)
        assert ended.signal == "SIGTERM"
        pids = [pid_of(a), pid_of(b), children[1].pid.result()]
        assert alive(pids[2])
    assert not any(map(alive, pids))
    await eventually(lambda: not incubator.children(), "each was waited for")


async def test_a_killed_fork_server_comes_back_from_the_incubator(
    incubator: psutil.Process, tmp_path: Path
) -> None:
    async with fork_server(tmp_path) as client:
        child = await waiting(client, "lost", tmp_path)
        first = psutil.Process(pid_of(client))
        first.kill()
        await asyncio.wait_for(child.exit, PATIENCE_S)
        await eventually(lambda: not alive(child.pid.result()))
        await client.wait_ready(PATIENCE_S)
        assert client.restarts == 1
        assert psutil.Process(pid_of(client)).ppid() == incubator.pid
        await waiting(client, "again", tmp_path)


async def test_without_its_incubator_a_fork_server_goes_on_and_the_next_is_started_afresh(
    incubator: psutil.Process, tmp_path: Path
) -> None:
    async with fork_server(tmp_path) as client:
        incubator.kill()
        await eventually(lambda: incubator.status() == psutil.STATUS_ZOMBIE)
        await waiting(client, "goes-on", tmp_path)
        psutil.Process(pid_of(client)).kill()
        await eventually(lambda: client.ready is None)
        await client.wait_ready(PATIENCE_S)
        assert psutil.Process(pid_of(client)).ppid() == os.getpid()
        await waiting(client, "again", tmp_path)


@pytest.mark.parametrize("nonsense", [b"", b"\x00", b"\xff\xff\xff\xff and so on"])
async def test_a_request_that_is_none_costs_nobody_else_anything(
    incubator: psutil.Process, tmp_path: Path, nonsense: bytes
) -> None:
    def ask() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.settimeout(PATIENCE_S)
            stranger.connect("\0" + os.environ[INCUBATOR])
            stranger.sendall(nonsense)
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # not all of it was read
                return stranger.recv(16)
            return b""

    assert await asyncio.to_thread(ask) == b""
    assert "a request failed: it was cut short" in (tmp_path / "incubator.log").read_text()
    async with fork_server(tmp_path) as client:
        assert psutil.Process(pid_of(client)).ppid() == incubator.pid


def test_a_fork_server_whose_agent_does_not_know_it_never_serves(
    incubator: psutil.Process, tmp_path: Path
) -> None:
    mine, its = socket.socketpair()
    start_reader, start_writer = os.pipe()
    request = json.dumps([["--method", "fork"], dict(os.environ)]).encode() + b"\n"
    with (
        mine,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent,
        open(tmp_path / "fork-server.log", "ab") as output,
    ):
        agent.settimeout(PATIENCE_S)
        mine.settimeout(PATIENCE_S)
        agent.connect("\0" + os.environ[INCUBATOR])
        socket.send_fds(agent, [request], [output.fileno(), start_reader, its.fileno()])
        its.close()
        os.close(start_reader)
        answer, (handle,), _, _ = socket.recv_fds(agent, 32, 1)
        assert psutil.Process(int(answer)).ppid() == incubator.pid
        os.close(start_writer)  # an agent that was killed, or has started another one meanwhile
        assert mine.recv(1) == b"", "not even that it is ready"
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000)
        os.close(handle)
