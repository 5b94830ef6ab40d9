"""`dmsc sync` on a real mesh: jobs from a folder, a change, a roll-back, and what is gone (ADR-0185)."""

from __future__ import annotations

from pathlib import Path

import yaml

from schemas.job import JobState
from tests.integration.dmsc.command_line import wait_for
from tests.integration.mesh.conftest import Mesh, tiny_job

LONG = 100_000


def write(folder: Path, name: str, steps: int) -> None:
    spec = tiny_job(name, training={"steps": steps})
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_unset=True)))


def jobs_of(mesh: Mesh) -> dict[str, list[JobState]]:
    """States of the folder's jobs by name and in the order of their submission."""
    found: dict[str, list[JobState]] = {}
    for record in mesh.client.jobs():
        folder, _, rest = record.spec.name.partition("--")
        if folder == "git-jobs":
            found.setdefault(rest.partition("--")[0], []).append(record.state)
    return found


def test_a_folder_becomes_jobs_and_the_old_file_rolls_back(mesh: Mesh, tmp_path: Path) -> None:
    folder = tmp_path / "git-jobs"
    write(folder, "long", LONG)
    write(folder, "other", LONG + 1)
    assert "would submit git-jobs--long--" in mesh.printed("sync", str(folder), "--dry-run")
    assert jobs_of(mesh) == {}
    first = (folder / "long.yaml").read_text()
    said = mesh.printed("sync", str(folder))
    assert said.count("submitted, it is new") == 2
    assert "2 jobs are as their files say" in mesh.printed("sync", str(folder))

    write(folder, "long", LONG + 2)
    said = mesh.printed("sync", str(folder))
    assert "its file has changed" in said
    assert "long.yaml has changed" in said
    wait_for(lambda: jobs_of(mesh)["long"][0] is JobState.CANCELLED)

    (folder / "long.yaml").write_text(first)
    assert "its file is again as it was before" in mesh.printed("sync", str(folder))
    wait_for(lambda: jobs_of(mesh)["long"][:2] == [JobState.CANCELLED] * 2)
    assert len(jobs_of(mesh)["long"]) == 3

    (folder / "other.yaml").unlink()
    (folder / "bad.yaml").write_text("name: bad\nmodle: x\n")
    refused = mesh.dmsc("sync", str(folder), "--prune")
    assert refused.returncode == 2
    assert "bad.yaml:2: modle: unknown key; did you mean model?" in refused.stderr
    assert jobs_of(mesh)["other"][0] is not JobState.CANCELLED, "nothing is done while a file is wrong"
    (folder / "bad.yaml").unlink()
    (folder / "long.yaml").unlink()
    assert mesh.printed("sync", str(folder)).strip() == "git-jobs: 0 jobs are as their files say"
    said = mesh.printed("sync", str(folder), "--prune")
    assert "git-jobs has no job other any more" in said
    ended = [JobState.CANCELLED]
    wait_for(lambda: jobs_of(mesh) == {"long": ended * 3, "other": ended})
