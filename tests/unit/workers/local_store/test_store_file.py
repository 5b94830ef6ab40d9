"""Draft §6: the file of a local store: what was committed is found again, and its bounds hold."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import BadInput
from schemas.store import StoreQuery, StoreTable
from workers.local_store.store_file import FILE_NAME, Row, StoreFile
from workers.local_store.store_schema import COLUMNS, ROWS, StoreLimits


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreFile]:
    file = StoreFile(tmp_path / "job" / "sid", StoreLimits())
    assert file.open() == ""
    yield file
    file.close()


def event(number: int, text: str = "x", incarnation: str = "one") -> Row:
    return "events", {
        "at": 1000.0 + number,
        "incarnation": incarnation,
        "kind": "test",
        "step": number,
        "text": text,
    }


def ask(table: StoreTable = "events", **fields: object) -> StoreQuery:
    return StoreQuery.model_validate({"job": "job", "table": table, **fields})


def steps(file: StoreFile, **fields: object) -> list[object]:
    return [row[0] for row in file.read(ask(columns=("step",), **fields)).rows]


# --- questions ----------------------------------------------------------------------------------------
def test_rows_are_read_in_the_order_in_which_they_were_written(store: StoreFile) -> None:
    store.write([event(number) for number in range(5)])
    found = store.read(ask())
    assert found.columns == tuple(COLUMNS["events"])
    assert [row[found.columns.index("step")] for row in found.rows] == [0, 1, 2, 3, 4]
    assert (found.last_id, found.truncated) == (5, False)


def test_a_question_is_narrowed_by_columns_equality_time_and_id(store: StoreFile) -> None:
    store.write([event(number, text="even" if number % 2 == 0 else "odd") for number in range(10)])
    assert steps(store, where={"text": "even"}) == [0, 2, 4, 6, 8]
    assert steps(store, where={"text": "even", "step": 4}) == [4]
    assert steps(store, where={"step": "4"}) == [4], "a command line knows only texts"
    assert steps(store, where={"step": None}) == []
    assert steps(store, since=1008.0) == [8, 9]
    assert steps(store, after_id=9) == [9]
    assert store.read(ask(columns=("text", "id"), after_id=9)).rows == (("odd", 10),)


def test_paging_by_the_last_id_gives_every_row_once(store: StoreFile) -> None:
    store.write([event(number) for number in range(10)])
    seen: list[object] = []
    last, truncated = 0, True
    while truncated:
        found = store.read(ask(columns=("step",), after_id=last, limit=3))
        seen += [row[0] for row in found.rows]
        last, truncated = found.last_id, found.truncated
    assert seen == list(range(10))


def test_newest_gives_the_last_rows_oldest_first(store: StoreFile) -> None:
    store.write([event(number) for number in range(10)])
    found = store.read(ask(columns=("step",), newest=True, limit=3))
    assert found.rows == ((7,), (8,), (9,))
    assert (found.last_id, found.truncated) == (10, True)


def test_an_answer_is_bounded_in_bytes_and_says_so(tmp_path: Path) -> None:
    file = StoreFile(tmp_path, StoreLimits(answer_bytes=4096))
    file.open()
    file.write([event(number, text="y" * 1000) for number in range(20)])
    first = file.read(ask())
    assert 1 <= len(first.rows) <= 4
    assert first.truncated
    assert len(file.read(ask(after_id=first.last_id)).rows) >= 1, "and goes on from there"
    file.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"columns": ("step; DROP TABLE events",)},
        {"columns": ('step" FROM audit --',)},
        {"where": {"1=1 OR text": "x"}},
        {"where": {"rowid": 1}},
    ],
)
def test_a_name_that_is_no_column_is_refused_with_those_that_are(
    store: StoreFile, fields: dict[str, object]
) -> None:
    store.write([event(0)])
    with pytest.raises(BadInput, match=r"events has no column .*there are: id, at, incarnation, kind"):
        store.read(ask(**fields))
    assert steps(store) == [0]


def test_a_value_is_never_taken_for_sql(store: StoreFile) -> None:
    store.write([event(0, text="'; DELETE FROM events; --"), event(1)])
    assert steps(store, where={"text": "'; DELETE FROM events; --"}) == [0]
    assert steps(store, where={"text": "x' OR 'a'='a"}) == []
    assert steps(store) == [0, 1]


def test_a_question_for_another_table_is_no_message() -> None:
    with pytest.raises(ValueError, match="table"):
        ask("sqlite_master")


def test_whatever_a_message_may_carry_can_be_kept(store: StoreFile) -> None:
    values = {"at": 1.0, "incarnation": "one", "kind": "\ud800", "step": 1 << 70, "text": "z" * 100_000}
    store.write([("events", values), ("versions", {"at": 2.0, "incarnation": "one", "clip": float("nan")})])
    _, _, _, kind, step, text = store.read(ask()).rows[0]
    assert (kind, step) == ("?", float(1 << 70))
    assert isinstance(text, str)
    assert len(text) == 32 << 10
    assert text.endswith("…")
    assert store.read(ask("versions", columns=("clip",))).rows == ((None,),)


# --- bounds -------------------------------------------------------------------------------------------
def test_of_each_table_the_oldest_rows_go_beyond_its_bound(tmp_path: Path) -> None:
    file = StoreFile(tmp_path, StoreLimits(rows={**ROWS, "events": 10}))
    file.open()
    for number in range(25):
        file.write([event(number)])
    assert steps(file) == list(range(15, 25))
    assert file.read(ask(columns=("id",))).rows[-1] == (25,), "an id is never given twice"
    file.close()


def test_beyond_the_bytes_metrics_go_first_and_audit_last(tmp_path: Path) -> None:
    bound = 256 << 10
    file = StoreFile(tmp_path, StoreLimits(max_bytes=bound))
    file.open()
    common = {"at": 1.0, "incarnation": "one"}
    tables: list[StoreTable] = ["metrics", "versions", "events", "configuration", "snapshots", "audit"]
    text = {
        "metrics": "links",
        "versions": "checksum",
        "events": "text",
        "configuration": "value",
        "snapshots": "url",
        "audit": "reason",
    }

    def fill(table: StoreTable, rows: int) -> None:
        file.write([(table, {**common, text[table]: "t" * 300}) for _ in range(rows)])

    def count(table: StoreTable) -> int:
        return len(file.read(ask(table, columns=("id",), limit=1000)).rows)

    for table in tables:
        fill(table, 100)
    assert [count(table) for table in tables] == [100] * 6
    given = 100
    seen: set[int] = set()
    while count("audit") == given:  # until the audit itself has to give way
        sizes = [count(table) for table in tables[:5]]
        cut = [place for place, left in enumerate(sizes) if left < 100]
        assert all(sizes[place] == 0 for place in cut[:-1]), "one was given up before those before it were"
        assert cut == list(range(len(cut)))
        seen.add(len(cut))
        assert file.path.stat().st_size < 2 * bound
        fill("audit", 10)
        given += 10
    assert len(seen) > 3, "they went one after the other"
    assert [count(table) for table in tables[:5]] == [0] * 5
    assert given > 500
    file.close()
    assert file.path.stat().st_size <= bound, "the space was given back to the file system"


# --- torn writes --------------------------------------------------------------------------------------
BATCH, BATCHES = 7, 12


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as a machine finds it after a crash: the file, and a log that was not worked into it."""
    writing, left = tmp_path_factory.mktemp("writing"), tmp_path_factory.mktemp("left")
    file = StoreFile(writing, StoreLimits())
    file.open()
    for batch in range(BATCHES):
        file.write([event(batch * BATCH + number, text="t" * 200) for number in range(BATCH)])
    for path in writing.iterdir():
        shutil.copy(path, left)
    file.close()
    assert (left / f"{FILE_NAME}-wal").stat().st_size > 40 * 4096
    return left


def copy_of(crashed: Path, to: Path) -> Path:
    shutil.copytree(crashed, to)
    (to / f"{FILE_NAME}-shm").unlink()  # shared memory: it is gone with the last process
    return to


def test_after_a_crash_all_that_was_committed_is_there(crashed: Path, tmp_path: Path) -> None:
    file = StoreFile(copy_of(crashed, tmp_path / "copy"), StoreLimits())
    assert file.open() == ""
    assert steps(file, limit=1000) == list(range(BATCH * BATCHES))
    file.close()


@pytest.mark.parametrize("part", range(0, 100, 4))
def test_a_log_torn_anywhere_costs_whole_batches_from_its_end(
    crashed: Path, tmp_path: Path, part: int
) -> None:
    folder = copy_of(crashed, tmp_path / "copy")
    log = folder / f"{FILE_NAME}-wal"
    size = log.stat().st_size
    with log.open("r+b") as torn:
        torn.truncate(size * part // 100)
    file = StoreFile(folder, StoreLimits())
    file.open()
    kept = steps(file, limit=1000)
    assert kept == list(range(len(kept)))
    assert len(kept) % BATCH == 0, "half a batch was taken for a whole one"
    assert len(kept) < BATCH * BATCHES, "the log was never torn"
    file.write([event(999)])
    assert steps(file, newest=True, limit=1) == [999]
    file.close()


@pytest.mark.parametrize("part", range(2, 100, 7))
def test_noise_in_the_log_ends_it_there(crashed: Path, tmp_path: Path, part: int) -> None:
    folder = copy_of(crashed, tmp_path / "copy")
    log = folder / f"{FILE_NAME}-wal"
    with log.open("r+b") as torn:
        torn.seek(log.stat().st_size * part // 100)
        torn.write(b"\xa5" * 512)
    file = StoreFile(folder, StoreLimits())
    file.open()
    kept = steps(file, limit=1000)
    assert kept == list(range(len(kept)))
    assert len(kept) < BATCH * BATCHES, "the noise hit nothing"
    file.close()


def test_a_file_of_another_schema_is_moved_aside_whole(tmp_path: Path) -> None:
    file = StoreFile(tmp_path, StoreLimits())
    file.open()
    file.write([event(1)])
    file.close()
    db = sqlite3.connect(file.path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    assert file.open() == "the file is of schema 99, not 1"
    assert steps(file) == []
    file.close()
    db = sqlite3.connect(file.aside)
    assert db.execute("SELECT step FROM events").fetchall() == [(1,)]
    db.close()


def test_somebody_elses_database_is_not_written_to(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / FILE_NAME)
    db.execute("CREATE TABLE mine (x)")
    db.commit()
    db.close()
    file = StoreFile(tmp_path, StoreLimits())
    assert file.open() == "the file is no local store"
    file.close()
    db = sqlite3.connect(file.aside)
    assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]
    db.close()


def test_two_incarnations_may_write_at_the_same_time(tmp_path: Path) -> None:
    """A former one that is being ended holds the file for a moment."""
    former, present = StoreFile(tmp_path, StoreLimits()), StoreFile(tmp_path, StoreLimits())
    former.open()
    former.write([event(1, incarnation="former")])
    present.open()
    present.write([event(2, incarnation="present")])
    former.write([event(3, incarnation="former")])
    assert steps(present) == [1, 2, 3]
    assert steps(former, where={"incarnation": "present"}) == [2]
    former.close()
    present.close()
