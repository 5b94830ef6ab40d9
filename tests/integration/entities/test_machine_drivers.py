"""Drivers of machines on this machine: processes that are found by a lock, and commands of the user."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from entities.provisioner.drivers.command_driver import CommandDriver
from entities.provisioner.drivers.local_driver import LOCK, LocalDriver
from schemas.errors import Refused, Unavailable
from schemas.machines.pools import PoolCommands
from tests.waiting import eventually

WAITS = "import signal, sys; print('begun', sys.argv[1], flush=True); signal.pause()"
STUBBORN = "import signal, sys; signal.signal(15, signal.SIG_IGN); print('begun', flush=True); signal.pause()"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "machines"
    yield place
    for file in place.glob(f"*{LOCK}"):
        if text := file.read_text().strip():
            os.killpg(int(text), signal.SIGKILL)


def local(folder: Path, program: str = WAITS, stop_s: float = 60.0) -> LocalDriver:
    return LocalDriver(folder, [sys.executable, "-c", program, "{machine}"], {}, stop_s=stop_s)


async def begun(folder: Path, machine: str) -> str:
    log = folder / f"{machine}.log"
    await eventually(lambda: log.exists() and "begun" in log.read_text())
    return log.read_text()


# --- processes -------------------------------------------------------------------------------------------
async def test_a_machine_that_is_ordered_by_many_at_once_and_again_is_one_process(folder: Path) -> None:
    assert await local(folder).machines() == frozenset()
    await asyncio.gather(*(local(folder).order("m-1") for _ in range(20)))
    await local(folder).order("m-1")
    assert await begun(folder, "m-1") == "begun m-1\n"
    assert await local(folder).machines() == {"m-1"}
    await local(folder).release("m-1")
    assert await local(folder).machines() == frozenset()
    assert not (folder / f"m-1{LOCK}").exists()
    await local(folder).release("m-1")  # again is no error


async def test_a_process_that_does_not_end_is_killed_and_one_that_died_is_seen(folder: Path) -> None:
    driver = local(folder, STUBBORN, stop_s=0.1)
    await driver.order("m-1")
    await begun(folder, "m-1")
    await driver.release("m-1")
    await eventually(lambda: gone(driver))

    await driver.order("m-2")
    await begun(folder, "m-2")
    os.kill(int((folder / f"m-2{LOCK}").read_text()), signal.SIGKILL)
    await eventually(lambda: gone(driver))


async def gone(driver: LocalDriver) -> bool:
    return not await driver.machines()


async def test_a_process_that_cannot_be_started_is_refused(folder: Path) -> None:
    (folder.parent / "file").touch()
    with pytest.raises(Refused, match="file"):
        await local(folder.parent / "file" / "below").order("m-1")
    with pytest.raises(Refused, match="is no machine's name"):
        await local(folder).order("../m-1")


# --- commands --------------------------------------------------------------------------------------------
def commands(folder: Path, timeout_s: float = 60.0, **more: str) -> CommandDriver:
    """Each machine is a file in the folder, which a shell makes."""
    folder.mkdir(exist_ok=True)
    texts = {
        "order": 'echo "$DMSC_POOL $DMSC_SLOTS $DMSC_CREDENTIAL" >"$0/{machine}"',
        "list": 'ls "$0"',
        "release": 'rm -f "$0/$DMSC_MACHINE"',
        **more,
    }
    words = {name: ("sh", "-c", text, str(folder)) for name, text in texts.items()}
    given = PoolCommands.model_validate({**words, "timeout_s": timeout_s})
    return CommandDriver(given, {"pool": "cloud", "slots": "4"}, {"DMSC_CREDENTIAL": "/a.cred"})


async def test_commands_get_what_they_need_by_words_and_environment(tmp_path: Path) -> None:
    driver = commands(tmp_path / "there")
    await driver.order("m-1")
    assert (tmp_path / "there" / "m-1").read_text() == "cloud 4 /a.cred\n"
    assert await driver.machines() == {"m-1"}
    await driver.release("m-1")
    assert await driver.machines() == frozenset()
    assert not driver.idempotent


async def test_what_an_order_leaves_behind_goes_on(tmp_path: Path) -> None:
    there = tmp_path / "there"
    await commands(there, order='sleep 3600 >"$0/out" 2>&1 & echo $! >"$0/pid"').order("m-1")
    process = psutil.Process(int((there / "pid").read_text()))
    try:
        assert process.status() != psutil.STATUS_ZOMBIE
    finally:
        process.kill()


async def test_what_is_certain_after_a_command_is_told_by_its_error(tmp_path: Path) -> None:
    there = tmp_path / "there"
    with pytest.raises(Refused, match="order: quota of 8 cards is used up"):
        await commands(there, order="echo one; echo quota of 8 cards is used up >&2; exit 69").order("m-1")
    with pytest.raises(Unavailable, match="order ended with 3: no route"):
        await commands(there, order="echo no route >&2; exit 3").order("m-1")
    with pytest.raises(Unavailable, match="release ended with 1"):
        await commands(there, release="exit 1").release("m-1")
    with pytest.raises(Unavailable, match="list ended with 2: locked out"):
        await commands(there, list="echo locked out >&2; exit 2").machines()
    with pytest.raises(Unavailable, match=r"list: '\{\"name\":' is no machine's name: print one a line"):
        await commands(there, list="""echo '{"name": 1}'""").machines()


async def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    there = tmp_path / "there"
    driver = commands(there, timeout_s=0.5, order='sleep 3600 & echo $! >"$0/pid"; wait')
    with pytest.raises(Unavailable, match=r"order took longer than 0\.5 s"):
        await driver.order("m-1")
    pid = int((there / "pid").read_text())

    def is_gone() -> bool:
        try:
            return " Z " in Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True

    await eventually(is_gone)
