"""Runs on a mesh: a sweep whose driver dies, what `dmsc runs` tells of its jobs, a tracker that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from dmsc.client.async_client import AsyncClient
from dmsc.sweeps.driver import SweepDriver
from dmsc.sweeps.sweep_file import load_sweep
from dmsc.sweeps.trials import trials_of
from schemas.job import JobState
from tests.integration.mesh.conftest import Mesh, tiny_job
from tests.patience import PATIENCE_S
from tests.warm_processes import WarmProcess, start_module

STEPS, RUNG = 24, 8


def sweep_file(folder: Path, **keys: Any) -> Path:
    spec = tiny_job("base", training={"steps": STEPS, "validate_every": 4})
    (folder / "job.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_unset=True)))
    body = {
        "base": "job.yaml",
        "name": folder.name.replace("_", "-"),
        "parameters": {"training.optimizer.lr": [1e-5, 3e-3, 1e-2]},
        "method": "halving",
        "rungs": [RUNG],
        "max_parallel": 2,
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(body | keys))
    return path


async def test_a_sweep_outlives_its_driver_and_halving_changes_no_bits(mesh: Mesh, tmp_path: Path) -> None:
    path = sweep_file(tmp_path)
    sweep = load_sweep(path)
    trials = trials_of(sweep)
    said: list[str] = []
    rested = asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        if "waits at rung" in line:
            rested.set()

    async with AsyncClient(state=mesh.state) as client:
        driver = asyncio.create_task(SweepDriver(client, sweep, trials, say).run(resume=False))
        async with asyncio.timeout(PATIENCE_S):
            await rested.wait()
        driver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driver
    again = await asyncio.to_thread(mesh.dmsc, "sweep", str(path))
    assert again.returncode == 1
    assert "jobs already: --resume goes on with them" in again.stderr
    result = json.loads(await asyncio.to_thread(mesh.printed, "sweep", str(path), "--resume", "--json"))
    rows = {row["trial"]: row for row in result["trials"]}
    assert sorted(rows) == [0, 1, 2]
    best = result["best"]
    assert rows[best]["state"] == "done"
    assert best == result["trials"][0]["trial"]
    losers = [row for trial, row in rows.items() if trial != best]
    assert any(row["state"] == "cancelled" for row in losers)
    record = await asyncio.to_thread(mesh.client.job, rows[best]["job"])
    plain = tiny_job("plain", training=trials[best].spec.training.model_dump(mode="json"))
    straight = await asyncio.to_thread(mesh.client.wait, mesh.client.submit(plain).job)
    assert record.weights is not None
    assert straight.weights is not None
    assert record.weights.sha256 == straight.weights.sha256
    await asyncio.to_thread(told_of_runs, mesh, [record.job, straight.job], sweep.name)


def told_of_runs(mesh: Mesh, jobs: list[str], sweep: str) -> None:
    """What `dmsc runs` tells of a trial that was parked at a rung, and of a run with the same bits."""
    listed = json.loads(mesh.printed("runs", "list", "--name", f"{sweep}-*", "--json"))
    assert {row["spec"]["name"][-2:] for row in listed} == {"-0", "-1", "-2"}
    shown = json.loads(mesh.printed("runs", "show", jobs[0], "--price", "slot-hour=3600,kwh=0", "--json"))
    assert (shown["state"], shown["step"]) == ("done", STEPS)
    assert shown["lineage"]["weights_sha256"]
    assert shown["lineage"]["code_digest"]
    assert shown["cost"]["price"] == pytest.approx(shown["cost"]["slot_hours"] * 3600)
    assert shown["cost"]["slot_hours"] > 0
    compared = json.loads(mesh.printed("runs", "compare", *jobs, "--json"))
    assert [row["step"] for row in compared["losses"]] == list(range(STEPS))
    assert all(row["best"] == [] for row in compared["losses"]), "equal bits"
    assert [row["step"] for row in compared["validations"]] == list(range(0, STEPS + 1, 4))
    assert "training.optimizer.lr" not in {key["path"] for key in compared["config"]}
    table = mesh.printed("runs", "compare", *jobs, "--csv").splitlines()
    assert len(table) == STEPS + 2
    alone = mesh.dmsc("runs", "compare", jobs[0])
    assert (alone.returncode, "at least two different jobs" in alone.stderr) == (2, True)
    unknown = mesh.dmsc("runs", "show", "nobody")
    assert (unknown.returncode, unknown.stderr) == (2, "dmsc: no job nobody: `dmsc jobs` lists them\n")


def test_an_objective_that_no_trial_reports(mesh: Mesh, tmp_path: Path) -> None:
    parameters = {"training.seed": [1]}
    path = sweep_file(
        tmp_path, method="grid", rungs=[], parameters=parameters, objective={"metric": "accuracy"}
    )
    done = mesh.dmsc("sweep", str(path), "--set", "training.steps=6")
    assert done.returncode == 2
    assert "objective.metric: accuracy was never reported by" in done.stderr.splitlines()[-1]
    assert "it reported loss, validation_loss" in done.stderr.splitlines()[-1]


def test_a_killed_tracker_has_each_figure_of_a_step_once(mesh: Mesh, tmp_path: Path) -> None:
    board, kills = tmp_path / "board", 3
    job = mesh.client.submit(tiny_job("tracked", training={"steps": 60, "validate_every": 10})).job
    for kill in range(kills + 1):
        tracker = start_tracker(mesh, tmp_path, board, kill)
        deadline = time.monotonic() + PATIENCE_S
        if kill == kills:
            assert mesh.client.wait(job).state is JobState.DONE
            while "done" not in texts(board / job):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            tracker.send_signal(signal.SIGTERM)
            assert tracker.wait(PATIENCE_S) == 0
        else:
            while not any((board / job).glob("events*")) or len(told(board / job)) <= 20 * kill:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            tracker.send_signal(signal.SIGKILL)
            tracker.wait(PATIENCE_S)
    found = told(board / job)
    assert set(found.values()) == {1}
    assert {step for tag, step in found if tag == "train/loss"} == set(range(60))
    assert {step for tag, step in found if tag == "validation/loss"} == set(range(0, 61, 10))


def start_tracker(mesh: Mesh, folder: Path, board: Path, number: int) -> WarmProcess:
    arguments = ("run", "tracker", "--tensorboard", str(board), "--since", "1h", "--metrics-port", "off")
    environment = {
        **os.environ,
        "DMSC_BUS": ",".join(mesh.servers),
        "DMSC_BUS_TOKEN": mesh.bus_token or "",
    }
    err = folder / f"tracker-{number}.stderr"
    return start_module("dmsc", arguments, cwd=folder, environment=environment, out=Path(os.devnull), err=err)


def events(folder: Path) -> list[Any]:
    return [event for path in folder.glob("events*") for event in EventFileLoader(str(path)).Load()]


def told(folder: Path) -> Counter[tuple[str, int]]:
    return Counter(
        (value.tag, event.step)
        for event in events(folder)
        for value in event.summary.value
        if value.tag != "job"
    )


def texts(folder: Path) -> set[str]:
    return {
        text.decode()
        for event in events(folder)
        for value in event.summary.value
        for text in value.tensor.string_val
    }
