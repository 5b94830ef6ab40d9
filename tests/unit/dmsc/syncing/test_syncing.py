"""`dmsc sync`: which jobs are submitted and cancelled for a folder of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmsc.syncing.job_folder import FolderJob, job_name, read_folder
from dmsc.syncing.sync_plan import parts_of, plan
from schemas.errors import BadInput, BadJob
from schemas.job import JobRecord, JobSpec, JobState

FOLDER = "jobs"
JOB = "name: {name}\nmodel: {{factory: 'm:f'}}\ntraining: {{steps: {steps}}}\n"


def write(folder: Path, name: str, steps: int = 5) -> None:
    (folder / f"{name}.yaml").write_text(JOB.format(name=name, steps=steps))


def record(number: int, job: FolderJob, state: JobState = JobState.RUNNING) -> JobRecord:
    return JobRecord(job=f"j{number}", spec=job.spec, state=state, submitted_at=number, changed_at=number)


def read(folder: Path) -> tuple[FolderJob, ...]:
    return read_folder(folder, FOLDER)


def test_a_new_file_is_submitted_once_and_a_changed_one_takes_the_place_of_the_one_before(
    tmp_path: Path,
) -> None:
    write(tmp_path, "a")
    (first,) = read(tmp_path)
    todo = plan([first], [], FOLDER, prune=False)
    assert [each.job for each in todo.submit] == [first]
    again = plan([first], [record(1, first, JobState.FAILED)], FOLDER, prune=True)
    assert (again.submit, again.cancel, again.kept) == ((), (), ("j1",))

    write(tmp_path, "a", steps=9)
    (second,) = read(tmp_path)
    todo = plan([second], [record(1, first)], FOLDER, prune=False)
    assert [each.job.name for each in todo.submit] == [second.name]
    assert [(each.job, each.reason) for each in todo.cancel] == [("j1", "a.yaml has changed")]
    assert plan([second], [record(1, first, JobState.DONE)], FOLDER, prune=False).cancel == ()


def test_a_file_that_was_put_back_is_a_new_job_with_a_key_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "a")
    (first,) = read(tmp_path)
    write(tmp_path, "a", steps=9)
    (second,) = read(tmp_path)
    ended = record(1, first, JobState.CANCELLED)
    todo = plan([first], [ended, record(2, second)], FOLDER, prune=False)
    (back,) = todo.submit
    assert back.reason == "its file is again as it was before j2"
    assert back.key != plan([first], [], FOLDER, prune=False).submit[0].key
    assert back.key == plan([first], [record(2, second), ended], FOLDER, prune=False).submit[0].key
    assert [each.job for each in todo.cancel] == ["j2"]
    synced = plan(
        [first], [ended, record(2, second, JobState.CANCELLED), record(3, first)], FOLDER, prune=True
    )
    assert (synced.submit, synced.cancel) == ((), ())


def test_only_what_the_folder_had_is_pruned(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b-x")
    gone, kept = read(tmp_path)
    foreign = kept.spec.model_copy(update={"name": job_name("others", "b-x", kept.digest)})
    own = kept.spec.model_copy(update={"name": "by-hand"})
    records = [
        record(1, gone),
        record(2, kept),
        record(3, kept).model_copy(update={"spec": foreign}),
        record(4, kept).model_copy(update={"spec": own}),
    ]
    assert plan([kept], records, FOLDER, prune=False).cancel == ()
    (cancelled,) = plan([kept], records, FOLDER, prune=True).cancel
    assert (cancelled.job, cancelled.reason) == ("j1", "jobs has no job a any more")


def test_a_digest_is_of_what_the_file_says_and_of_its_code(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "m.py").write_text("x = 1\n")
    text = JOB.format(name="a", steps=5)
    (tmp_path / "a.yaml").write_text(f"# a remark\n{text}code: code\n")
    (with_code,) = read(tmp_path)
    (tmp_path / "code" / "m.py").write_text("x = 2\n")
    (changed,) = read(tmp_path)
    assert changed.digest != with_code.digest
    (tmp_path / "a.yaml").write_text(f"{text}code: code\n")
    assert read(tmp_path)[0].digest == changed.digest
    assert parts_of(changed.name, FOLDER) == ("a", changed.digest)
    assert JobSpec.model_validate(changed.spec.model_dump()).name == changed.name


def test_bad_files_are_all_told_before_anything_is_asked(tmp_path: Path) -> None:
    write(tmp_path, "a")
    (tmp_path / "b.yaml").write_text("name: b\nmodle: x\n")
    (tmp_path / "c.yaml").write_text("- 1\n")
    with pytest.raises(BadJob) as caught:
        read(tmp_path)
    assert "b.yaml" in caught.value.text
    assert "c.yaml" in caught.value.text
    with pytest.raises(BadInput, match="No such file or directory: give a folder"):
        read(tmp_path / "none")


def test_two_files_with_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a")
    (tmp_path / "b.yaml").write_text(JOB.format(name="a", steps=7))
    with pytest.raises(BadInput, match=r"called as that of a\.yaml: change its `name`"):
        read(tmp_path)
