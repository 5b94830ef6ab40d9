"""A slow link in a mesh at work is routed around, gets its work back, and changes no weights.

The link is shaped at the data plane (`workers.links.link_shaping`): not every kernel has netem, and all
instances share one loopback.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.subjects import QOS_REPORT, STEP_CLAIM
from schemas.job import JobSpec
from schemas.signals import LinkReport, QosReport
from schemas.step import MicrobatchClaim
from tests.integration.mesh.conftest import Mesh, done, padded, running_mesh, tiny_job
from tests.integration.mesh.expected_weights import check_weights
from workers.links.link_shaping import ENVIRONMENT

STEPS = 70
SLOW, HEALED = 6, 18
"""From these steps on the link is slow, and well again."""
MICROBATCHES = 8


@pytest.fixture
def shaping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a test may shape links."""
    file = tmp_path / "shaping.json"
    monkeypatch.setenv(ENVIRONMENT, str(file))
    return file


@pytest.fixture
def own_mesh(tmp_path: Path, shaping: Path) -> Iterator[Mesh]:
    with running_mesh(tmp_path / "state", "--slots", "6", "--cluster", "a") as mesh:
        yield mesh


def job(name: str) -> JobSpec:
    """Padded, so that a step is mostly waiting; pads change no numbers."""
    job = tiny_job(
        name,
        training={"steps": STEPS, "microbatches": MICROBATCHES, "validation_microbatches": 0},
        parallel={"stages": 2, "replicas": 2, "segmentation": "uniform"},
    )
    return padded(job, 6.0)


async def test_a_slow_link_is_routed_around_and_comes_back(own_mesh: Mesh, shaping: Path) -> None:
    client = own_mesh.client

    def train(spec: JobSpec) -> str:
        name = client.submit(spec).job
        for event in client.events(name):
            if event.result is None:
                continue
            if event.result.step == SLOW:
                link = {"from": f"{name}-s0-r0", "to": f"{name}-s1-r1", "latency_ms": 300}
                shaping.write_text(json.dumps({"links": [link]}))
            elif event.result.step == HEALED:
                shaping.unlink()
        done(client, name)
        return name

    name = await asyncio.to_thread(train, job("shaped"))
    check_weights(client, name)

    over: Counter[int] = Counter()  # step → microbatches over the link
    worst: LinkReport | None = None
    async with own_mesh.bus("witness") as bus:
        async for item in bus.history(STEP_CLAIM, job=name):
            claim = item.message
            assert isinstance(claim, MicrobatchClaim)
            over[claim.step] += (claim.owner.sid, claim.upstream) == (f"{name}-s1-r1", f"{name}-s0-r0")
        async for item in bus.history(QOS_REPORT):
            assert isinstance(item.message, QosReport)
            for link in item.message.links:
                if worst is None or (link.figures.latency_ms or 0) > (worst.figures.latency_ms or 0):
                    worst = link

    def share(first: int, last: int) -> float:
        return sum(over[step] for step in range(first, last)) / (last - first) / MICROBATCHES

    before, slow, after = share(1, SLOW), share(SLOW + 6, HEALED), share(STEPS - 10, STEPS)
    print(f"share of all microbatches over the link: {before:.1%}, slow {slow:.1%}, well again {after:.1%}")
    assert before > 0.1
    assert slow < before / 2
    assert after > before / 3
    assert worst is not None
    ends = {worst.sender, worst.receiver}  # the way back counts as slow, too: its receipts go this way
    assert ends == {f"{name}-s0-r0", f"{name}-s1-r1"}
    assert (worst.figures.latency_ms or 0) > 150
