"""Where a node's local stores lie, and when they go (draft §6, §4.4(6))."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from entities.cluster.config import ClusterConfig
from entities.cluster.store_folders import StoreFolders

WEEK_S = 7 * 86_400.0


def written(stores: StoreFolders, job: str, sid: str, age_s: float = 0.0) -> Path:
    folder = stores.folder(job, sid)
    folder.mkdir(parents=True)
    file = folder / "store.sqlite"
    file.write_bytes(b"x")
    for path in (file, folder, folder.parent):
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def test_a_jobs_stores_go_with_it_and_no_others(tmp_path: Path) -> None:
    stores = StoreFolders(tmp_path)
    first, second = written(stores, "one", "one-s0-r0"), written(stores, "two", "two-s0-r0")
    stores.drop("one")
    stores.drop("never-was")
    assert not first.parent.exists()
    assert (second / "store.sqlite").exists()


def test_what_nobody_wrote_to_for_long_goes_when_the_agent_starts(tmp_path: Path) -> None:
    stores = StoreFolders(tmp_path)
    old = written(stores, "old", "old-s0-r0", age_s=WEEK_S + 60)
    young = written(stores, "young", "young-s0-r0", age_s=WEEK_S - 3600)
    stores.drop_left_behind()
    assert not old.parent.exists()
    assert young.exists()
    StoreFolders(tmp_path / "none").drop_left_behind()


def test_folders_without_end_in_a_store_keep_no_agent_from_starting(tmp_path: Path) -> None:
    stores = StoreFolders(tmp_path)
    folder = written(stores, "old", "old-s0-r0", age_s=WEEK_S + 60)
    here = os.getcwd()
    try:
        os.chdir(folder)
        for _ in range(3_000):  # more than Python's own calls may be deep
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    stores.drop_left_behind()
    assert folder.exists(), "it was written to just now"
    stores.drop("old")
    assert not folder.parent.exists()


@pytest.mark.parametrize("age_s", [0.0, WEEK_S * 2])
def test_kept_ones_stay(tmp_path: Path, age_s: float) -> None:
    stores = StoreFolders(tmp_path, keep=True)
    folder = written(stores, "one", "one-s0-r0", age_s)
    stores.drop_left_behind()
    stores.drop("one")
    assert folder.exists()


def test_agents_that_share_a_folder_have_each_their_own_part(tmp_path: Path) -> None:
    roots = [
        ClusterConfig(cluster=cluster, node="n", logs=tmp_path / "logs").store_root for cluster in ("a", "b")
    ]
    assert roots == [tmp_path / "stores" / "a-n", tmp_path / "stores" / "b-n"]
    elsewhere = ClusterConfig(cluster="a", node="n", logs=tmp_path / "logs", stores=tmp_path / "fast")
    assert elsewhere.store_root == tmp_path / "fast" / "a-n"
