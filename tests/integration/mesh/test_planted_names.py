"""Whatever a mesh writes in its state folder it writes there: its names are links to another's files. The
folder's mode keeps others out; this is about how files are opened once somebody was in it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.integration.dmsc.command_line import dmsc, environment, wait_for
from tests.patience import PATIENCE_S
from tests.warm_processes import WarmProcess, start_module

OPTIONS = (
    "--nats-port",
    "0",
    "--http-port",
    "0",
    "--cluster",
    "a",
    "--slots",
    "1",
    "--tls",
    "--policy",
    "none",
)
WRITTEN = {
    *("bus_token", "token", "tokens.yaml", "user_key", "guard.json", "version", "credentials.jsonl"),
    *("lock", "mesh.json", "logs/guard.log", "logs/agent-a.log", "logs/control-plane.log"),
    *("nats/lock", "nats/server.conf", "nats/server.log", "nats/stderr.log", "tls/ca.pem", "tls/server.pem"),
}
"""Some of what there must be, so that the list of names is none of nothing."""
READ = {
    *("bus_token", "token", "tokens.yaml", "user_key", "guard.json", "version"),
    *("tls/ca.pem", "tls/ca-key.pem", "tls/server.pem", "tls/server-key.pem"),
}
"""What is made once, and from then on replaced as a whole or only read: there a link does no harm."""
FEW_FILES = 256


@dataclass
class Up:
    """`dmsc up` in its own folder: as a user starts it, who may open few files; or `warm`."""

    state: Path
    warm: bool = False
    process: subprocess.Popen[bytes] | WarmProcess = field(init=False)

    def __post_init__(self) -> None:
        if self.warm:
            self._err.write_bytes(b"")
            self.process = start_module(
                "dmsc",
                ("up", "--state", str(self.state), *OPTIONS),
                cwd=self.state.parent,
                environment=environment(),
                out=Path(os.devnull),
                err=self._err,
            )
            return
        with self._err.open("wb") as err:
            shell = ["/bin/sh", "-c", f'ulimit -S -n {FEW_FILES}; exec "$@"', "sh"]
            self.process = subprocess.Popen(
                [*shell, sys.executable, "-m", "dmsc", "up", "--state", str(self.state), *OPTIONS],
                cwd=self.state.parent,
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=err,
            )

    @property
    def _err(self) -> Path:
        return self.state.parent / "stderr"

    @property
    def said(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def is_ready(self) -> bool:
        file = self.state / "mesh.json"
        return file.is_file() and '"ready_at": 1' in file.read_text() and not file.is_symlink()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE_S) == 0, self.said

    def dmsc(self, *command: str) -> str:
        """What a command said that did not do it; empty of one that did."""
        done = dmsc(*command, "--state", str(self.state), cwd=self.state.parent)
        return done.stderr if done.returncode else ""


def commands() -> tuple[tuple[str, ...], ...]:
    """They write what `dmsc up` does not."""
    return (
        ("user", "add", f"u{time.monotonic_ns()}", "--role", "viewer"),
        ("credential", "agent", "--cluster", "a", "-o", "credential"),
    )


def names_in(state: Path) -> set[str]:
    """Of files of the mesh's own; not those that have a number of a process."""
    found = set()
    for folder, below, files in os.walk(state):
        below[:] = [name for name in below if name != "jetstream"]
        found |= {str((Path(folder) / name).relative_to(state)) for name in files}
    return {name for name in found if not name.endswith(".ports") and "/." not in f"/{name}"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """The folder of a mesh that has run, and all names that it has written there."""
    state = tmp_path_factory.mktemp("ran") / "state"
    up = Up(state)
    try:
        wait_for(lambda: up.is_ready or up.process.poll() is not None)
        assert up.is_ready, up.said
        limits = {
            process.name(): process.rlimit(psutil.RLIMIT_NOFILE)
            for process in [psutil.Process(up.process.pid), *psutil.Process(up.process.pid).children(True)]
        }
        assert len(limits) >= 3, limits
        assert all(soft == min(hard, 1 << 20) > FEW_FILES for soft, hard in limits.values()), limits
        assert [up.dmsc(*command) for command in commands()] == ["", ""]
        names = names_in(state)
        up.stop()
    finally:
        up.process.kill()
    names |= names_in(state) | {"rotation.lock"}
    assert names >= WRITTEN, WRITTEN - names
    return state, names


@dataclass
class Planted:
    """A copy of the folder in which something else stands in the place of each file."""

    ran: Path
    state: Path
    names: set[str]
    victims: dict[Path, bytes] = field(default_factory=dict)

    def plant(self) -> None:
        shutil.copytree(self.ran, self.state, symlinks=True)
        outside = self.state.parent / "outside"
        outside.mkdir()
        for name in sorted(self.names):
            place, victim = self.state / name, outside / name.replace("/", "~")
            content = place.read_bytes() if place.exists() else b"somebody's\n"
            place.unlink(missing_ok=True)
            place.parent.mkdir(exist_ok=True)
            victim.write_bytes(content)
            victim.chmod(0o644)
            place.symlink_to(victim)
            self.victims[victim] = content

    def stands(self, name: str) -> bool:
        return (self.state / name).is_symlink()

    def named_in(self, said: str) -> list[str]:
        """Those that stand there and that somebody was told of."""
        return [name for name in self.names if self.stands(name) and str(self.state / name) in said]

    def remove(self, name: str) -> None:
        """As was told; what it was before is there again."""
        (self.state / name).unlink()
        if (self.ran / name).exists():
            shutil.copy2(self.ran / name, self.state / name)

    def check(self) -> None:
        for victim, content in self.victims.items():
            assert victim.read_bytes() == content, f"{victim} was written to"
            assert victim.stat().st_mode & 0o777 == 0o644, f"{victim} has another mode"


@pytest.fixture
def planted(ran: tuple[Path, set[str]], tmp_path: Path) -> Planted:
    return Planted(ran[0], tmp_path / "state", ran[1])


def settles(up: Up, planted: Planted, spoken: set[str]) -> bool:
    """Does what each line says while it starts; whether it got ready, and did not end."""
    deadline = time.monotonic() + PATIENCE_S
    before = len(spoken)
    while True:
        ended, ready = up.process.poll() is not None, up.is_ready
        told = planted.named_in(up.said)
        planted.check()
        for name in told:
            planted.remove(name)
        spoken |= set(told)
        if ready:
            return True
        if ended:
            assert len(spoken) > before, up.said
            assert len(up.said.splitlines()) == 1, up.said
            return False
        assert time.monotonic() < deadline, up.said
        time.sleep(0.05)


def told_by_log(planted: Planted) -> bool:
    """Whether all that the authorizer can't write has been told, and is away."""
    for name in planted.named_in((planted.state / "logs" / "control-plane.log").read_text()):
        planted.remove(name)
    return not any(planted.stands(name) for name in planted.names if name.startswith("audit/"))


def test_nothing_is_written_through_links_in_the_places_of_files(planted: Planted) -> None:
    planted.plant()
    spoken: set[str] = set()
    up = Up(planted.state, warm=True)
    try:
        while not settles(up, planted, spoken):
            up = Up(planted.state, warm=True)
        for command in (*commands(), ("credential", "rotate")):
            if command[-1] == "rotate" and not planted.stands("rotation.lock"):
                assert "rotation.lock" in spoken, "neither the mesh nor the command has said it"
                continue  # the mesh, which looks for a rotation every second, was first
            said = up.dmsc(*command)
            planted.check()
            told = planted.named_in(said)
            if command[-1] == "rotate":
                assert told == ["rotation.lock"], said
            if told:
                assert "no plain file" in said
                assert len(said.splitlines()) == 1, said
            for name in told:
                planted.remove(name)
            spoken |= set(told)
        assert [up.dmsc(*command) for command in commands()] == ["", ""]
        wait_for(lambda: told_by_log(planted))
        up.stop()
    finally:
        up.process.kill()
    planted.check()
    left = {name for name in planted.names if planted.stands(name)}
    assert left <= READ, "each was said, or has been replaced"
    assert spoken
