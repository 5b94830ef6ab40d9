"""A model whose author tries to get at what is not theirs, on a whole mesh: it gets nothing (ADR-0034)."""

from __future__ import annotations

import json
import os
import socketserver
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from tests.integration.mesh.conftest import Mesh, children_of, outcome, running_mesh
from tests.integration.mesh.counter import serving
from tests.integration.mesh.own_mesh import USER_MODELS
from tests.integration.mesh.user_jobs import user_job, words
from workers.sandbox.confinement import ConfinementMethod, works

MARK = "a-neighbours-file"


class Listener(socketserver.ThreadingTCPServer):
    """Hears what hostile models tell."""

    daemon_threads = True
    told: list[dict[str, Any]]

    def __init__(self) -> None:
        self.told = []
        super().__init__(("127.0.0.1", 0), Hearing)


class Hearing(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Listener)
        self.server.told.append(json.loads(self.rfile.readline()))


def unix_sockets() -> list[str]:
    """Those that listen on this machine: of the incubator, and of whatever else there is."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [fields[7] for fields in lines if len(fields) > 7 and int(fields[3], 16) & 0x10000]


def target(mesh: Mesh, listener: Listener, neighbour: Path) -> dict[str, Any]:
    """All that somebody could know who has read the code, and who may look at the process table."""
    state = mesh.state
    pids = [mesh.process.pid, *children_of(mesh.process.pid)]
    return {
        "host": "127.0.0.1",
        "port": listener.server_address[1],
        "files": [
            *(str(path) for path in sorted(state.rglob("*")) if path.is_file()),
            str(neighbour),
            "/etc/shadow",
            *(f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "mem")),
        ],
        "folders": [str(state), str(state / "logs"), str(state.parent), str(Path.cwd()), "/etc", "/usr/lib"],
        "pids": pids,
        "sockets": unix_sockets(),
        "needles": [
            "".join(chr(ord(letter) + 1) for letter in (state / name).read_text().strip())
            for name in ("bus_token", "token")
        ],
        "names": [MARK],
    }


def code_folder(folder: Path) -> Path:
    """A folder of code, in which more lies than code: another mesh's state, and secrets of its owner's."""
    code = folder / "code"
    for name in ("blue/bus_token", "blue/users.yaml", "shop/api/.env", "shop/.git/config", "public.py"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text("a secret of its owner's")
    return code


@pytest.mark.parametrize("way", [ConfinementMethod.OWN_USER, ConfinementMethod.LANDLOCK])
def test_a_hostile_model_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, way: ConfinementMethod
) -> None:
    if not works(way):
        pytest.skip(f"this machine can't confine anybody by {way}")
    monkeypatch.setenv("DMSC_SANDBOX", way)
    state = tmp_path / "mesh" / "state"
    state.parent.mkdir()
    neighbour = Path("/dev/shm") / MARK
    request.addfinalizer(neighbour.unlink)
    neighbour.write_text("another's numbers")
    code = code_folder(tmp_path)
    options = ("--cluster", "a", "--slots", "2", "--allow-url", str(tmp_path), "--code", str(code))
    with running_mesh(state, *options) as mesh:
        with serving(Listener()) as listener:
            known = target(mesh, listener, neighbour)
            known["files"] += [str(path) for path in code.rglob("*") if path.is_file()]
            known["files"].remove(str(code / "public.py"))
            assert len([path for path in known["files"] if path.startswith(f"{code}/")]) == 4
            assert len(known["pids"]) >= 4, "the mesh's processes are not known"
            assert any("incubator" in name for name in known["sockets"]), (
                "the incubator's socket is not known"
            )
            model = {"factory": "hostile:hostile", "args": {"target": known}}
            job = user_job("sound", words(tmp_path), model=model)
            record = outcome(mesh.client, job)
            assert record.state is JobState.DONE, record.reason
            before = len(listener.told)  # of jobs one after the other, users may come again
            # the same as code that travels: then it does not even see what lies open in the node's folder
            known["files"].append(str(code / "public.py"))
            travels = {"folder": str(USER_MODELS), "include": ["hostile.py"]}
            record = outcome(mesh.client, user_job("sound", words(tmp_path), model=model, code=travels))
        assert record.state is JobState.DONE, record.reason  # what it needs, it had
        told = listener.told
        assert len({one["pid"] for one in told}) >= 4, "it ran neither in the analysis nor in an instance"
        got = {name: what for one in told for name, what in one["got"].items() if what}
        assert not got
        if way is ConfinementMethod.OWN_USER:
            assert os.getuid() not in {one["uid"] for one in told}
            for of_job in (told[:before], told[before:]):
                # a factory may be called twice in a process
                users = {one["pid"]: one["uid"] for one in of_job}
                assert len(set(users.values())) == len(users), "two processes had the same user"
        assert not list(tmp_path.rglob("hostile-*"))
