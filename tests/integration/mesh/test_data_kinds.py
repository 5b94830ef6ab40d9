"""Jobs on a table and on a data set of the user's own: the bits of a plain loop's order, whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from schemas.data_account import account_of
from schemas.job import JobSpec
from schemas.learning_rate import learning_rate
from tests.integration.mesh.conftest import Mesh, done, losses, outcome, tiny_job, until_step
from tests.integration.mesh.user_models import rows
from workers.data.opening import open_source

STEPS, KILL_AT = 8, 2
OWN: dict[str, Any] = {
    "kind": "factory",
    "factory": "rows:Rows",
    "args": {"size": 50, "damaged": 11},
    "names": {"row": "inputs", "label": "targets"},
}


def job(name: str, data: dict[str, Any], pad_ms: float = 0.0, **parallel: Any) -> JobSpec:
    base = tiny_job(name, training={"steps": STEPS, "checkpoint_every": 4}, parallel=parallel).model_dump()
    loss = "torch.nn.functional:cross_entropy"
    model = {"factory": "rows:classifier", "args": {"pad_ms": pad_ms}, "loss": loss}
    return JobSpec.model_validate(base | {"model": model, "data": data})


def table(folder: Path) -> dict[str, Any]:
    lines = ["a,b,c,d,label", *(f"{n % 7}.5,{n % 5},{n % 3},{n},{n % 3}" for n in range(60))]
    path = folder / "rows.csv"
    path.write_text("\n".join(lines))
    columns = {"inputs": ["a", "b", "c", "d"], "targets": "label"}
    return {"kind": "table", "source": str(path), "columns": columns}


def plain(spec: JobSpec) -> list[float]:
    """The losses of the loop that a user would write over the same batches."""
    training = spec.training
    torch.manual_seed(training.seed)
    model, own = rows.classifier(), training.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=own.betas, eps=own.eps, weight_decay=own.weight_decay
    )
    source, found = asyncio.run(open_source(spec, None)), []
    for step in range(training.steps):
        optimizer.zero_grad()
        total = 0.0
        for number in range(training.microbatches):
            batch = source.batch("train", step, number)
            loss = functional.cross_entropy(model(batch["inputs"]), batch["targets"])
            (loss / training.microbatches).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm or 1e9)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.step()
        found.append(total / training.microbatches)
    source.close()
    return found


@pytest.mark.parametrize(("kind", "replicas"), [("table", 1), ("factory", 2)])
def test_a_killed_data_instance_changes_no_bit(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, replicas: int
) -> None:
    """Without replicas, it is the job's only one."""
    data = table(tmp_path) if kind == "table" else OWN
    monkeypatch.syspath_prepend(str(Path(rows.__file__).parent))
    monkeypatch.chdir(Path(rows.__file__).parent)
    peaceful = done(mesh.client, mesh.client.submit(job(f"{kind}-alone", data)).job)
    expected = plain(job("plain", data))
    worst = max(abs(a - b) / b for a, b in zip(losses(mesh.client, peaceful.job), expected, strict=True))
    assert worst <= 1e-6, f"{worst:.2e}"

    killed = mesh.client.submit(job(f"{kind}-killed", data, 15.0, stages=2, replicas=replicas)).job
    until_step(mesh.client, killed, KILL_AT)
    os.kill(mesh.instance(f"{killed}-data-r0").endpoint.pid, signal.SIGKILL)
    record = done(mesh.client, killed)
    assert record.recoveries >= 1
    assert record.weights is not None
    assert peaceful.weights is not None
    assert record.weights.sha256 == peaceful.weights.sha256
    assert record.validation_loss == peaceful.validation_loss
    assert record.replaced == peaceful.replaced
    assert (record.replaced > 0) is (kind == "factory"), "one of its rows is damaged, and drawn each epoch"
    newest = mesh.client.checkpoints(killed).checkpoints[0].manifest
    training = record.spec.training
    assert newest.account is not None
    assert newest.account.step == newest.version
    (seen,) = newest.account.sources
    assert seen.samples == newest.version * training.microbatches * training.microbatch_samples
    assert (newest.version == STEPS) <= (newest.account.replaced == record.replaced)
    account = account_of(record)
    assert account is not None
    assert account.line() in mesh.printed("runs", "show", killed)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"args": {"size": 40, "damaged": 0}, "on_unreadable": "stop"}, "rows:Rows["),
        ({"factory": "rows:Absent"}, "has no 'Absent'"),
        ({"factory": "rows:ByProcess", "args": {}}, "differs from the data that was analysed"),
    ],
)
def test_data_that_does_not_fit_is_one_line(mesh: Mesh, data: dict[str, Any], text: str) -> None:
    record = outcome(mesh.client, job("refused", OWN | data))
    assert record.state == "failed"
    assert text in record.reason
    assert "\n" not in record.reason
