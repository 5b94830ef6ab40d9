"""Links measured by their own transfers, over links that are shaped at the data plane."""

from __future__ import annotations

import json
from pathlib import Path

from schemas.telemetry import LinkFigures
from tests.integration.workers.exchanging import Instance, Make, numbered
from workers.link_shaping import Shaping

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
    assert figures.latency_ms is not None
    assert figures.latency_ms >= 40
    assert figures.bytes == 4 * FLOATS
    assert figures.bandwidth_bytes_per_s is not None
    assert 0.2e6 < figures.bandwidth_bytes_per_s < 4e6
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
    await exchanged(one, two, 2)
    assert one.exchange.cost(two.member) is not None
    assert one.exchange.cost(again.member) is None
    one.exchange.fence(two.member)
    assert one.exchange.cost(two.member) is None
