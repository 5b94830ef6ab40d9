"""The section `predict`: digits, ViT and U-Net by `/v1/predict`, beside LitServe."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch

from benchmarks.examples import ROOT, jobs, make_data
from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.command import say
from benchmarks.harness.emptiness import NothingMeasured
from benchmarks.harness.figures import Rates
from benchmarks.harness.http_connection import Connection
from benchmarks.harness.processes import turns
from benchmarks.serving_sections.pinned import MISSING, lit_is_installed, lit_server, pin
from benchmarks.serving_sections.versions import serving_mesh
from dmsc.state.settings import find_gateway
from schemas.job import JobSpec

SECTION = "predict"
BATCH, WINDOW_MS = 32, 2.0
CLIENTS = 32
MEASURED_S = 5.0
RATE = 100_000
"""More requests per second than any side answers: LitServe has no limit of its own."""


@dataclass(frozen=True)
class Model:
    """What it takes, and the least part of LitServe's throughput."""

    inputs: str
    shape: tuple[int, ...]
    bar: float


MODELS = {
    "digits": Model("pixels", (35,), 1.2),
    "vit": Model("inputs", (3, 32, 32), 0.95),
    "unet": Model("noisy", (1, 16, 16), 0.95),
}


@dataclass(frozen=True)
class Door:
    """Where a side answers, and what it is asked."""

    urls: Sequence[str]
    path: str
    token: str
    body: bytes


async def predict(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """Digits, ViT and U-Net by /v1/predict, plain arithmetic: answers per second beside LitServe, in turn."""
    if not lit_is_installed():
        raise NothingMeasured(MISSING, SECTION)
    core = min(os.sched_getaffinity(0))
    async with AsyncExitStack() as stack:
        serving = await stack.enter_async_context(serving_mesh("--separate", "--user-rate", str(RATE)))
        address = find_gateway(state=serving.chaos.folder)
        for name, model in MODELS.items():
            await asyncio.to_thread(make_data, name)
            async with serving.deployed(served(name), 1) as version:
                (record,) = await serving.active(version)
                pin(record.endpoint.pid, core)
                tensor = tensor_of(model)
                settings = {"kind": "predict", "name": name, "batch": BATCH, "window_s": WINDOW_MS / 1e3}
                async with lit_server(settings, tensor, core) as url:
                    one = {**tensor, "dtype": "float32", "shape": [1, *model.shape]}
                    ours = {"model": name, "inputs": {model.inputs: one}, "format": "base64"}
                    doors = {
                        "dmsc": Door(address.urls, "/v1/predict", address.token or "", encoded(ours)),
                        "LitServe": Door([url], "/predict", "", encoded(tensor)),
                    }
                    rates = Rates()
                    for _, side in turns(list(doors), options.rounds):
                        rates.add(side, await answers_per_s(doors[side]))
            note = rates.note("dmsc", "LitServe", "answers/s")
            sheet.add(
                Plan(section=SECTION).at_least(
                    f"{name} ÷ LitServe", rates.ratio("dmsc", "LitServe"), "×", model.bar, note
                )
            )
            say(f"{name}: {note}")


def served(name: str) -> JobSpec:
    """The example as a version of one stage, with new weights."""
    spec = jobs((name,), ())[name]
    source = ROOT / str(spec.data.source)
    data = spec.data.model_dump(mode="json") | ({"source": str(source)} if source.exists() else {})
    serve = {
        "service": name,
        "kind": "predict",
        "exact": "off",
        "batch": BATCH,
        "batch_ms": WINDOW_MS,
    }
    return JobSpec.model_validate(
        {
            **spec.model_dump(mode="json"),
            "data": data,
            "serve": serve,
            "parallel": {"stages": 1, "replicas": 1},
        }
    )


def tensor_of(model: Model) -> dict[str, object]:
    """One sample, float32 in base64."""
    values = torch.rand(math.prod(model.shape), generator=torch.Generator().manual_seed(0))
    return {"shape": list(model.shape), "data": base64.b64encode(values.numpy().tobytes()).decode()}


def encoded(body: Mapping[str, object]) -> bytes:
    return json.dumps(body).encode()


async def answers_per_s(door: Door) -> float:
    """Of clients that ask again once they are answered, over connections of their own, to all gateways."""
    began = time.perf_counter()
    counts = await asyncio.gather(*(asked(door, number, began + MEASURED_S) for number in range(CLIENTS)))
    return sum(counts) / (time.perf_counter() - began)


async def asked(door: Door, client: int, until: float) -> int:
    """How many answers one client gets.

    Raises:
        NothingMeasured: One is an error.
    """
    url, count = door.urls[client % len(door.urls)], 0
    connection = Connection(url)
    try:
        while time.perf_counter() < until:
            answer = await connection.ask("POST", door.path, door.token, door.body)
            if answer.status != 200:
                raise NothingMeasured(f"{url} answered {answer.status}: {answer.body[:200]!r}", SECTION)
            count += 1
    finally:
        connection.close()
    return count
