"""Metrics take outputs and batch by name, and give sums and counts; what is wrong with one is one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from schemas.errors import BadModel
from schemas.job_file.training import TrainingSpec
from tests.builders.user_modules import user_module
from workers.recipe.metrics import Metrics
from workers.recipe.user_schedule import user_schedule

USERS = """
def both(output, targets): return {"right": ((output.argmax(-1) == targets).sum(), targets.numel())}
def by_name(heads, labels, outputs, batch): return {"sizes": (len(outputs) + len(batch), heads.numel())}
def other(output, weights): return {}
def slash(output): return {"a/b": (1, 1)}
def single(output): return {"a": 1}
def taken(output): return {"accuracy": (1, 1)}
def raises(output): raise KeyError("x")
def number(output): return 3.0
def nan(output): return {"n": (float("nan"), 1)}
def ramp(step, total): return step / total
def late(step, total): return None if step else 1
def negative(step, total): return -1
counter = []
def counting(step, total):
    counter.append(step)
    return len(counter)
"""


@pytest.fixture(scope="module", autouse=True)
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with user_module(tmp_path_factory.mktemp("users"), "tried_metrics", USERS):
        yield


LOGITS = torch.tensor([[[0.1, 0.9, 0.0], [0.8, 0.1, 0.1]], [[0.2, 0.3, 0.5], [0.1, 0.2, 0.7]]])
TARGETS = torch.tensor([[1, 1], [2, -100]])


def measured(*names: str, **batch: torch.Tensor) -> dict[str, tuple[float, float]]:
    batch = batch or {"targets": TARGETS}
    metrics = Metrics(
        [f"tried_metrics:{name}" if f"def {name}(" in USERS else name for name in names], ["output"], [*batch]
    )
    metrics.check({"output": LOGITS}, batch)
    return metrics.measure({"output": LOGITS}, batch)


def test_accuracy_counts_what_is_not_ignored() -> None:
    assert measured("accuracy", "top5") == {"accuracy": (2.0, 3.0), "top5": (3.0, 3.0)}
    assert measured("accuracy", labels=torch.full((2, 2), -100)) == {"accuracy": (0.0, 0.0)}
    assert measured("perplexity") == {}


def test_a_function_takes_outputs_and_batch_by_name() -> None:
    assert measured("both") == {"right": (2.0, 4.0)}
    metrics = Metrics(["tried_metrics:by_name"], ["logits", "heads", "rest"], ["inputs", "labels"])
    assert metrics.outputs == ("logits", "heads", "rest")
    assert metrics.batch == ("inputs", "labels")
    outputs = {name: torch.zeros(2) for name in metrics.outputs}
    assert metrics.measure(outputs, {"inputs": TARGETS, "labels": TARGETS}) == {"sizes": (5.0, 2.0)}
    plain = Metrics(["accuracy"], ["hidden", "logits"], ["inputs", "targets"])
    assert (plain.outputs, plain.batch) == (("logits",), ("targets",))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("other", "takes 'weights'; there are output, targets: name its parameters so"),
        ("slash", "names a value 'a/b'; give a text without /"),
        ("single", r"gives no pair \(sum, count\) for 'a'"),
        ("taken", "gives 'accuracy', as another metric does"),
        ("raises", "failed: KeyError"),
        ("number", "returned a float; it must return a map of pairs"),
        ("nan", r"n gives \(nan, 1.0\) for the first microbatch"),
    ],
)
def test_what_is_wrong_with_a_metric_is_one_line(name: str, line: str) -> None:
    with pytest.raises(BadModel, match=f"training.evaluation.metrics: .*{line}") as caught:
        measured(name)
    assert "\n" not in caught.value.text


def test_accuracy_needs_labels_of_the_shape_of_the_logits() -> None:
    with pytest.raises(BadModel, match="need a batch with targets or labels or label; this one has inputs"):
        measured("accuracy", inputs=TARGETS)
    with pytest.raises(BadModel, match=r"the labels are \(2,\)"):
        measured("accuracy", targets=torch.zeros(2, dtype=torch.int64))


def rates(factory: str, **schedule: Any) -> list[float]:
    training = TrainingSpec.model_validate(
        {
            "steps": 4,
            "optimizer": {"lr": 0.5},
            "schedule": {"factory": f"tried_metrics:{factory}", **schedule},
        }
    )
    own = user_schedule(training)
    assert own is not None
    own.check()
    return [own.rate(step) for step in range(4)]


def test_a_schedule_of_ones_own_is_a_factor_of_the_peak_rate() -> None:
    assert rates("ramp") == [0.0, 0.125, 0.25, 0.375]
    assert rates("ramp", warmup_steps=2) == [0.0, 0.125, 0.25, 0.375]
    for factory, line in (
        ("late", "TypeError"),
        ("negative", "gave -1.0; it must"),
        ("counting", "depend on its arg"),
    ):
        with pytest.raises(BadModel, match=f"training.schedule.factory: tried_metrics:{factory}.*{line}"):
            rates(factory)
