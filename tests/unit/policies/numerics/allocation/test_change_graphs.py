"""A job's graph with candidate changes: what is a candidate, what can't be used, and the weights' file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from policies.numerics.allocation.change_graphs import MeasuredJob, change_graphs, doubt_about, model_ms
from policies.numerics.allocation.outcome_network import FORM, LogNormal, from_tensors, trained, untrained
from schemas.errors import BadInput

SAMPLES = 20


def measured(*times: tuple[float, ...], **more: object) -> MeasuredJob:
    """Stages of instances with these service times, sampled once a second and even."""
    sids = [f"j-s{stage}-r{place}" for stage, row in enumerate(times) for place in range(len(row))]
    flat = [ms for row in times for ms in row]
    count = len(sids)
    return replace(
        MeasuredJob(
            sids=tuple(sids),
            stages=np.array([stage for stage, row in enumerate(times) for _ in row]),
            service_ms=np.repeat(np.array(flat)[:, None], SAMPLES, axis=1),
            times_s=np.tile(np.arange(SAMPLES, dtype=float), (count, 1)),
            latest_ms=tuple(flat),
            counts=np.tile(np.arange(SAMPLES, dtype=float), (count, 1)),
            work=tuple(0.0 for _ in times),
            steps_s=(1.0,) * 8,
            microbatches=12,
            room=True,
            now_s=float(SAMPLES),
        ),
        **more,
    )


def test_a_step_by_its_stages() -> None:
    assert model_ms([[10.0, 10.0], [30.0]], 12) == pytest.approx(360 + 10)


def test_equal_instances_are_no_candidates() -> None:
    assert change_graphs(measured((10.0, 10.0), (10.0, 10.0), moves=True))[0] == []


def test_a_slow_one_may_leave_for_a_free_slot_and_only_then() -> None:
    job = measured((10.0, 40.0), (10.0, 10.0))
    (candidate,), graphs = change_graphs(job)
    assert (job.sids[candidate.node], candidate.migrates) == ("j-s0-r1", True)
    assert candidate.saves == pytest.approx(
        np.log(model_ms([[10, 40], [10, 10]], 12) / model_ms([[10] * 2] * 2, 12))
    )
    assert graphs.marks[0, :, 0].tolist() == [0, 1, 0, 0]
    assert change_graphs(replace(job, room=False))[0] == []
    assert change_graphs(replace(job, room_speed=0.25))[0] == []  # a free slot as slow as its own


def test_a_stage_of_one_that_is_slow_for_its_work_may_leave_by_what_the_plan_says() -> None:
    job = measured((10.0,), (20.0,))
    assert change_graphs(job)[0] == []  # nothing says that it should be faster
    (candidate,), _ = change_graphs(replace(job, work=(5.0, 5.0)))
    assert job.sids[candidate.node] == "j-s1-r0"


def test_moves_go_to_the_stage_that_others_wait_for() -> None:
    candidates, _ = change_graphs(measured((10.0, 10.0, 10.0), (40.0,), room=False, moves=True))
    assert {(candidate.stage, candidate.migrates) for candidate in candidates} == {(1, False)}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"latest_ms": (10.0, float("nan"))}, "j-s1-r0 has reported a service time of nan ms"),
        ({"service_ms": np.full((2, SAMPLES), -3.0)}, "j-s0-r0 has reported a service time of -3 ms"),
        ({"times_s": np.full((2, SAMPLES), np.nan)}, "j-s0-r0 has reported no service time"),
        ({"steps_s": (1.0, float("inf"))}, "no step has a time that could be used"),
        ({"steps_s": ()}, "no step has a time that could be used"),
    ],
)
def test_what_cannot_be_used_is_named(change: dict[str, object], told: str) -> None:
    assert doubt_about(measured((10.0,), (10.0,))) == ""
    assert doubt_about(measured((10.0,), (10.0,), **change)) == told


def test_features_are_numbers_whatever_is_measured() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        times = [tuple(draw.lognormal(3, 1, draw.integers(1, 4))) for _ in range(draw.integers(1, 5))]
        _, graphs = change_graphs(measured(*times, moves=True), least=-9.0)
        assert np.isfinite(graphs.nodes).all()
        assert np.isfinite(graphs.job).all()


def test_a_probability_of_a_forecast() -> None:
    assert LogNormal(0.0, 0.1).above(0.0) == pytest.approx(0.5)
    assert LogNormal(0.12816, 0.1).above(0.0) == pytest.approx(0.9, abs=1e-4)


def test_weights_of_another_form_are_refused_in_one_line(tmp_path: Path) -> None:
    tensors = dict(untrained(1).tensors)
    assert from_tensors(tensors).tensors.keys() == FORM.keys()
    for wrong, told in (
        (tensors | {"out.bias": np.zeros(3, dtype=np.float32)}, "out.bias must be (4,), not (3,)"),
        ({name: each for name, each in tensors.items() if name != "widths"}, "widths must be (2,), not none"),
        (tensors | {"widths": np.full(2, np.nan, dtype=np.float32)}, "widths has values that are no numbers"),
    ):
        file = tmp_path / f"{len(told)}.safetensors"
        save_file(wrong, file)
        with pytest.raises(BadInput) as caught:
            trained(file)
        assert told in caught.value.text
        assert "\n" not in caught.value.text
    with pytest.raises(BadInput, match="train_change_outcomes"):
        trained(tmp_path / "none.safetensors")
