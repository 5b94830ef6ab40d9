"""Whether today's software goes on with a state folder of before.

    python -m benchmarks.soak_upgrade [--from COMMIT] [--end down|kill|both]

The software of COMMIT is taken out of git's history into a folder of its own, and runs a mesh there: users,
a data set, a finished job of a researcher's, and one that is stopped in its middle, in order or by SIGKILL of
every process. Then today's software starts on that folder, is killed during its start, and starts again.
Looked at: users' tokens, the audit, the data set, the finished job's weights, the streams, and that the open
job ends.
Exit code 1 if anything of that is not as it was. Takes the packages of the present environment for both.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.history import BEFORE, ROOT, taken_out
from dmsc.state.state_folder import StateFolder

MOST_S = 240.0
"""What one command may take."""
UP = ("up", "--detach", "--cluster", "a", "--slots", "8", "--nats-port", "0", "--http-port", "0")
FINISHED = ("--set", "training.steps=6", "--set", "training.checkpoint_every=3")
OPEN = ("--set", "training.steps=100", "--set", "training.checkpoint_every=5")
JOB = "examples/chaos-gpt.yaml"
UPLOAD = (
    "import sys; from pathlib import Path; from dmsc import Client\n"
    "with Client() as client: client.upload_dataset('words', Path(sys.argv[1]))"
)
DOWNLOAD = (
    "import sys; from pathlib import Path; from dmsc import Client\n"
    "with Client() as client: client.download_dataset('words', Path(sys.argv[1]))"
)


@dataclass(frozen=True, kw_only=True)
class Software:
    """One version of DMSC on one state folder."""

    root: Path
    state: Path

    def python(self, *arguments: str, token: str = "", check: bool = True) -> str:
        """Its standard output.

        Raises:
            SystemExit: it failed; with what it said.
        """
        environment = {**os.environ, "PYTHONPATH": str(self.root), "DMSC_STATE": str(self.state)}
        if token:
            environment["DMSC_TOKEN"] = token
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=MOST_S,
            check=False,
        )
        if check and done.returncode:
            raise SystemExit(
                f"{' '.join(arguments)[:200]}: exit code {done.returncode}\n{done.stderr[-2_000:]}"
            )
        return done.stdout

    def dmsc(self, *arguments: str, token: str = "", check: bool = True) -> str:
        return self.python("-m", "dmsc", *arguments, token=token, check=check)

    def jobs(self) -> dict[str, dict[str, Any]]:
        listed = json.loads(self.dmsc("jobs", "--json"))
        return {job["job"]: job for job in (listed if isinstance(listed, list) else listed["jobs"])}


def pids_of(state: Path) -> tuple[int, ...]:
    """The processes of the mesh on this folder: its supervisor, and everything that descends from it; none if
    nobody holds it."""
    owner = StateFolder(state).owner()
    if owner is None:
        return ()
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {owner}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return tuple(found)


def kill(state: Path) -> None:
    """Everything at once."""
    for pid in pids_of(state):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def written_before(old: Software, end: str, folder: Path) -> dict[str, Any]:
    """Runs the old mesh and ends it; what it should have kept."""
    old.dmsc(*UP)
    tokens = {}
    for name, role in (("anna", "operator"), ("rosa", "researcher")):
        tokens[name] = json.loads(old.dmsc("user", "add", name, "--role", role, "--json"))["token"]
    words = folder / "words.txt"
    words.write_text("a state folder of before " * 4_000, encoding="utf-8")
    old.python("-c", UPLOAD, str(words), token=tokens["rosa"])
    old.dmsc("train", JOB, *FINISHED, "--plain", "--out", str(folder / "out"), token=tokens["rosa"])
    [finished] = old.jobs()
    old.dmsc("train", JOB, *OPEN, "--detach", token=tokens["rosa"])
    [opened] = set(old.jobs()) - {finished}
    deadline = time.monotonic() + MOST_S
    while old.jobs()[opened]["step"] < 10:
        if time.monotonic() > deadline:
            raise SystemExit(f"the open job made no 10 steps: {old.jobs()[opened]}")
        time.sleep(0.5)
    if end == "kill":
        kill(old.state)
    else:
        old.dmsc("down")
    return {"tokens": tokens, "words": words, "finished": finished, "open": opened}


def flaws_of(new: Software, kept: dict[str, Any], folder: Path) -> list[str]:
    """What is not as it was, one line each."""
    found: list[str] = []
    rosa = kept["tokens"]["rosa"]
    for name, token in kept["tokens"].items():
        if name not in (said := new.dmsc("user", "whoami", token=token)):
            found.append(f"{name}'s token: {said.strip()}")
    if "hold" not in (said := new.dmsc("audit", "verify")):
        found.append(f"audit: {said.strip()}")
    if "✓ streams: all there" not in (said := new.dmsc("doctor", check=False)):
        found.append(f"streams: {said.strip()}")
    copy = folder / "copy.txt"
    new.python("-c", DOWNLOAD, str(copy), token=rosa)
    if copy.read_bytes() != kept["words"].read_bytes():
        found.append("the data set differs")
    new.dmsc("attach", kept["finished"], "--plain", "--out", str(folder / "again"), token=rosa)
    for file in sorted(path for path in (folder / "out" / "weights").rglob("*") if path.is_file()):
        other = folder / "again" / "weights" / file.relative_to(folder / "out" / "weights")
        if not other.exists() or other.read_bytes() != file.read_bytes():
            found.append(f"the finished job's weights: {file.name} differs")
    new.dmsc("attach", kept["open"], "--plain", "--out", str(folder / "open"), token=rosa)
    if (state := new.jobs()[kept["open"]]["state"]) != "done":
        found.append(f"the open job is {state}")
    return found


def killed_at_its_start(new: Software) -> None:
    """Starts today's mesh, and kills it as soon as its server has the store."""
    environment = {**os.environ, "PYTHONPATH": str(new.root), "DMSC_STATE": str(new.state)}
    command = [sys.executable, "-m", "dmsc", *(each for each in UP if each != "--detach")]
    mesh = subprocess.Popen(
        command, cwd=new.root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + MOST_S
    while not (new.state / "version").exists() or len(pids_of(new.state)) < 3:
        if mesh.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"today's mesh did not begin on {new.state}")
        time.sleep(0.02)
    kill(new.state)
    mesh.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="commit", default=BEFORE, help="whose state folder")
    parser.add_argument(
        "--end", choices=("down", "kill", "both"), default="both", help="how the old mesh ends"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the mesh is ended, too
    wrong = False
    for end in ("down", "kill") if options.end == "both" else (options.end,):
        with tempfile.TemporaryDirectory(prefix="dmsc-upgrade-") as temporary:
            folder = Path(temporary)
            state = folder / "state"
            taken_out(options.commit, folder / "old")
            old, new = Software(root=folder / "old", state=state), Software(root=ROOT, state=state)
            try:
                kept = written_before(old, end, folder)
                killed_at_its_start(new)
                new.dmsc(*UP)
                found = flaws_of(new, kept, folder)
                new.dmsc("down")
            finally:
                kill(state)
        print(f"after {end}: {'; '.join(found) or 'all as it was, and the open job has ended'}", flush=True)
        wrong = wrong or bool(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
