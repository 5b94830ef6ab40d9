"""Draft §6: the store beside a working instance: its thread, damage, a full or missing disk, SIGKILL."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog

from schemas.errors import BadInput, Unavailable
from schemas.step import Member
from schemas.store import StoreQuery, StoreTable
from workers.local_store import local_store
from workers.local_store.local_store import LocalStore, LocalStoreTimes, fold
from workers.local_store.store_file import FILE_NAME, StoreFile
from workers.local_store.store_schema import StoreLimits

ONE, TWO = (Member(sid="job-s0-r0", incarnation=name) for name in ("one", "two"))


def ask(table: StoreTable = "events", **fields: object) -> StoreQuery:
    return StoreQuery.model_validate({"job": "job", "table": table, **fields})


async def steps(store: LocalStore, **fields: object) -> list[Any]:
    found = await store.query(ask(columns=("step",), where={"kind": "test"}, limit=1000, **fields))
    return [row[0] for row in found.rows]


def note(store: LocalStore, number: int, text: str = "") -> None:
    store.add("events", {"kind": "test", "step": number, "text": text})


async def test_a_question_sees_what_was_recorded_before_it(tmp_path: Path) -> None:
    async with LocalStore(tmp_path, ONE) as store:
        for number in range(100):
            note(store, number)
            assert await steps(store, newest=True) == list(range(number + 1))
        answer = await store.query(ask(newest=True, limit=1))
        assert (answer.member, answer.schema_version) == (ONE, 1)
        assert answer.records()[0]["incarnation"] == "one"


async def test_the_next_incarnation_finds_what_the_former_wrote(tmp_path: Path) -> None:
    async with LocalStore(tmp_path, ONE) as store:
        note(store, 1, "the last word")
    async with LocalStore(tmp_path, TWO) as store:
        note(store, 2)
        answer = await store.query(ask(columns=("id", "incarnation", "kind", "text")))
    assert [row[1:3] for row in answer.rows] == [
        ("one", "store"),
        ("one", "test"),
        ("two", "store"),
        ("two", "test"),
    ]
    assert [row[0] for row in answer.rows] == [1, 2, 3, 4]
    assert answer.rows[2][3] == "goes on after incarnation one, whose last event was test: the last word"


async def test_all_that_was_recorded_is_there_after_the_end(tmp_path: Path) -> None:
    async with LocalStore(tmp_path, ONE, times=LocalStoreTimes(commit_s=3600)) as store:
        for number in range(1000):
            note(store, number)
    async with LocalStore(tmp_path, TWO) as store:
        assert await steps(store) == list(range(1000))
    assert not (tmp_path / f"{FILE_NAME}-wal").exists(), "the log was worked into the file"


async def test_any_thread_may_record(tmp_path: Path) -> None:
    async with LocalStore(tmp_path, ONE) as store:
        threads = [
            threading.Thread(target=lambda first: [note(store, first + n) for n in range(50)], args=(50 * k,))
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(await steps(store)) == list(range(200))


async def test_a_wrong_question_is_answered_with_its_error_and_the_next_one_as_usual(tmp_path: Path) -> None:
    async with LocalStore(tmp_path, ONE) as store:
        with pytest.raises(BadInput, match="no column"):
            await store.query(ask(columns=("nothing",)))
        note(store, 1)
        assert await steps(store) == [1]


async def test_without_a_folder_nothing_is_kept_and_questions_are_refused() -> None:
    async with LocalStore(None, ONE) as store:
        note(store, 1)
        with pytest.raises(Unavailable, match="job-s0-r0 keeps no local store"):
            await store.query(ask())


async def test_a_value_that_cannot_be_told_costs_its_own_row(tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise ValueError("a sample without a step")

    async with LocalStore(tmp_path, ONE) as store:
        note(store, 1)
        store.add("metrics", broken)
        note(store, 2)
        assert await steps(store) == [1, 2]


# --- a disk that can't be used ------------------------------------------------------------------------
async def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with structlog.testing.capture_logs() as lines:
        async with LocalStore(
            tmp_path / "file" / "store", ONE, times=LocalStoreTimes(commit_s=0.001)
        ) as store:
            for number in range(20):
                note(store, number)
                with pytest.raises(Unavailable, match="the local store of job-s0-r0 can't be used now: "):
                    await store.query(ask())
    warned = [line for line in lines if line["log_level"] == "warning"]
    assert [line["event"] for line in warned] == ["local store can't be written, rows wait"]


async def test_rows_wait_for_the_disk_and_come_in_order(tmp_path: Path) -> None:
    blocker = tmp_path / "store"
    blocker.write_text("in the way")
    with structlog.testing.capture_logs() as lines:
        async with LocalStore(blocker, ONE, times=LocalStoreTimes(reopen_s=0.0)) as store:
            note(store, 1)
            with pytest.raises(Unavailable):
                await store.flush()
            note(store, 2)
            blocker.unlink()
            await store.flush()
            note(store, 3)
            assert await steps(store) == [1, 2, 3]
    assert "local store is written again" in [line["event"] for line in lines]


async def test_a_queue_that_is_full_drops_metrics_first_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_store, "PENDING_ROWS", 10)
    blocker = tmp_path / "store"
    blocker.write_text("in the way")
    async with LocalStore(blocker, ONE, times=LocalStoreTimes(reopen_s=0.0)) as store:
        for number in range(15):
            note(store, number)
        store.add("metrics", {"step": 1})
        for number in range(15, 30):
            note(store, number)
        assert store.dropped == 11
        blocker.unlink()
        await store.flush()
        assert await steps(store) == list(range(20))
        assert (await store.query(ask("metrics"))).rows == ()
        lost = await store.query(ask(columns=("text",), where={"kind": "lost"}))
        assert lost.rows == (("11 rows found no room while the disk was slow",),)


async def test_a_store_that_somebody_locks_is_written_once_it_is_free(tmp_path: Path) -> None:
    import sqlite3

    async with LocalStore(tmp_path, ONE) as store:
        await store.flush()
        holder = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        note(store, 1)
        with pytest.raises(Unavailable, match="locked"):
            await store.flush()
        holder.execute("COMMIT")
        holder.close()
        await store.flush()
        assert await steps(store) == [1]


# --- damage -------------------------------------------------------------------------------------------
def torn(path: Path, part: float) -> None:
    os.truncate(path, int(path.stat().st_size * part))


def noise(path: Path, part: float) -> None:
    with path.open("r+b") as file:
        file.seek(int(path.stat().st_size * part))
        file.write(b"\xa5" * 700)


def zeros(path: Path, part: float) -> None:
    with path.open("r+b") as file:
        file.seek(int(path.stat().st_size * part) // 4096 * 4096)
        file.write(bytes(4096))


DAMAGES = [
    *((torn, part) for part in (0.0, 0.001, 0.01, 0.05, 0.2, 0.31, 0.5, 0.77, 0.95, 0.999)),
    *((noise, part) for part in (0.0, 0.0003, 0.002, 0.02, 0.1, 0.25, 0.4, 0.6, 0.8, 0.9, 0.99)),
    *((zeros, part) for part in (0.0, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9)),
]


@pytest.mark.parametrize(
    ("damage", "part"), DAMAGES, ids=[f"{damage.__name__}-{part}" for damage, part in DAMAGES]
)
async def test_a_damaged_file_never_stops_an_instance(tmp_path: Path, damage: Any, part: float) -> None:
    """Either its rows can be read, or the file is aside, one line says so, and it goes on."""
    async with LocalStore(tmp_path, ONE) as store:
        for number in range(400):
            note(store, number, "t" * 200)
    before = (tmp_path / FILE_NAME).read_bytes()
    damage(tmp_path / FILE_NAME, part)
    assert (tmp_path / FILE_NAME).read_bytes() != before, "nothing was damaged"
    with structlog.testing.capture_logs() as lines:
        async with LocalStore(tmp_path, TWO) as store:
            note(store, 1000)
            for table in ("events", "audit", "metrics"):
                with_luck = ask(table, limit=1000)  # a page that no check reads may still be met here
                try:
                    await store.query(with_luck)
                except Unavailable:
                    await store.query(with_luck)
            note(store, 1001)
            assert (await steps(store, newest=True))[-1] == 1001
    problems = [line for line in lines if line["log_level"] in ("warning", "error")]
    aside = (tmp_path / f"{FILE_NAME}.damaged").exists()
    assert len(problems) == (1 if aside else 0), problems
    if aside:
        assert problems[0]["event"] == "local store was damaged: moved aside, begun anew"
        assert problems[0]["sid"] == "job-s0-r0"
        assert problems[0]["reason"]
    async with LocalStore(tmp_path, ONE) as store:  # and what is there now is whole
        assert 1001 in await steps(store, newest=True)


async def test_damage_under_a_working_instance_costs_one_question_at_most(tmp_path: Path) -> None:
    async with LocalStore(tmp_path, ONE) as store:
        for number in range(2000):
            note(store, number, "t" * 200)
        await store.flush()
        for suffix in ("", "-wal"):
            path = tmp_path / f"{FILE_NAME}{suffix}"
            path.write_bytes(b"\xa5" * path.stat().st_size)
        failures = 0
        for number in itertools.count(5000):
            note(store, number)
            try:
                found = await steps(store, newest=True)
            except Unavailable:
                failures += 1
                assert failures < 3
                continue
            if number > 5010:
                break
        assert found[-1] == number
    async with LocalStore(tmp_path, TWO) as store:
        assert number in await steps(store, newest=True)


# --- SIGKILL ------------------------------------------------------------------------------------------
WRITER = """
import asyncio, itertools, sys
from pathlib import Path
from schemas.step import Member
from workers.local_store.local_store import LocalStore

async def main(folder, incarnation, first):
    async with LocalStore(Path(folder), Member(sid="job-s0-r0", incarnation=incarnation)) as store:
        for number in itertools.count(int(first)):
            store.add("events", {"kind": "test", "step": number, "text": "t" * 500})
            store.add("metrics", {"step": number, "links": "l" * 500})
            if number % 5 == 4:
                await store.flush()
                print(number, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("told", [1, 30, 200])
def test_a_writer_killed_at_any_moment_loses_nothing_that_was_committed(tmp_path: Path, told: int) -> None:
    first = 0
    for incarnation in ("one", "two"):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), incarnation, str(first)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        for _ in range(told):
            committed = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        committed = max([committed, *map(int, writer.stdout.read().split(b"\n")[:-1])])
        assert writer.wait() == -signal.SIGKILL, "it was not killed in the middle"
        writer.stdout.close()
        file = StoreFile(tmp_path, StoreLimits(answer_bytes=1 << 30))
        assert file.open() == "", "a kill must not damage it"
        found: list[Any] = []
        page = file.read(ask(columns=("step",), where={"kind": "test"}, limit=1000))
        while page.rows:
            found += [row[0] for row in page.rows]
            page = file.read(
                ask(columns=("step",), where={"kind": "test"}, after_id=page.last_id, limit=1000)
            )
        file.close()
        assert found == sorted(set(found)) == list(range(len(found)))
        assert found[-1] >= committed
        first = found[-1] + 1


# --- what is written ----------------------------------------------------------------------------------
def test_obeyed_orders_of_a_batch_are_folded_and_refused_ones_are_not() -> None:
    def audit(step: int, outcome: str = "obeyed", what: str = "step commit") -> Any:
        return "audit", {
            "at": 1.0 + step,
            "sender": "orchestrator",
            "sender_incarnation": "o",
            "what": what,
            "epoch": 1,
            "step": step,
            "outcome": outcome,
            "reason": "" if outcome == "obeyed" else "fenced",
            "took_ms": 2.0,
        }

    event = ("events", {"kind": "x"})
    rows = fold([audit(1), audit(1, "refused"), event, audit(2), audit(2, what="export"), audit(3)])
    assert [(table, values.get("step"), values.get("count")) for table, values in rows] == [
        ("audit", 3, 3),
        ("audit", 1, None),
        ("events", None, None),
        ("audit", 2, 1),
    ]
    assert (rows[0][1]["took_ms"], rows[0][1]["at"]) == (6.0, 4.0)
    assert fold(rows) == rows, "what waited for the disk is folded twice"


async def test_too_many_questions_at_once_are_refused(tmp_path: Path) -> None:
    async with LocalStore(tmp_path, ONE) as store:
        await store.flush()
        asked = [asyncio.create_task(store.query(ask())) for _ in range(200)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, Unavailable)]
    assert refused, "the bound was never met"
    assert "questions wait" in refused[0].text
    assert len(refused) < 200
