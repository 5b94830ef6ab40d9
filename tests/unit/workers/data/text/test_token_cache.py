"""Tokens are made once on a node, found again, made again if damaged, given up when there are too many."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import BadData, Unavailable
from tests.builders.text import opened
from tests.patience import PATIENCE_S
from workers.data.storage import node_cache
from workers.data.text.token_cache import TokenCache, TokenCacheConfig
from workers.data.text.token_file import DamagedTokenFile, TokenFile, TokenFileWriter


def write(folder: Path, token: int = 7, count: int = 10) -> None:
    with TokenFileWriter(folder, 300) as writer:
        for _ in range(count):
            writer.add(np.array([token, token + 1], np.uint32))
            writer.end_document()
        writer.finish()


class Making:
    """Counts how often a file was made."""

    def __init__(self, token: int = 7) -> None:
        self.token = token
        self.times = 0

    def __call__(self, folder: Path) -> None:
        self.times += 1
        write(folder, self.token)


def test_a_file_is_made_once(tmp_path: Path) -> None:
    make = Making()
    first, second = (TokenCache(tmp_path).get("key", make) for _ in range(2))
    assert make.times == 1
    assert first.account == second.account
    assert second.tokens.read(0, 20).tolist() == [7, 8] * 10
    assert second.offsets.tolist() == list(range(0, 21, 2))
    assert first.tokens.read(0, 1).dtype == np.uint16


@pytest.mark.parametrize("name", ["blocks.bin", "offsets.bin", "bad.json", "tokens.json"])
def test_a_damaged_file_is_made_again(tmp_path: Path, name: str) -> None:
    make = Making()
    TokenCache(tmp_path).get("key", make)
    path = tmp_path / "key" / name
    content = bytearray(path.read_bytes() or b" ")
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedTokenFile):
        TokenFile.open(tmp_path / "key")
    assert TokenCache(tmp_path).get("key", make).tokens.read(0, 20).tolist() == [7, 8] * 10
    assert make.times == 2


def test_damaged_tokens_are_noticed_when_they_are_used(tmp_path: Path) -> None:
    make = Making()
    file = TokenCache(tmp_path).get("key", make)
    content = bytearray((tmp_path / "key" / "tokens.bin").read_bytes())
    content[-1] ^= 1
    (tmp_path / "key" / "tokens.bin").write_bytes(content)
    with pytest.raises(Unavailable, match=r"tokens.bin was damaged on disk: its tokens are made again"):
        file.tokens.read(0, 2)
    assert TokenCache(tmp_path).get("key", make).tokens.read(0, 20).tolist() == [7, 8] * 10
    assert make.times == 2


def test_many_at_once_make_it_once(tmp_path: Path) -> None:
    make, found = Making(), []
    threads = [
        threading.Thread(target=lambda: found.append(TokenCache(tmp_path).get("key", make))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert make.times == 1
    assert len({each.account.digest for each in found}) == 1


def test_a_killed_writer_leaves_nothing_that_stays(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from workers.data.text.token_cache import TokenCache\n"
        "def make(folder): (folder / 'tokens.bin').write_text('half'); print(flush=True); time.sleep(999)\n"
        "TokenCache(Path(sys.argv[1])).get('key', make)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    assert list(tmp_path.glob("key.new-*"))
    assert TokenCache(tmp_path).get("key", Making()).account.documents == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_what_is_old_or_too_much_goes(tmp_path: Path) -> None:
    for number, name in enumerate(("oldest", "older", "old")):
        TokenCache(tmp_path).get(name, Making())
        os.utime(tmp_path / name, (number + 1, number + 1))
    kept = TokenCache(tmp_path).get("oldest", Making())  # used again
    size = sum(path.stat().st_size for path in (tmp_path / "oldest").iterdir())
    TokenCache(tmp_path, TokenCacheConfig(most_bytes=size, most_age_s=1e12)).get("new", Making())
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["new", "oldest"]
    os.utime(tmp_path / "oldest", (1, 1))
    TokenCache(tmp_path, TokenCacheConfig(most_age_s=3600.0)).get("newer", Making())
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["new", "newer"]
    assert kept.tokens.read(0, 20).tolist() == [7, 8] * 10  # a reader keeps what is removed


def test_a_changed_source_is_read_again(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("x" * 200_000 + "abc" + "x" * 200_000)
    before = opened(source, tmp_path / "spool")
    assert opened(source, tmp_path / "spool").digest == before.digest
    source.write_text("x" * 200_000 + "cba" + "x" * 200_000)
    assert opened(source, tmp_path / "spool").digest != before.digest
    assert len(list((tmp_path / "spool").glob("*.lock"))) == 2


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """This process's part of its node's cache."""
    folder = tmp_path / "shared"
    folder.mkdir()
    node_cache.grant(folder, "reader")
    yield folder
    node_cache.grant(None, "")


def test_processes_of_a_user_share_their_part_of_the_nodes_cache(tmp_path: Path, shared: Path) -> None:
    (tmp_path / "a.txt").write_text("some text of some length")
    for spool in ("one", "other"):
        opened(tmp_path / "a.txt", tmp_path / spool)
        assert not list((tmp_path / spool).iterdir())
    assert len(list((shared / "tokens").glob("*/tokens.json"))) == 1


def test_without_room_in_the_cache_a_process_makes_its_own(tmp_path: Path, shared: Path) -> None:
    (shared / "tokens").write_text("in the way")
    (tmp_path / "a.txt").write_text("some text of some length")
    assert len(opened(tmp_path / "a.txt", tmp_path / "spool")) == 2
    assert len(list((tmp_path / "spool").glob("*/tokens.json"))) == 1


def test_the_bound_is_half_of_what_is_granted(shared: Path) -> None:
    assert TokenCacheConfig.within(shared) == TokenCacheConfig()
    (shared / "limit").write_text("1000")
    assert TokenCacheConfig.within(shared).most_bytes == 500


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: TokenFileWriter, ids: object, counted: object = None) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TokenFileWriter, "add", full)
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(BadData, match=r"the tokens of 9 bytes of text can't be written to .*No space left"):
        opened(tmp_path / "a.txt", tmp_path / "spool")
    assert [path.name for path in (tmp_path / "spool").iterdir() if path.is_dir()] == []
