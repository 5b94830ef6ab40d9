"""What needs a card, in one go: exact bits, sums on the device, telemetry, throughput beside a plain loop.

    python -m benchmarks.gpu [--device cuda] [--seconds 420] [--json]

Without a CUDA device it says so in one line and ends well. `--device cpu` runs the same parts on the CPU,
which shows that they work, and nothing about a card. Parts, in order; one that fails is told, the others run
all the same:

    attention    backward passes of each backend, repeated in the strict mode of instances: the same bits?
    sums         the fixed-point sum of gradients on the device and on the CPU: the same integers?
    collectives  these sums all-reduced by gloo between two ranks, and by NCCL: the same integers?
    telemetry    which fields of a sample NVML fills on this card
    shapes       one job as 1×1, 2×1, 1×2, 2×2 stages × replicas on one mesh: the same SHA-256 of the weights?
    kills        the 2×2 job again, with instances killed in mid-run: the same SHA-256?
    precision    the 2×1 and 1×2 job in bf16: the same SHA-256?
    throughput   tokens/s of the mesh in three shapes, as ratios of a plain loop on the same device

Each runs in a process of its own (`benchmarks.gpu_parts`), which is killed with all that it started when its
time is over: a card that hangs costs one part. After `--seconds` none begins, and what still runs
`LAST_S` later is killed, so that the whole stays under eight minutes.

In the product tensors travel by gloo, staged through pinned memory; it has no NCCL path. `collectives` asks
what one would have to keep. NCCL takes one rank per card: with one card there it sums nothing, and only shows
that it takes int64. Exit status 1: a part failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import command
from benchmarks.harness.processes import DMSC
from dmsc.state.state_folder import StateFolder

ROOT = Path(__file__).resolve().parents[1]
ALONE: Mapping[str, float] = {"attention": 120.0, "sums": 60.0, "collectives": 90.0, "telemetry": 45.0}
ON_MESH: Mapping[str, float] = {"shapes": 240.0, "kills": 120.0, "precision": 120.0, "throughput": 150.0}
"""Most seconds of each."""
SECONDS = 420.0
CARD_S = 60.0
LAST_S = 25.0
UP_S = 90.0
DOWN_S = 15.0


class Hung(Exception):
    """A part that was killed."""


class NoMesh(Exception):
    """The mesh did not start."""


# --- processes ---------------------------------------------------------------------------------------------
def last_line_of(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    """The last line that a command prints, as JSON. What runs for longer is killed with all its children.

    Raises:
        Hung: it was.
    """
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise Hung(f"killed after {limit_s:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    try:
        result: dict[str, Any] = json.loads((out.strip().splitlines() or [""])[-1])
    except ValueError:
        return {"failed": f"exit status {child.returncode}, and no word of what it found"}
    return result


@contextlib.contextmanager
def mesh(folder: Path, limit_s: float) -> Iterator[Path]:
    """A mesh of its own with four slots, which share a single card; yields its state folder.

    Raises:
        NoMesh: it did not start within `limit_s`.
    """
    state = folder / "state"
    ports = ("--nats-port", "0", "--http-port", "0", "--slots", "4", "--detach")
    up = [*DMSC, "up", "--allow-url", "*", "--state", str(state), "--cluster", "a", *ports]
    try:
        try:
            subprocess.run(up, check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=limit_s)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise NoMesh(f"the mesh did not start: {error}") from None
        yield state
    finally:
        _down([*DMSC, "down", "--state", str(state)], state)


def _down(command: Sequence[str], state: Path) -> None:
    """In order, or else by SIGKILL of the supervisor, with which all of it ends."""
    pid = StateFolder(state).owner()
    try:
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, timeout=DOWN_S)
    except subprocess.TimeoutExpired:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# --- all of it ---------------------------------------------------------------------------------------------
class Parts:
    """What was found so far, by part."""

    def __init__(self, device: str, seconds: float) -> None:
        self.found: dict[str, Any] = {}
        self._device = device
        self._until = time.monotonic() + seconds
        self._hashes: dict[str, str] = {}

    @property
    def failed(self) -> list[str]:
        return [name for name, one in self.found.items() if isinstance(one, str) and one.startswith("FAILED")]

    @property
    def over(self) -> bool:
        """No part begins any more."""
        return time.monotonic() > self._until

    @property
    def left_s(self) -> float:
        """Until whatever still runs is killed."""
        return max(0.0, self._until + LAST_S - time.monotonic())

    def take(self, name: str, limit_s: float, *more: str) -> bool:
        """Runs a part; False: it hung."""
        began, hung = time.monotonic(), False
        if self.over:
            self.found[name] = "left out: no time"
        else:
            known = ("--hashes", json.dumps(self._hashes))
            try:
                result = last_line_of(part(name, self._device, *known, *more), min(limit_s, self.left_s))
            except Hung as error:
                hung, result = True, {"failed": str(error)}
            self._hashes = result.get("hashes", self._hashes)
            self.found[name] = f"FAILED: {result['failed']}" if "failed" in result else result["found"]
        self._say(name, time.monotonic() - began)
        return not hung

    def all_failed(self, names: Sequence[str], why: str) -> None:
        for name in names:
            self.found[name] = f"FAILED: {why}"
            self._say(name, 0.0)

    def _say(self, name: str, took_s: float) -> None:
        print(f"{name:12} {took_s:6.1f} s  {json.dumps(self.found[name], ensure_ascii=False)}", flush=True)

    def on_mesh(self, place: Path) -> None:
        """On one mesh; after a part that hung, on another one, as it may have left the first in any state."""
        data = place / "text.txt"
        data.write_bytes(
            b"".join(file.read_bytes() for file in sorted(Path(json.__file__).parent.glob("*.py")))
        )
        waiting = list(ON_MESH)
        while waiting and not self.over:
            folder = place / f"mesh-{len(waiting)}"
            folder.mkdir()
            try:
                with mesh(folder, min(UP_S, self.left_s)) as state:
                    more = ("--state", str(state), "--data", str(data))
                    while waiting and self.take(name := waiting.pop(0), ON_MESH[name], *more):
                        """The next one, on the same mesh."""
            except NoMesh as error:
                self.all_failed(waiting, str(error))
                return
        for name in waiting:
            self.take(name, ON_MESH[name])


def part(name: str, device: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_parts", name, "--device", device, *more]


def main() -> int:
    parser = command(__doc__, seconds=(SECONDS, "no further part begins after this"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    parts = Parts(options.device, options.seconds)
    try:
        card = last_line_of(part("card", options.device), CARD_S)
    except Hung as error:
        card = {"failed": str(error)}
    if "failed" in card:
        print(f"the card can't be asked for its name: {card['failed']}")
        return 1
    if not card["found"]["name"]:
        print("no CUDA device here: nothing was run (ARGS='--device cpu' runs the same parts on the CPU)")
        return 0
    for name, limit_s in ALONE.items():
        parts.take(name, limit_s)
    with tempfile.TemporaryDirectory(prefix="dmsc-gpu-") as place:
        parts.on_mesh(Path(place))
    if options.json:
        print(json.dumps({"card": card["found"], **parts.found}, indent=1))
    failed = parts.failed
    print(f"{'; '.join(failed) + ' failed' if failed else 'all parts passed'} on {card['found']['name']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
