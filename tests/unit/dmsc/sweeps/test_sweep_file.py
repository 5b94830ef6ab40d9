"""Sweep files: what is refused, in one line with its place, and which trials a file stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dmsc.sweeps.sweep_file import ParameterRange, Sweep, load_sweep
from dmsc.sweeps.trials import array_spec, trials_of
from schemas.arrays import member_specs
from schemas.errors import BadJob
from tests.builders.jobs import document

LR = "training.optimizer.lr"


def sweep(folder: Path, **keys: Any) -> Sweep:
    (folder / "job.yaml").write_text(yaml.safe_dump(document(training={"steps": 400, "validate_every": 50})))
    path = folder / "lr.yaml"
    path.write_text(yaml.safe_dump({"base": "job.yaml", "parameters": {LR: [0.1, 0.2]}} | keys))
    return load_sweep(path)


def test_a_grid_has_every_combination(tmp_path: Path) -> None:
    found = trials_of(sweep(tmp_path, parameters={LR: [0.1, 0.2], "training.seed": [1, 2, 3]}))
    assert [tuple(trial.values.values()) for trial in found] == [
        *((0.1, 1), (0.1, 2), (0.1, 3)),
        *((0.2, 1), (0.2, 2), (0.2, 3)),
    ]
    assert (found[4].spec.training.optimizer.lr, found[4].spec.training.seed) == (0.2, 2)
    assert found[4].spec.training.steps == 400


def test_a_drawn_trial_depends_on_seed_and_number_only(tmp_path: Path) -> None:
    wide = {"min": 1e-4, "max": 1e-1, "log": True}
    parameters = {
        LR: wide,
        "training.microbatches": {"min": 2, "max": 4, "int": True},
        "training.seed": [0, 1],
    }
    keys = {"method": "random", "parameters": parameters, "seed": 3}
    few = trials_of(sweep(tmp_path, trials=4, **keys))
    many = trials_of(sweep(tmp_path, trials=40, **keys))
    assert [trial.values for trial in many[:4]] == [trial.values for trial in few]
    assert [trial.values for trial in trials_of(sweep(tmp_path, trials=4, **keys | {"seed": 4}))] != [
        trial.values for trial in few
    ]
    rates = [trial.spec.training.optimizer.lr for trial in many]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    assert 5 < sum(rate < 3.2e-3 for rate in rates) < 35, "even by ratio"
    assert {trial.spec.training.microbatches for trial in many} == {2, 3, 4}


def test_a_ranges_points() -> None:
    assert ParameterRange(min=1e-3, max=1e-1, log=True, points=3).grid() == (0.001, 0.01, 0.1)
    assert ParameterRange(min=1, max=4, whole=True, points=4).grid() == (1, 2, 3, 4)
    assert ParameterRange(min=0, max=1, points=3).grid() == (0.0, 0.5, 1.0)


def test_another_file_is_another_sweep_but_not_another_width(tmp_path: Path) -> None:
    first = sweep(tmp_path)
    assert sweep(tmp_path, max_parallel=9).digest == first.digest
    assert sweep(tmp_path, parameters={LR: [0.1, 0.3]}).digest != first.digest


def test_a_sweep_has_the_code_of_its_folder_wherever_that_lies(tmp_path: Path) -> None:
    found: list[Sweep] = []
    for folder, content in (("here", "width = 1\n"), ("there", "width = 1\n"), ("other", "width = 2\n")):
        (tmp_path / folder / "src").mkdir(parents=True)
        (tmp_path / folder / "src" / "model.py").write_text(content)
        base = document(model={"factory": "model:build"}, code="src")
        found.append(sweep(tmp_path / folder, base=base, objective={"metric": "loss"}))
    assert found[0].digest == found[1].digest != found[2].digest
    assert found[0].code is not None
    assert list(found[0].code.checksums) == ["model.py"]
    code = trials_of(found[0])[1].spec.code
    assert code is not None
    assert code.folder == str(tmp_path / "here" / "src"), "the best job file names the folder, not an archive"


def test_evaluations_of_named_sets_are_validations(tmp_path: Path) -> None:
    base = document(
        training={"steps": 400, "evaluation": {"every": 50, "sets": [{"name": "dev", "microbatches": 2}]}},
        data={"source": "stdlib:", "validation": {"dev": {"source": "stdlib:json"}}},
    )
    found = sweep(tmp_path, base=base, method="halving", rungs=[100, 200])
    assert len(trials_of(found)) == 2


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"parameters": {}}, r"lr.yaml:\d: parameters: a sweep of 0 trials: name at least one key"),
        ({"parameters": {LR: []}}, rf"parameters: {LR}: no values, which is a sweep of 0 trials"),
        ({"parameters": {LR: {"min": 1}}}, rf"parameters: {LR}: a range needs max, as \{{min"),
        ({"parameters": {LR: {"log": True}}}, rf"parameters: {LR}: a range needs min and max"),
        ({"parameters": {LR: {"min": 2, "max": 1}}}, "min 2 is not below max 1"),
        (
            {"parameters": {LR: {"min": 0, "max": 1, "log": True}}},
            "with log, min must be above 0, and it is 0",
        ),
        ({"parameters": {LR: {"min": 0, "max": 1.5, "int": True}}}, "with int, min and max must be whole"),
        ({"parameters": {LR: {"min": 0, "max": "x"}}}, rf"{LR}: max: 'x' does not fit"),
        ({"parameters": {LR: {"min": 0.1, "max": 1}}}, "a grid needs a list of values, or `points: 5`"),
        ({"parameters": {LR: 0.1}}, "0.1 is one value; give a list of values, or min and max"),
        ({"parameters": {LR: [1, 1]}}, "1 stands there twice"),
        ({"method": "random"}, "trials: missing; a random sweep needs the number of trials"),
        ({"method": "random", "trials": 0}, "trials: 0 does not fit; give a whole number ≥ 1"),
        ({"method": "halving"}, "rungs: missing"),
        ({"method": "halving", "rungs": [100, 50]}, "rungs: rising numbers of steps"),
        ({"method": "gird"}, "'gird' is not one of grid, random, halving; did you mean grid?"),
        ({"trails": 3}, "trails: unknown key; did you mean trials?"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml: No such file"),
    ],
)
def test_a_bad_file_is_one_line_with_its_place(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(BadJob, match=line) as raised:
        sweep(tmp_path, **keys)
    assert len(raised.value.text.splitlines()) == 1


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"parameters": {"training.optimizer.rate": [1]}}, "training.optimizer.rate: unknown key"),
        (
            {"parameters": {"training.stepz": [1, 2]}},
            "training.stepz: unknown key; did you mean training.steps?",
        ),
        ({"parameters": {"training.steps.many": [1]}}, "training.steps is a value, it has no keys below it"),
        ({"parameters": {LR: [0.1, -1]}}, f"{LR}=-1: {LR}: -1 does not fit"),
        ({"method": "halving", "rungs": [400]}, "rungs: 400 is not below training.steps, 400"),
        (
            {"method": "halving", "rungs": [60, 120]},
            "no validation at step 60: give training.validate_every: 60, or a divisor of it, and not 50",
        ),
        (
            {"parameters": {"training.validation_microbatches": [0]}},
            "validation_loss, and the job does not validate",
        ),
    ],
)
def test_a_bad_trial_is_one_line(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    found = sweep(tmp_path, **keys)
    with pytest.raises(BadJob, match=line) as raised:
        trials_of(found)
    assert len(raised.value.text.splitlines()) == 1


def test_too_many_combinations(tmp_path: Path) -> None:
    parameters = {LR: [n / 1e4 for n in range(1, 200)], "training.seed": list(range(99))}
    with pytest.raises(BadJob, match="19,701 combinations; a sweep has at most 1,000"):
        trials_of(sweep(tmp_path, parameters=parameters))


def test_all_trials_are_one_array(tmp_path: Path) -> None:
    found = sweep(tmp_path, max_parallel=3)
    trials = trials_of(found)
    spec = array_spec(found, trials)
    assert spec.array is not None
    assert (spec.name, spec.array.limit) == (found.array_name, 3)
    assert member_specs(spec) == tuple(trial.spec for trial in trials)


def test_trials_have_their_code_in_common(tmp_path: Path) -> None:
    with pytest.raises(BadJob, match="code: members have their code in common"):
        trials_of(sweep(tmp_path, parameters={"code": ["here", "there"]}))


def test_a_base_has_no_array_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(BadJob, match="a sweep makes its own"):
        sweep(tmp_path, base=document(array={"count": 2}))
