"""The fork server by its own protocol: real forks, real signals, nothing left behind (DESIGN §6)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.patience import PATIENCE_S

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
STAND_IN_TORCH = ROOT / "tests" / "stand_in_torch"


class Agent:
    """The agent's end of the protocol, without any convenience.

    `light`: with a stand-in for torch, where nothing that is run makes use of it.
    """

    def __init__(self, folder: Path, method: str = "auto", *, light: bool = False) -> None:
        self.folder = folder
        mine, theirs = socket.socketpair()
        mine.settimeout(PATIENCE_S)
        command = [sys.executable, "-m", "workers.process.fork_server", "--fd", str(theirs.fileno())]
        command += ["--method", method, "--code-path", str(HERE), "--directory", str(folder)]
        before = [str(STAND_IN_TORCH), *filter(None, [os.environ.get("PYTHONPATH")])]
        path = {"PYTHONPATH": os.pathsep.join(before)} if light else {}
        with (folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **path},
                pass_fds=(theirs.fileno(),),
                stdout=log,
                stderr=log,
            )
        theirs.close()
        self.socket = mine
        self.lines = mine.makefile("r")
        self.ready = self.hear()

    def hear(self) -> dict[str, Any]:
        line = self.lines.readline()
        assert line, (self.folder / "server.log").read_text()
        event: dict[str, Any] = json.loads(line)
        return event

    def say(self, **order: Any) -> None:
        self.socket.sendall(json.dumps(order).encode() + b"\n")

    def spawn(
        self, name: str, threads: int | None = None, needs: Sequence[str] = (), **payload: Any
    ) -> dict[str, Any]:
        order: dict[str, Any] = {
            "op": "spawn",
            "id": name,
            "module": "fork_children.child",
            "payload": payload,
        }
        order |= {"result": str(self.result(name)), "log": str(self.log(name)), "threads": threads}
        order["needs"] = list(needs)
        self.say(**order)
        return self.hear()

    def wait(self, name: str, **payload: Any) -> int:
        """Spawn a child that waits, and return once it does."""
        here = self.folder / f"{name}.here"
        pid = self.spawn(name, do="wait", here=str(here), **payload)["pid"]
        deadline = time.monotonic() + PATIENCE_S
        while not here.exists():
            assert time.monotonic() < deadline, self.log(name).read_text()
            time.sleep(0.005)
        return int(pid)

    def result(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def close(self) -> None:
        self.lines.close()
        self.socket.close()
        self.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    agent = Agent(tmp_path_factory.mktemp("fork"))
    yield agent
    agent.close()


@pytest.fixture
def own_agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path, light=True)
    yield agent
    if agent.process.poll() is None:
        agent.process.kill()
    agent.close()


def await_gone(*pids: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ready_says_what_is_loaded_and_that_forking_is_safe(agent: Agent) -> None:
    assert agent.ready["event"] == "ready"
    assert agent.ready["pid"] == agent.process.pid
    assert agent.ready["torch"]
    assert isinstance(agent.ready["devices"], list)
    if sys.platform == "linux":
        assert (agent.ready["method"], agent.ready["threads"]) == ("fork", 1)
        assert agent.ready["warning"] == ""


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
def test_what_a_child_needs_is_imported_once_by_the_server(own_agent: Agent) -> None:
    for name, needs in (
        ("without", []),
        ("first", ["fork_children.costly"]),
        ("second", ["fork_children.costly", "no.such.module"]),
    ):
        own_agent.spawn(name, needs=needs, do="costly")
        assert own_agent.hear()["code"] == 0, own_agent.log(name).read_text()
    found = {name: json.loads(own_agent.result(name).read_text()) for name in ("without", "first", "second")}
    server = own_agent.ready["pid"]
    assert [one["imported_by"] for one in found.values()] == [None, server, server]
    assert "no.such.module not preloaded" in (own_agent.folder / "server.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="fork and /proc")
def test_a_child_inherits_torch_but_nothing_of_the_server(agent: Agent) -> None:
    seen = []
    for name in ("look-1", "look-2"):
        spawned = agent.spawn(name, threads=2, do="look")
        assert agent.hear() == {
            "event": "exited",
            "id": name,
            "pid": spawned["pid"],
            "code": 0,
            "signal": None,
        }
        seen.append(json.loads(agent.result(name).read_text()))
        assert seen[-1]["inherited"]
    first, second = seen
    assert first["parent"] == agent.process.pid
    assert first["descriptors"] == sorted(["/dev/null", str(agent.log("look-1")), str(agent.log("look-1"))])
    assert (first["threads"], first["sum"]) == (2, 300.0**3)
    assert (first["term"], first["blocked"]) == (True, [])
    assert first["directory"] == str(agent.folder)
    assert first["random"] != second["random"]


def test_an_exception_becomes_code_1_with_the_traceback_and_one_line_in_the_log(agent: Agent) -> None:
    agent.spawn("raises", do="raise")
    assert agent.hear()["code"] == 1
    lines = agent.log("raises").read_text().splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "fork_children.child failed: ValueError: no such layer"


@pytest.mark.parametrize(
    ("payload", "code", "by"),
    [
        ({"do": "nothing", "code": 7}, 7, None),
        ({"do": "exit", "code": 3}, 3, None),
        ({"do": "exit", "code": None}, 0, None),
        ({"do": "abort"}, None, signal.SIGSEGV),
    ],
)
def test_the_exit_is_reported_as_it_was(agent: Agent, payload: dict[str, Any], code: int, by: int) -> None:
    agent.spawn("exits", **payload)
    ended = agent.hear()
    assert (ended["code"], ended["signal"]) == (code, by)


def test_a_kill_is_reported(agent: Agent) -> None:
    pid = agent.wait("victim")
    os.kill(pid, signal.SIGKILL)
    ended = agent.hear()
    assert (ended["id"], ended["signal"]) == ("victim", signal.SIGKILL)


def test_signals_go_through_the_server_and_only_to_living_children(agent: Agent) -> None:
    agent.wait("signalled")
    agent.say(op="kill", id="signalled", signal=int(signal.SIGTERM))
    assert agent.hear()["signal"] == signal.SIGTERM
    agent.say(op="kill", id="signalled", signal=int(signal.SIGTERM))  # gone: nothing happens
    agent.spawn("after", do="nothing")
    assert agent.hear()["id"] == "after"


def test_unusable_orders_are_named_in_the_log_and_survived(agent: Agent) -> None:
    agent.socket.sendall(b'{"op":\n[]\n{"op": "dance", "id": "x"}\n')
    agent.spawn("still-works", do="nothing")
    assert agent.hear()["code"] == 0
    log = (agent.folder / "server.log").read_text()
    assert log.count("unusable order") == 2
    assert "unknown order 'dance' for x" in log


def test_the_same_name_twice_is_refused_while_the_first_runs(agent: Agent) -> None:
    pid = agent.wait("twin")
    assert agent.spawn("twin", do="nothing") == {"event": "failed", "id": "twin", "text": "twin runs already"}
    os.kill(pid, signal.SIGKILL)
    assert agent.hear()["event"] == "exited"


def test_end_of_file_ends_children_even_stubborn_and_stopped_ones(own_agent: Agent) -> None:
    pids = [own_agent.wait("mild"), own_agent.wait("stubborn", stubborn=True), own_agent.wait("stopped")]
    os.kill(pids[2], signal.SIGSTOP)
    own_agent.close()
    assert own_agent.process.returncode == 0
    assert not any(map(alive, pids))


def test_children_die_with_a_killed_server(own_agent: Agent) -> None:
    pids = [own_agent.wait("one"), own_agent.wait("two", stubborn=True)]
    own_agent.process.kill()
    own_agent.process.wait(PATIENCE_S)
    await_gone(*pids)


def test_without_fork_everything_behaves_the_same(tmp_path: Path) -> None:
    agent = Agent(tmp_path, method="spawn", light=True)
    try:
        assert agent.ready["method"] == "spawn"
        agent.spawn("raises", do="raise")
        assert agent.hear()["code"] == 1
        assert agent.log("raises").read_text().endswith("failed: ValueError: no such layer\n")
        pid = agent.wait("waits", stubborn=True)
        agent.process.kill()
        agent.process.wait(PATIENCE_S)
        await_gone(pid)
    finally:
        agent.close()
