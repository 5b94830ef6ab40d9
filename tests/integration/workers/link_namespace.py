"""In a network namespace whose loopback the kernel shapes: measures a tensor link there, prints its figures.

    unshare --user --map-root-user --net python link_namespace.py FOLDER

With netem where the kernel has it, else with a token bucket (a rate, no latency). Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path

import torch

from bus.server.embedded import EmbeddedServer
from schemas.telemetry import LinkFigures
from tests.integration.workers.exchanging import own_connections

RATE_BYTES_PER_S = 5e6
FASTEST_BYTES_PER_S = 1.5 * RATE_BYTES_PER_S
"""What is measured must not be more: the bucket's first bytes come at once."""
DELAY_MS = 20
QDISCS = {
    "netem": f"netem delay {DELAY_MS}ms rate 40mbit limit 10000",
    "tbf": "tbf rate 40mbit burst 128kb latency 800ms",
}
FLOATS = 200_000
TRANSFERS = 8
MOST_TRANSFERS = 64
"""Only a transfer that both ends were ready for is timed, and one whose receiver stood still while the bytes
came seems short: on busy cores some more are needed."""


def shape_loopback() -> str:
    """Which queueing discipline stands; empty: this kernel has none of them."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for name, options in QDISCS.items():
        command = ["tc", "qdisc", "add", "dev", "lo", "root", *options.split()]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return name
    return ""


async def measure(folder: Path) -> dict[str, object]:
    async with (
        EmbeddedServer(folder / "nats", sync_always=False) as server,
        own_connections(server.url) as (one, two),
    ):
        figures: LinkFigures | None = None
        for number in range(MOST_TRANSFERS):
            await one.send(two, number, torch.zeros(FLOATS))
            await two.arrival()
            if number + 1 < TRANSFERS:
                continue
            (sample,) = one.exchange.samples()
            figures = sample.figures or figures
            if figures is not None and (figures.bandwidth_bytes_per_s or math.inf) < FASTEST_BYTES_PER_S:
                break
        assert figures is not None
        return figures.model_dump()


def main() -> None:
    torch.set_num_threads(1)
    qdisc = shape_loopback()
    figures = asyncio.run(measure(Path(sys.argv[1]))) if qdisc else {}
    print(json.dumps({"qdisc": qdisc, "figures": figures}))


if __name__ == "__main__":
    main()
