"""Links measured by their own transfers, over links that are shaped at the data plane."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest

from schemas.telemetry import LinkFigures
from tests.integration.workers.exchanging import Instance, Make, numbered
from tests.integration.workers.link_namespace import DELAY_MS, FASTEST_BYTES_PER_S
from tests.integration.workers.link_namespace import FLOATS as FLOATS_IN_NAMESPACE
from tests.patience import PATIENCE_S
from workers.links.link_shaping import Shaping

ROOT = Path(__file__).parents[3]
FLOATS = 25_000


def shaped(folder: Path, **shape: float) -> Shaping:
    """What `one` sends to `two`, and nothing else."""
    file = folder / "shaping.json"
    file.write_text(json.dumps({"links": [{"from": "one", "to": "two", **shape}]}))
    return Shaping(file)


async def exchanged(one: Instance, two: Instance, times: int) -> None:
    """Microbatches there and back, one after the other."""
    for number in range(times):
        assert await one.send(two, number, numbered(number, FLOATS)) == "delivered"
        notice, (there,) = await two.arrival()
        assert (notice.microbatch, there[-1]) == (number, number)
        assert await two.send(one, number, numbered(number, FLOATS), direction="backward") == "delivered"
        await one.arrival()


def told(instance: Instance) -> LinkFigures:
    (sample,) = instance.exchange.samples()
    assert sample.figures is not None
    return sample.figures


async def test_latency_and_bandwidth_of_a_shaped_link_are_measured_by_both_ends(
    make: Make, tmp_path: Path
) -> None:
    shaping = shaped(tmp_path, latency_ms=40, bytes_per_s=2e6)
    one, two = await make("one", shaping=shaping), await make("two", shaping=shaping)
    await exchanged(one, two, 12)
    figures = told(one)
    # a receiver that stood still while the bytes came has measured too little
    while (figures.bandwidth_bytes_per_s or math.inf) >= 4e6:
        await exchanged(one, two, 4)
        figures = told(one)
    assert figures.latency_ms is not None
    assert figures.latency_ms >= 40
    assert figures.bytes == 4 * FLOATS
    assert figures.loss == 0
    cost = one.exchange.cost(two.member)
    assert cost is not None
    assert cost.transfer_ms >= 40 + 4 * FLOATS / 2e6 * 1e3 / 2
    assert one.exchange.samples()[0].figures is None, "no news"


async def test_over_a_lossy_link_everything_arrives_and_the_loss_is_told(make: Make, tmp_path: Path) -> None:
    shaping = shaped(tmp_path, loss=0.2)
    one, two = await make("one", shaping=shaping), await make("two")
    await exchanged(one, two, 24)
    assert 0.05 < told(one).loss < 0.5
    assert told(two).loss == 0
    assert one.broken.qsize() >= 2, "the loss never happened"


async def test_a_new_incarnation_has_a_link_of_its_own_and_a_fenced_one_none(make: Make) -> None:
    one, two, again = await make("one"), await make("two"), await make("two", "2")
    async with asyncio.timeout(PATIENCE_S):  # only a transfer that both ends were ready for is timed
        while one.exchange.cost(two.member) is None:
            await exchanged(one, two, 1)
    assert one.exchange.cost(again.member) is None
    one.exchange.fence(two.member)
    assert one.exchange.cost(two.member) is None


async def test_what_the_kernel_shapes_is_measured_too(tmp_path: Path) -> None:
    """netem in a network namespace where the kernel has it; else its token bucket, which has no latency."""
    if not all(map(shutil.which, ("unshare", "ip", "tc"))):
        pytest.skip("unshare, ip and tc are not installed")
    script = Path(__file__).with_name("link_namespace.py")
    process = await asyncio.create_subprocess_exec(
        "unshare",
        "--user",
        "--map-root-user",
        "--net",
        sys.executable,
        str(script),
        str(tmp_path),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    out, err = await process.communicate()
    if process.returncode and (b"unshare" in err or b"RTNETLINK" in err):
        pytest.skip(f"no network namespaces here: {err.decode().splitlines()[-1]}")
    assert process.returncode == 0, err.decode()
    said = json.loads(out.splitlines()[-1])
    print(said)
    if not said["qdisc"]:
        pytest.skip("this kernel has neither netem nor tbf")
    figures = LinkFigures.model_validate(said["figures"])
    assert figures.bytes == 4 * FLOATS_IN_NAMESPACE
    assert figures.bandwidth_bytes_per_s is not None
    assert figures.bandwidth_bytes_per_s < FASTEST_BYTES_PER_S
    if said["qdisc"] == "netem":
        assert figures.latency_ms is not None
        assert figures.latency_ms >= 2 * DELAY_MS, "loopback is passed twice"
