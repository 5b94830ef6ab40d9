"""`dmsc replay`, `runs import` and `policy score --run`: without a mesh, and the same in every process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dmsc.replay.present import beside, rows
from dmsc.replay.recordings import Archive
from dmsc.replay.session import Session
from policies.built_in.service_time_weights import ServiceTimeWeights
from schemas.errors import DamagedRun
from tests.builders import recorded_runs
from tests.integration.dmsc.command_line import environment
from tests.patience import PATIENCE_S

POLICY = '''
from dmsc import Policy

class Sets(Policy):
    """Goes through sets and dicts, as careless policies do."""
    name = "sets"

    def decide(self, view, now):
        slow = {one.sid for one in view.stage(0, samples=1) if one.service_ms > 15}
        return [self.avoid(view, sid, reason=f"slow: {sorted(slow)}", confidence=0.9) for sid in slow]
'''


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "j.dmscrun"
    recorded_runs.write(path)
    return path


def replayed(policy: ServiceTimeWeights) -> Session:
    session = Session(policy)
    for one in recorded_runs.frames():
        session.feed(one)
    return session


def test_a_policy_sees_the_record_and_its_suggestions_stand_beside_those_made() -> None:
    story = replayed(ServiceTimeWeights()).finish()
    assert story.messages == len(recorded_runs.frames())
    times = [round(one.at - story.began, 1) for one in story.replayed]
    assert times[0] >= 20, "before, there was nothing to change"
    first = story.replayed[0]
    assert first.decision is not None
    assert first.decision.adopted
    pairs = beside(story)
    together = [(mine, other) for mine, other in pairs if mine is not None and other is not None]
    assert len(together) == 1
    table = list(rows(story))
    assert len(table) == len(pairs)
    (row,) = [row for row in table if row[2] and row[4]]
    assert row[4] == "equaliser 7: stage 0: s0-r0 1.00, s0-r1 1.00 (0.60)"
    assert row[5] == "declined: would change nothing"


def test_both_sides_are_scored_by_the_same_traffic() -> None:
    story = replayed(ServiceTimeWeights()).finish()
    mine = [one.score for one in story.replayed_scores if one.score is not None]
    assert mine
    assert min(mine) > 0.5
    (theirs,) = story.scores["equaliser", "7"]
    assert theirs.score == 0.5
    assert not theirs.adopted


def dmsc(*arguments: str, cwd: Path, seed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dmsc", *arguments],
        cwd=cwd,
        env=environment(PYTHONHASHSEED=seed),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_the_same_bytes_in_any_process(tmp_path: Path, run: Path) -> None:
    (tmp_path / "sets.py").write_text(POLICY)
    outputs = []
    for seed in ("1", "2"):
        done = dmsc("replay", str(run), "--policy", "sets.py", "--json", cwd=tmp_path, seed=seed)
        assert done.returncode == 0, done.stderr
        assert "times as fast as real time" in done.stderr
        outputs.append(done.stdout)
    assert len(set(outputs)) == 1
    told = json.loads(outputs[0])
    assert told["policy"] == {"module": "sets", "version": "1"}
    assert {one["suggestion"]["action"]["sid"] for one in told["replayed"]} == {"j-s0-r1"}
    assert told["scores"]["replayed"]["right"] == 1.0


def test_an_imported_run_is_known_by_its_job(tmp_path: Path, run: Path) -> None:
    state = tmp_path / "state"
    archive = Archive(state)
    assert archive.add(run).job == "j"
    run.write_bytes(run.read_bytes()[:-20])
    with pytest.raises(DamagedRun):
        archive.add(run)
    (listed,) = archive.list()
    assert (listed.job, listed.name, listed.state, listed.where) == ("j", "uneven", "ended", "archive")
    done = dmsc("policy", "score", "--run", "j", "--state", str(state), cwd=tmp_path, seed="0")
    assert done.returncode == 0, done.stderr
    assert "equaliser" in done.stdout
    damaged = dmsc("replay", str(run), "--policy", "service-time-weights", cwd=tmp_path, seed="0")
    assert (damaged.returncode, damaged.stdout) == (2, "")
    assert damaged.stderr.splitlines() == [f"dmsc: {run}: cut off: export or copy it again"]
    unknown = dmsc(
        "replay", "j9", "--policy", "service-time-weights", "--state", str(state), cwd=tmp_path, seed="0"
    )
    assert unknown.returncode == 2
    assert "no mesh runs here" in unknown.stderr
