"""What Argo CD would apply: the hook keeps to the schemas, and its folder's jobs are good."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dmsc.syncing.job_folder import read_folder
from tests.kubernetes.strict_schemas import VERSIONS, errors_of

FOLDER = Path(__file__).parents[3] / "deploy" / "argocd"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_hook_keeps_to_the_schemas(version: str) -> None:
    assert errors_of(yaml.safe_load((FOLDER / "jobs" / "sync.yaml").read_text()), version) == []


def test_the_folder_has_jobs_and_names_each_of_them(tmp_path: Path) -> None:
    (generator,) = yaml.safe_load((FOLDER / "jobs" / "kustomization.yaml").read_text())["configMapGenerator"]
    for name in generator["files"]:
        (tmp_path / name).write_text((FOLDER / "jobs" / name).read_text())
    others = {"kustomization.yaml", "sync.yaml"}
    assert {file.name for file in (FOLDER / "jobs").iterdir()} - others == set(generator["files"])
    assert [job.name.split("--")[:2] for job in read_folder(tmp_path, "git")] == [["git", "byte-gpt"]]


def test_the_applications_are_of_this_repositorys_folders() -> None:
    documents = list(yaml.safe_load_all((FOLDER / "mesh.yaml").read_text()))
    paths = [document["spec"]["source"]["path"] for document in documents]
    assert [(FOLDER.parents[1] / path).is_dir() for path in paths] == [True, True]
