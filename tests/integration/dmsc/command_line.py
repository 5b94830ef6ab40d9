"""Running `dmsc` as people and scripts do: a process, its output, its exit code, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.waiting import pause
from tests.warm_processes import WarmProcess, run_module, start_module

REPOSITORY = Path(__file__).parents[3]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DMSC_")}
    return {**kept, "PYTHONPATH": str(REPOSITORY), **more}


def dmsc(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; stdout and stderr as text."""
    return run_module("dmsc", arguments, cwd=cwd, environment=environment(**more), timeout_s=PATIENCE_S)


class Running:
    """A `dmsc` process whose output is read while it runs."""

    def __init__(self, process: WarmProcess | subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.process = process
        self._out = out
        self._err = err

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def errors(self) -> str:
        """Standard error, where it is kept apart."""
        return self._err.read_text(errors="replace")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Its exit code; fails with what it had said if it does not end."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            said = f"{self.output[-2000:]}\n{self.errors[-2000:]}"
            raise AssertionError(f"not ended after {PATIENCE_S:.0f} s, output was:\n{said}") from None

    def until(self, seen: Callable[[str], bool] | str, *, errors: bool = False) -> str:
        """Until the output, or `errors`, has this; fails with what it had, at once if the process ended."""
        wanted = (lambda text: seen in text) if isinstance(seen, str) else seen

        def text() -> str:
            return self.errors if errors else self.output

        def had() -> str:
            return f"exit code {self.process.poll()}, output was:\n{text()}"

        wait_for(lambda: wanted(text()) or self.process.poll() is not None, had)
        assert wanted(text()), had()
        return text()


@contextmanager
def running(
    *arguments: str, cwd: Path, apart: bool = False, warm: bool = False, **more: str
) -> Iterator[Running]:
    """Start in the background; killed at the end if it is still there. `apart`: stderr is not in `output`.

    What brings a mesh is started afresh, as a user would, unless `warm`; the others are forked from a process
    that has imported everything.
    """
    out = cwd / f"output-{time.monotonic_ns()}.txt"
    err = out.with_suffix(".errors.txt") if apart else out
    process: WarmProcess | subprocess.Popen[bytes]
    if arguments[0] in ("up", "demo") and not warm:
        with out.open("ab") as file, err.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "dmsc", *arguments],
                cwd=cwd,
                env=environment(**more),
                stdout=file,
                stderr=errors,
            )
    else:
        process = start_module("dmsc", arguments, cwd=cwd, environment=environment(**more), out=out, err=err)
    try:
        yield Running(process, out, err)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(condition: Callable[[], object], why: Callable[[], str] | str = "") -> None:
    """Poll an outside condition (another process, a file) that has no event to await; `why`: what it is."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + PATIENCE_S:
            text = why if isinstance(why, str) else why()
            raise AssertionError(f"not within {PATIENCE_S:.0f} s; {text}")
        time.sleep(pause(time.monotonic() - began, 0.02))


def processes_mentioning(text: str) -> list[str]:
    """Command lines of this machine's processes that contain `text`."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline", "pid", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if (
            text in line
            and process.info["pid"] != os.getpid()
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ):
            found.append(line)
    return found
