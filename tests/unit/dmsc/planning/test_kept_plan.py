"""A plan in its job file, and as it is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dmsc.commands.jobs.plan import plan
from dmsc.planning.kept_plan import keep
from dmsc.planning.mesh_plans import lines_of, row_of
from entities.planner.layer_rules import MEMORY
from schemas.errors import BadInput
from schemas.job import JobSpec
from schemas.plans import PlanMade, PlanPlace, PlanStage
from schemas.task_graph import PlanAlternative, PlanForecast

DIGEST = "0" * 16


def kept(folder: Path, replicas: tuple[int, ...], **parallel: Any) -> JobSpec:
    file = folder / "job.yaml"
    job = {"name": "j", "model": {"factory": "models:build"}, "training": {"steps": 2}, "parallel": parallel}
    file.write_text(yaml.safe_dump(job))
    cuts = [f"layer{stage}" for stage in range(1, len(replicas))]
    keep(file, folder / "kept.yaml", replicas=replicas, cuts=cuts, model=DIGEST)
    return JobSpec.model_validate(yaml.safe_load((folder / "kept.yaml").read_text()))


def test_a_kept_plan_is_a_job_that_is_accepted(tmp_path: Path) -> None:
    found = kept(tmp_path, (2, 1), stages="auto", slots=3)
    assert found.parallel.replicas_per_stage() == (2, 1)
    assert found.plan.cuts == ("layer1",)
    assert kept(tmp_path, (1, 1, 1), stages=2, standbys=[0, 1]).parallel.standbys_per_stage() == (0, 0, 0)
    assert kept(tmp_path, (1, 1), stages=2, standbys=[0, 1]).parallel.standbys_per_stage() == (0, 1)
    assert kept(tmp_path, (1, 1, 1), stages=2, standbys=1).parallel.standbys_per_stage() == (1, 1, 1)


def test_a_plan_of_some_layers_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--out keeps the plan of a whole model: leave --layers out"):
        plan(tmp_path / "job.yaml", layers="a..b", out=tmp_path / "kept.yaml")


def test_a_plan_of_a_mesh_in_words() -> None:
    forecast = PlanForecast(
        step_ms=200.0,
        bottleneck_ms=150.0,
        fill_ms=50.0,
        reduction_ms=0.0,
        constant_ms=0.0,
        stage_ms=(150.0,),
        memory_bytes=(1 << 30,),
        alternatives=(
            PlanAlternative(plan="2 stages", step_ms=None, why_not="its stages fit into no slot"),
            PlanAlternative(plan="3 stages", step_ms=250.4, why_not="50 ms longer"),
        ),
    )
    stage = PlanStage(
        first="a",
        last="b",
        first_layer=0,
        last_layer=1,
        replicas=1,
        labels=(f"{MEMORY}{24 << 30}", "trust=high"),
        places=(PlanPlace(replica=0, cluster="c", node="n", slot=0),),
    )
    made = PlanMade(stages=(stage,), forecast=forecast, reason="why", slots=1, cuts=(), model=DIGEST)
    assert row_of(made) == ("1", "1 × 1", "200 ms", "25%", "–", "–")
    assert lines_of(made) == [
        "why",
        "  stage 0: a – b, 150 ms of a step, 1 GiB in each instance, on c/n:0, only a slot of 24 GiB "
        "and the label trust=high",
        "  not 2 stages (–): its stages fit into no slot",
        "  not 3 stages (250 ms): 50 ms longer",
    ]
