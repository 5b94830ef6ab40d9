"""A module tells how often failures are to be expected; the orchestrator takes it, or says why not."""

from __future__ import annotations

from pathlib import Path

from schemas.job import JobState
from tests.integration.dmsc.command_line import running, wait_for
from tests.integration.mesh.conftest import Mesh
from tests.integration.mesh.user_jobs import HELD_STEPS, hold, user_job, words
from tests.patience import PATIENCE_S

POLICY = """
from dmsc import Policy

class Seer(Policy):
    name = "seer"
    every_s = 0.2

    def __init__(self):
        super().__init__()
        self.left = [("a hunch", 600.0), ("nonsense first", float("nan"))]

    def decide(self, view, now):
        judged = sum(decision.module == self.name for decision in view.decisions)
        if self.left and judged == 2 - len(self.left):
            reason, between_s = self.left.pop()
            return self.expect_failures(view, between_s, reason=reason)
"""


def test_an_expectation_is_adopted_and_nonsense_is_not(mesh: Mesh, tmp_path: Path) -> None:
    (tmp_path / "seer.py").write_text(POLICY)
    gate = tmp_path / "gate"
    spec = user_job(
        "held",
        words(tmp_path),
        model={"args": {"gate": str(gate)}},
        training={"steps": HELD_STEPS, "checkpoint_every": "auto"},
        parallel={"stages": 2, "replicas": 1, "segmentation": "uniform"},
    )
    client = mesh.client

    def judged() -> tuple[int, int]:
        found = next((one for one in client.policies() if one.module == "seer"), None)
        return (0, 0) if found is None else (found.adopted, found.declined)

    job = hold(client, spec, gate)
    with running("policy", "run", "seer.py", "--state", str(mesh.state), cwd=tmp_path) as module:
        module.until("module ready")
        wait_for(lambda: judged() == (1, 1), lambda: str(judged()))
    gate.unlink()
    assert client.wait(job, timeout_s=PATIENCE_S).state is JobState.DONE
