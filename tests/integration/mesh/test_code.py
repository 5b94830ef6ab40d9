"""Code travels with its job through a whole mesh: each runs its own, sees no other, and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dmsc.client.gateway_requests import Gateways
from schemas.errors import Conflict
from schemas.job import JobRecord, JobSpec, JobState
from tests.integration.mesh.conftest import Mesh, done, outcome, tiny_job
from tests.patience import PATIENCE_S

MODEL = """
import os
from pathlib import Path
import helper
from torch import nn

def build():
    here = Path(__file__).parent
    assert (here / "vocabulary.txt").read_text() == "{word}", "another job's folder"
    for other in {others}:
        try:
            seen = os.listdir(other)
        except OSError:
            continue
        assert set(seen) <= set(here.parts), f"{{other}} shows {{seen}}"
    try:
        import troubled
    except ImportError:
        pass
    else:
        raise AssertionError("the node's modules are seen")
    block = nn.Linear(16, 16)
    nn.init.constant_(block.weight, helper.value)
    return nn.Sequential(nn.Embedding(256, 16), block, nn.Linear(16, 256))
"""

NOTEBOOK = """
import json
from pathlib import Path
import torch
from torch import nn
from dmsc import Client

WIDTH = 16

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
    def forward(self, hidden):
        return torch.relu(self.inner(hidden))

def build():
    return nn.Sequential(nn.Embedding(256, WIDTH), Layer(), nn.Linear(WIDTH, 256))

def around(width):
    def build():
        return nn.Sequential(nn.Embedding(256, width), Layer(), nn.Linear(width, 256))
    return build

class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        tokens = (torch.arange(9) + index) % 256
        return {{"inputs": tokens[:-1], "targets": tokens[1:]}}

with Client(state=Path({state!r})) as client:
    for model, data in ((build, Pairs), (around(16), Pairs())):
        job = client.train(
            model=model, data=data, loss="cross_entropy", steps=3, microbatches=2,
            validation_microbatches=0, checkpoint_every=0,
        )
        curve, weights = job.curve(), job.weights()
        print(json.dumps([job.state, job.record.weights.sha256, len(curve), list(weights["0.weight"].shape)]))
"""


@pytest.fixture(scope="module")
def sent(mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two folders with equal names of modules and different content."""
    folders = {}
    nodes = [*(mesh.state / "stores" / "code").glob("*"), mesh.state / "stores" / "code"]
    for word, value in (("one", 0.01), ("two", 0.02)):
        folder = folders[word] = tmp_path_factory.mktemp("code") / word
        folder.mkdir()
        (folder / "model.py").write_text(MODEL.format(word=word, others=[str(path) for path in nodes]))
        (folder / "helper.py").write_text(f"value = {value}\n")
        (folder / "vocabulary.txt").write_text(word)
    return folders


def spec_of(folder: Path, **sections: Any) -> JobSpec:
    code = {"folder": str(folder), **sections.pop("code", {})}
    made = tiny_job(f"code-{folder.name}", training={"steps": 3}, **sections).model_dump()
    made |= {"model": {"factory": "model:build"}, "code": code}
    return JobSpec.model_validate(made)


def hash_of(record: JobRecord) -> str:
    assert record.weights is not None
    return record.weights.sha256


def test_two_jobs_with_equal_names_run_their_own_code_side_by_side(mesh: Mesh, sent: dict[str, Path]) -> None:
    client = mesh.client
    shape = {"stages": 2, "replicas": 1}
    one, two = (client.submit(spec_of(sent[word], parallel=shape)) for word in ("one", "two"))
    assert one.spec.code is not None
    assert one.spec.code.folder is None
    digest = one.spec.code.sha256
    assert one.spec.code.url == f"bus://code/{one.user}/{digest}"
    assert digest in {archive.sha256 for archive in client.codes()}
    with pytest.raises(Conflict, match="needs it"):
        client.delete_code(str(digest))
    hashes = [hash_of(done(client, record.job)) for record in (one, two)]
    assert hashes[0] != hashes[1]
    alone = done(client, client.submit(spec_of(sent["one"])).job)
    assert hash_of(alone) == hashes[0]
    assert client.codes() == []
    assert list((mesh.state / "stores" / "code").glob("*/*")) == []


def test_equal_content_is_sent_once(
    mesh: Mesh, sent: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sends: list[str] = []
    send = Gateways.send

    async def counted(self: Gateways, path: str, *rest: Any) -> Any:
        sends.append(path)
        return await send(self, path, *rest)

    monkeypatch.setattr(Gateways, "send", counted)
    held = {"parallel": {"stages": 1, "replicas": 1, "clusters": ["nowhere"]}}
    first, second = (mesh.client.submit(spec_of(sent["one"], **held)) for _ in range(2))
    assert len(sends) == 1
    mesh.client.cancel(first.job)
    mesh.client.wait(first.job, timeout_s=PATIENCE_S)
    assert len(mesh.client.codes()) == 1, "the second job refers to it"
    mesh.client.cancel(second.job)
    mesh.client.wait(second.job, timeout_s=PATIENCE_S)


def test_a_requirement_that_a_node_lacks_is_named(mesh: Mesh, sent: dict[str, Path]) -> None:
    record = outcome(mesh.client, spec_of(sent["one"], code={"requirements": ("torch", "no-such-thing>=2")}))
    assert record.state is JobState.FAILED
    assert "lacks no-such-thing>=2 (not installed); install it there" in record.reason


def test_a_module_that_did_not_travel_is_named(mesh: Mesh, sent: dict[str, Path]) -> None:
    record = outcome(mesh.client, spec_of(sent["one"], code={"include": ("helper.py",)}))
    assert record.state is JobState.FAILED
    assert "there is no module 'model' in the code that came with the job" in record.reason


def test_functions_of_a_notebook_train_by_source_and_pickled(mesh: Mesh, tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK.format(state=str(mesh.state)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    results = [json.loads(line) for line in lines if line.startswith("[")]
    by_source, pickled = results
    assert by_source == pickled == ["done", by_source[1], 3, [256, 16]], "the same model and data either way"
    assert sum("step 3/3 loss" in line for line in lines) == 2
