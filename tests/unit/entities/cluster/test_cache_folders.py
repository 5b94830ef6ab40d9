"""A node's cache: each owner has a part, nobody more than it, and links lead nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entities.cluster.cache_folders import CacheBounds, CacheFolders, cache_owner, parts

FILE = 8192
BOUNDS = CacheBounds(slack_part=0.0, idle_s=1000.0)


def fill(folder: Path, count: int, *, first: int = 0) -> list[Path]:
    """Blocks, the oldest first."""
    files = []
    for number in range(first, first + count):
        file = folder / "blocks" / f"{number:02d}" / f"block-{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([1]) * FILE)
        os.utime(file, (number, number))
        files.append(file)
    return files


def caches_of(root: Path, files: int | None, bounds: CacheBounds = BOUNDS) -> CacheFolders:
    return CacheFolders(root, None if files is None else files * FILE, bounds)


def opened(caches: CacheFolders, process: str, owner: str) -> Path:
    folder = caches.open(process, owner)
    assert folder is not None
    return folder


def limit(folder: Path) -> int:
    return int((folder / "limit").read_text()) // FILE


def test_those_whose_processes_run_share_the_cache() -> None:
    assert parts(90, {"ann": True, "bob": True, "eve": False}) == {"ann": 45, "bob": 45, "eve": 0}
    assert parts(90, {"eve": False}) == {"eve": 0}


def test_jobs_of_a_user_share_a_folder_and_those_of_nobody_do_not() -> None:
    assert cache_owner("ann", "j1") == cache_owner("ann", "j2")
    assert len({cache_owner("", "j1"), cache_owner("", "j2"), cache_owner("j1", "x")}) == 3


def test_parts_follow_who_runs(tmp_path: Path) -> None:
    caches = caches_of(tmp_path, 12)
    ann = opened(caches, "p1", "ann")
    assert limit(ann) == 12
    bob = opened(caches, "p2", "bob")
    assert opened(caches, "p3", "ann") == ann != bob
    assert (limit(ann), limit(bob)) == (6, 6)
    caches.close("p1")
    assert limit(bob) == 6
    caches.close("p3")
    caches.close("p3")
    assert limit(bob) == 12


def test_only_the_agents_user_may_look_into_a_folder(tmp_path: Path) -> None:
    assert opened(caches_of(tmp_path, 1), "p", "ann").stat().st_mode & 0o077 == 0


def test_whoever_writes_more_than_its_part_loses_the_oldest(tmp_path: Path) -> None:
    caches = caches_of(tmp_path, 6)
    ann, bob = opened(caches, "p1", "ann"), opened(caches, "p2", "bob")
    mine, others = fill(ann, 5), fill(bob, 2)
    assert caches.tend() == 5 * FILE
    assert [file.exists() for file in mine] == [False, False, True, True, True]
    assert all(file.exists() for file in others)


def test_what_nobody_reads_now_stays_where_there_is_room(tmp_path: Path) -> None:
    caches = caches_of(tmp_path, 6)
    old, new = opened(caches, "p1", "old"), opened(caches, "p2", "new")
    for folder in (old, new):
        fill(folder, 2)
    caches.close("p1")
    caches.close("p2")
    assert caches.tend() == 4 * FILE
    busy = opened(caches, "p3", "busy")
    fill(busy, 3)
    (new / "usage").touch()
    for file in (old, old / "limit"):
        os.utime(file, (os.stat(new).st_mtime - 100,) * 2)
    assert caches.tend() == 6 * FILE
    assert len(list(new.glob("blocks/*/*"))) == 2
    assert len(list(old.glob("blocks/*/*"))) == 1


def test_what_nobody_has_read_for_long_goes(tmp_path: Path) -> None:
    folder = opened(caches_of(tmp_path, 6), "p1", "ann")
    fill(folder, 1)
    for path in (folder, folder / "limit"):
        os.utime(path, (1, 1))
    caches_of(tmp_path, 6).tend()
    assert not folder.exists()


def test_without_a_number_it_takes_a_part_of_what_is_free(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    folder = opened(caches_of(tmp_path, None, CacheBounds(default_bytes=1 << 60)), "p", "ann")
    assert int((folder / "limit").read_text()) == pytest.approx(free / 4, rel=0.2)
    small = opened(caches_of(tmp_path, None, CacheBounds(default_bytes=1000)), "p", "ann")
    assert (small / "limit").read_text() == "1000"


def test_zero_is_none_at_all(tmp_path: Path) -> None:
    fill(opened(caches_of(tmp_path / "cache", 3), "p", "ann"), 2)
    off = caches_of(tmp_path / "cache", 0)
    assert off.open("p", "ann") is None
    assert off.tend() == 0
    assert not (tmp_path / "cache").exists()


def test_links_of_users_code_lead_the_agent_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    precious = fill(outside, 3)
    (tmp_path / "cache").mkdir()
    caches = caches_of(tmp_path / "cache", 1)
    folder = opened(caches, "p", "mallory")
    (folder / "limit").unlink()
    (folder / "limit").symlink_to(outside / "limit")
    (folder / "blocks").symlink_to(outside / "blocks")
    (folder / "again").symlink_to(precious[0])
    fill(folder / "more", 3)
    os.link(precious[0], folder / "hard")
    caches.tend()
    assert all(file.exists() for file in precious)
    assert not (outside / "limit").exists()
    assert len(list((folder / "more").rglob("block-*"))) <= 1


def test_a_folder_of_more_files_than_a_cache_has_is_removed(tmp_path: Path) -> None:
    caches = caches_of(tmp_path, 100, CacheBounds(most_files=5))
    folder = opened(caches, "p", "mallory")
    fill(folder, 6)
    assert caches.tend() == 0
    assert not folder.exists()
    opened(caches, "q", "mallory")
    assert limit(folder) == 100


def test_folders_without_end_are_removed(tmp_path: Path) -> None:
    caches = caches_of(tmp_path, 100, CacheBounds(most_files=50))
    folder = opened(caches, "p", "mallory")
    [kept] = fill(folder, 1)
    here = os.getcwd()
    try:
        os.chdir(folder)
        for _ in range(3_000):  # more than Python's own calls may be deep
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    assert caches.tend() >= FILE
    assert kept.exists()
    assert len(os.listdir(folder / "d")) == 1, "only what lies deeper than a cache's went"
    for number in range(50):
        (folder / f"empty-{number}").mkdir()
    assert caches.tend() == 0
    assert not folder.exists()


def test_a_disk_that_fails_costs_only_the_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    caches = caches_of(tmp_path / "cache", 3)
    assert caches.open("p", "ann") is None
    assert caches.tend() == 0
