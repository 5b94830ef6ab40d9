"""The snippets of docs/checkpoints.md, run as they stand there, without DMSC on the path."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from schemas.errors import NotFound
from tests.integration.mesh.conftest import Mesh, done, tiny_job
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
CHECK = """
import sys
assert not {"bus", "dmsc", "entities", "schemas"} & set(sys.modules), "this is not plain PyTorch"
torch.save(
    {
        "version": manifest["version"],
        "weights": model.state_dict(),
        "steps": [float(entry["step"]) for entry in optimizer.state.values()],
        "moments": [float(entry["exp_avg_sq"].sum()) for entry in optimizer.state.values()],
    },
    "result.pt",
)
"""


def snippet() -> str:
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    found = re.search(r"runs this -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found
    return found.group(1)


def test_the_documented_snippet_loads_a_checkpoint_into_the_whole_model(mesh: Mesh, tmp_path: Path) -> None:
    spec = tiny_job("plain", training={"steps": 4, "checkpoint_every": 4}, parallel={"stages": 3})
    record = done(mesh.client, mesh.client.submit(spec).job)
    published = mesh.client.checkpoints(record.job).checkpoints
    assert published[0].manifest.version == 4
    manifest = mesh.client.download_checkpoint(record.job, tmp_path / "checkpoint")
    assert manifest == published[0].manifest
    assert len(manifest.stages) == 3
    with pytest.raises(NotFound, match="those that exist are of step: 4"):
        mesh.client.download_checkpoint(record.job, tmp_path / "none", step=3)

    args = dict(spec.model.args)
    build = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("gpt", {str(ROOT / "workers" / "models" / "gpt.py")!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

def build_model():
    return module.byte_gpt(**{args!r})
"""
    script = tmp_path / "load.py"
    script.write_text(build + snippet() + CHECK)
    ran = subprocess.run(
        [sys.executable, "-P", str(script)],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stderr
    result = torch.load(tmp_path / "result.pt")
    assert result["version"] == 4
    assert set(result["steps"]) == {4.0}
    assert all(moment > 0 for moment in result["moments"])
    mesh.client.download_weights(record.job, tmp_path / "weights")
    expected = {
        name: weight
        for file in (tmp_path / "weights").glob("*.safetensors")
        for name, weight in load_file(file).items()
    }
    assert set(result["weights"]) == set(expected)
    assert all(torch.equal(weight, expected[name]) for name, weight in result["weights"].items())
