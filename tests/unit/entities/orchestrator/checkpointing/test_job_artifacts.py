"""Which of a job's checkpoints go."""

from __future__ import annotations

from entities.job_files.checkpoint_catalog import CheckpointFolder
from entities.orchestrator.checkpointing.job_artifacts import superseded

A, B, C, D = (CheckpointFolder(version, 1, number) for number, version in enumerate((2, 4, 6, 8), start=1))


def test_all_but_those_kept_go_whether_published_or_not() -> None:
    assert superseded([A, B, C, D], [D, B], (), epoch=1) == [A, C]


def test_nothing_of_a_later_epoch_goes() -> None:
    later = CheckpointFolder(2, 3, 1)
    assert superseded([A, B, later], [B], (), epoch=2) == [A]


def test_one_that_may_still_come_about_stays_until_it_would_not_count() -> None:
    assert superseded([A, B, C], [C], {A, B}, epoch=1) == [], "another one is still to be kept"
    assert superseded([A, B, C], [C, A], {B}, epoch=1) == [], "it would be the second"
    assert superseded([A, B, C, D], [D, C], {A, B}, epoch=1) == [A, B]
