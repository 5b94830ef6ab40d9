"""Measurements of devices in files: one per device and build, for all agents of this user on this node."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from bus.logs import get_logger
from entities.cluster.capabilities.slots import MeasuredDevice
from entities.cluster.core import Device

log = get_logger("cluster")

STANDARD = 1
"""Number of the standard stage: another program or reference needs other files."""
_MOST_BYTES = 64 << 10


def default_folder() -> Path:
    """`dmsc/capabilities` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmsc" / "capabilities"


class KeptMeasurements:
    """Reads and writes a folder of measurements. Its calls block for about as long as a file takes.

    A folder that can't be written is no error: the node measures at each start then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, device: Device, build: str) -> MeasuredDevice | None:
        """What is kept about this device; None: nothing, or nothing that can be read."""
        try:
            with self._path(device, build).open("rb") as file:
                content = json.loads(file.read(_MOST_BYTES))
            return read_measured(content["measured"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("a kept measurement can't be read: measured again", error=str(error))
            return None

    def store(self, device: Device, build: str, measured: MeasuredDevice) -> None:
        """Keep a measurement, with words for people who look at the file."""
        content = {"device": asdict(device), "build": build, "measured": {**asdict(measured)}}
        path = self._path(device, build)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content, indent=1, default=dict))
            temporary.replace(path)
        except OSError as error:
            log.warning("a measurement is not kept", folder=str(self._folder), error=error.strerror)

    @contextlib.contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Whether no other agent of this node measures now; holds them off for the block if so.

        Where no lock can be had at all, nobody is held off.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = (self._folder / "lock").open("wb")
        except OSError:
            yield True
            return
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:  # a file system without locks
                pass
            yield True

    def _path(self, device: Device, build: str) -> Path:
        text = "\n".join((str(STANDARD), build, device.kind, device.name, str(device.memory_bytes)))
        return self._folder / f"{device.kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_measured(content: object) -> MeasuredDevice:
    """A measurement from a worker's or a file's JSON.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    if not isinstance(content, dict):
        raise TypeError("a measurement is an object")
    speed = {str(work): float(value) for work, value in content["speed"].items()}
    if not speed or not all(0 < value < float("inf") for value in speed.values()):
        raise ValueError(f"impossible speeds: {speed}")
    bits_class = content["bits_class"]
    if not isinstance(bits_class, str) or not 0 < len(bits_class) <= 120:
        raise ValueError(f"no class of bits: {bits_class!r}")
    return MeasuredDevice(
        speed=speed,
        bits_class=bits_class,
        flops_per_s=float(content["flops_per_s"]),
        precisions=tuple(str(precision) for precision in content["precisions"]),
        busy=min(1.0, max(0.0, float(content.get("busy", 1.0)))),  # former versions did not look
    )
