"""Runs side by side: filters, lineage, differences, figures at equal steps, prices."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest

from dmsc.run_history.comparison import as_csv, compare, sampled
from dmsc.run_history.config_differences import differences
from dmsc.run_history.lineage import lineage_of
from dmsc.run_history.presentation import comparison_tables, report_lines, spec_yaml
from dmsc.run_history.run_report import priced, run_report
from dmsc.run_history.selection import RunFilter, since_when, state_called
from schemas.curve import StepCurve, ValidationPoint
from schemas.errors import BadInput
from schemas.job import JobState, WeightsManifest
from schemas.usage import JobUsage, Prices
from tests.builders.jobs import job, spec

WEIGHTS = WeightsManifest(
    url="bus://artifacts/a/weights", shards=(), tensors={}, bytes=0, sha256="f" * 64, step=4
)


def curve(
    name: str, losses: dict[int, float], validations: Mapping[int, float] = MappingProxyType({})
) -> StepCurve:
    points = tuple(ValidationPoint(step=step, at=0.0, loss=loss) for step, loss in validations.items())
    return StepCurve(
        job=name,
        next=1,
        steps=tuple(losses),
        loss=tuple(losses.values()),
        at=(0.0,) * len(losses),
        tokens_per_s=(5.0,) * len(losses),
        validations=points,
    )


def test_filters() -> None:
    records = [
        job("b", JobState.DONE, user="ruth", changed_at=50.0, submitted_at=2.0),
        job("a", JobState.RUNNING, user="max", changed_at=90.0, submitted_at=1.0),
    ]
    assert [found.job for found in RunFilter().of(records)] == ["a", "b"]
    assert [found.job for found in RunFilter(state=JobState.DONE).of(records)] == ["b"]
    assert [found.job for found in RunFilter(user="max", name="ti*").of(records)] == ["a"]
    assert RunFilter(name="other").of(records) == []
    assert [found.job for found in RunFilter(since=since_when("20s", now=100.0)).of(records)] == ["a"]


@pytest.mark.parametrize("bad", ["yesterday", "-2h", "2026-13-01"])
def test_since_says_how_it_is_written(bad: str) -> None:
    with pytest.raises(BadInput, match=r"--since .*: write it as 90s, 30m, 8h, 14d or 2026-05-01"):
        since_when(bad, now=0.0)


def test_a_state_that_does_not_exist() -> None:
    with pytest.raises(BadInput, match="--status finished: one of queued, analysing"):
        state_called("finished")


def test_lineage_follows_urls_into_jobs_folders() -> None:
    first = job("a", JobState.DONE, weights=WEIGHTS)
    second = job("b", spec=spec(resume_from="bus://artifacts/a/checkpoints"))
    third = job("c", spec=spec(initial_weights="bus://artifacts/b/weights"))
    lineage = lineage_of(third, [first, second, third])
    assert lineage.parent is not None
    assert (lineage.parent.key, lineage.parent.job) == ("initial_weights", "b")
    assert lineage.ancestors == ("b", "a")
    middle = lineage_of(second, [first, second, third])
    assert middle.children == ("c",)
    assert middle.parent is not None
    assert middle.parent.weights_sha256 == "f" * 64
    elsewhere = lineage_of(job("d", spec=spec(resume_from="s3://lake/x")), [first])
    assert elsewhere.parent is not None
    assert (elsewhere.parent.job, elsewhere.parent.url) == (None, "s3://lake/x")


def test_only_keys_that_differ_are_listed() -> None:
    found = differences(
        {
            "a": spec(name="one", training={"steps": 2, "optimizer": {"lr": 0.1}}),
            "b": spec(
                name="two",
                training={"steps": 3, "optimizer": {"lr": 0.1}},
                model={"factory": "m:f", "args": {"x": 1}},
            ),
        }
    )
    values = {key.path: key.values for key in found}
    assert values["training.steps"] == {"a": 2, "b": 3}
    assert values["model.args.x"] == {"b": 1}
    assert not any(path.startswith(("name", "training.optimizer")) for path in values)


def test_figures_stand_at_equal_steps_and_the_best_is_marked() -> None:
    records = [job("a"), job("b", spec=spec(training={"steps": 9}))]
    curves = {
        "a": curve("a", {0: 3.0, 1: 2.0, 2: 1.0}, {2: 0.5}),
        "b": curve("b", {0: 3.0, 2: 2.0, 3: 1.0}, {2: 0.4, 4: 0.3}),
    }
    found = compare(records, curves, Prices(), now=0.0)
    assert [(row.step, row.values, row.best) for row in found.losses] == [
        (0, {"a": 3.0, "b": 3.0}, ()),
        (2, {"a": 1.0, "b": 2.0}, ("a",)),
    ]
    assert [row.best for row in found.validations] == [("b",)]
    tables = {title: rows for title, _, rows in comparison_tables(found)}
    assert tables["loss by step"][1] == ("2", "1*", "2")
    assert tables["runs"][1][5] == "0.3 (step 4)*"
    assert as_csv(["a", "b"], curves).splitlines()[:3] == [
        "step,loss:a,loss:b,validation_loss:a,validation_loss:b",
        "0,3.0,3.0,,",
        "1,2.0,,,",
    ]


def test_long_comparisons_show_the_first_and_the_last_step() -> None:
    values = {step: 1.0 / (step + 1) for step in range(100)}
    rows = compare([job("a"), job("b")], {name: curve(name, values) for name in "ab"}, Prices(), 0.0).losses
    assert [row.step for row in sampled(rows, 4)] == [0, 33, 66, 99]


def test_one_run_can_not_be_compared() -> None:
    with pytest.raises(BadInput, match="compare a: name at least two different jobs; see `dmsc runs list`"):
        compare([job("a"), job("a")], {"a": curve("a", {})}, Prices(), now=0.0)


def test_a_report_has_seeds_losses_lineage_and_cost() -> None:
    record = job(
        "a",
        JobState.DONE,
        weights=WEIGHTS,
        loss_first=3.0,
        usage=JobUsage(slot_s=7200.0),
        spec=spec(training={"steps": 4, "seed": 11}),
    )
    report = run_report(record, curve("a", {}, {2: 0.5, 4: 0.7}), [record], Prices(slot_hour=2.0), now=0.0)
    assert report.seeds["training.seed"] == 11
    assert report.losses.validation_best == (2, 0.5)
    assert (report.cost.slot_hours, report.cost.price) == (2.0, 4.0)
    shown = "\n".join(report_lines(report))
    assert "its seed" in shown
    assert "best 0.5 (step 2), last 0.7 (step 4)" in shown
    assert "weights ffffffffffff" in shown
    assert "steps: 4" in spec_yaml(report.config)


@pytest.mark.parametrize("bad", ["hour=3", "kwh=x", "kwh=-1", "kwh", "kwh=inf"])
def test_prices_say_how_they_are_written(bad: str) -> None:
    with pytest.raises(BadInput, match=r"--price .*: write slot-hour=N, kwh=N or slot-watts=N"):
        priced(Prices(), bad)
    assert priced(Prices(slot_hour=1.0), "kwh=2,slot-hour=3") == Prices(slot_hour=3.0, kwh=2.0)
