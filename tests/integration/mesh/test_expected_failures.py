"""A module tells how often failures are to be expected; the orchestrator takes it, or says why not."""

from __future__ import annotations

from pathlib import Path

from tests.integration.dmsc.command_line import running, wait_for
from tests.integration.mesh.conftest import Mesh
from tests.integration.mesh.user_jobs import held_job, holding, words

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
    spec = held_job(
        words(tmp_path),
        tmp_path / "gate",
        training={"checkpoint_every": "auto"},
        parallel={"stages": 2, "replicas": 1, "segmentation": "uniform"},
    )
    client = mesh.client

    def judged() -> tuple[int, int]:
        found = next((one for one in client.policies() if one.module == "seer"), None)
        return (0, 0) if found is None else (found.adopted, found.declined)

    command = ("policy", "run", "seer.py", "--state", str(mesh.state))
    with holding(client, spec), running(*command, cwd=tmp_path) as module:
        module.until("module ready")
        wait_for(lambda: judged() == (1, 1), lambda: str(judged()))
