"""A job file's mistakes are lines with a place and a remedy (issue: bad input)."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmsc.client.job_file import load_job
from schemas.errors import BadJob

GOOD = """\
name: tiny
model: {factory: "a.b:c"}
training:
  steps: 4
  optimizer:
    lr: 3e-4
parallel:
  stages: 2
  replicas: [1, 2]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def lines(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(BadJob) as caught:
        load_job(write(folder, text), overrides)
    return [line.replace(str(folder) + "/", "") for line in str(caught.value).splitlines()]


def test_a_good_file_is_read_with_numbers_as_people_write_them(tmp_path: Path) -> None:
    spec = load_job(write(tmp_path, GOOD))
    assert spec.training.optimizer.lr == 3e-4
    assert spec.parallel.replicas_per_stage() == (1, 2)


def test_exponents_without_a_dot_are_numbers_also_where_anything_goes(tmp_path: Path) -> None:
    spec = load_job(write(tmp_path, GOOD), ["model.args={rate: 1e-3, big: 1E6, name: e3, port: 12}"])
    assert spec.model.args == {"rate": 1e-3, "big": 1e6, "name": "e3", "port": 12}


def test_set_overrides_and_makes_keys(tmp_path: Path) -> None:
    spec = load_job(write(tmp_path, GOOD), ["training.steps=9", "data.sample_tokens=32", "training.steps=10"])
    assert (spec.training.steps, spec.data.sample_tokens) == (10, 32)


def test_a_colon_makes_no_map_of_an_overrides_value(tmp_path: Path) -> None:
    spec = load_job(write(tmp_path, GOOD), ["data.source=stdlib:", "model.args={c: {d: 1}}"])
    assert (spec.data.source, spec.model.args) == ("stdlib:", {"c": {"d": 1}})


def test_json_works_as_well(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"name": "j", "model": {"factory": "a:b"}, "training": {"steps": 1}}')
    assert load_job(path).name == "j"


def test_each_problem_is_one_line_with_its_place(tmp_path: Path) -> None:
    text = GOOD.replace("steps: 4", "steps: ten").replace("    lr:", "    learning: 1\n    lr:")
    assert lines(tmp_path, text) == [
        "job.yaml:4: training.steps: 'ten' does not fit; give a whole number ≥ 1",
        "job.yaml:6: training.optimizer.learning: unknown key;"
        " training.optimizer has name, lr, betas, eps, weight_decay, factory, args, groups",
    ]


def test_a_wrong_key_is_corrected(tmp_path: Path) -> None:
    assert lines(tmp_path, GOOD.replace("  steps:", "  stepz:")) == [
        "job.yaml:3: training.steps: missing; give a whole number ≥ 1",
        "job.yaml:4: training.stepz: unknown key; did you mean training.steps?",
    ]


def test_an_impossible_shape_is_named(tmp_path: Path) -> None:
    assert lines(tmp_path, GOOD.replace("stages: 2", "stages: 3")) == [
        "job.yaml:7: parallel: replicas names 2 stages, but stages is 3"
    ]


def test_an_override_is_blamed_itself(tmp_path: Path) -> None:
    assert lines(tmp_path, GOOD, "training.steps=0") == [
        "--set training.steps=0: training.steps: 0 does not fit; give a whole number ≥ 1"
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.steps", "--set training.steps: write it as key.path=value"),
        ("=3", "--set =3: write it as key.path=value"),
        ("name.x=3", "--set name.x=3: name is a value ('tiny'), it has no keys below it"),
        ("training.steps=[1", "--set training.steps=[1: the value is not YAML"),
    ],
)
def test_a_malformed_override(tmp_path: Path, override: str, expected: str) -> None:
    (line,) = lines(tmp_path, GOOD, override)
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "job.yaml: the file is empty"),
        ("- a\n", "job.yaml:1: a job is a mapping of keys"),
        ("a: [1\nb: 2\n", "job.yaml:2: not YAML"),
        ("name: a\nname: b\n", "job.yaml:2: name: already given on line 1; keep one of them"),
        ("name: !!python/name:os.system\n", "job.yaml: could not determine a constructor"),
    ],
)
def test_what_is_no_job_at_all(tmp_path: Path, text: str, expected: str) -> None:
    (line,) = lines(tmp_path, text)
    assert line.startswith(expected)


def test_a_missing_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(BadJob, match=r"none\.yaml: No such file"):
        load_job(tmp_path / "none.yaml")
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadJob, match="not UTF-8"):
        load_job(path)
