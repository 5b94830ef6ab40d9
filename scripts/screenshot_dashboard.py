"""Makes docs/dashboard.png: a mesh of its own trains, an instance is killed and replaced, a browser looks.

    python scripts/screenshot_dashboard.py [--out docs/dashboard.png] [--light] [--width 1440] [--height 940]

Needs a Chromium on the PATH and `playwright` (dmsc[dev]).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dmsc.client.client import Client
from schemas.job import JobSpec

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
JOB = {
    "name": "stdlib-gpt",
    "model": {
        "factory": "workers.models.padded:padded_gpt",  # devices of their own, emulated
        "args": {"layers": 4, "width": 64, "heads": 4, "context": 64, "pad_ms": 10},
    },
    "data": {"source": "stdlib:", "sample_tokens": 64},
    "training": {
        "steps": 5000,
        "microbatches": 12,
        "microbatch_samples": 2,
        "validate_every": 40,
        "checkpoint_every": 30,
    },
    "parallel": {"stages": 3, "replicas": [2, 3, 2]},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "dashboard.png")
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=940)
    parser.add_argument("--steps", type=int, default=90, help="before the kill; half as many follow it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        ports = ["--nats-port", "0", "--http-port", "0", "--slots", "6", "--policy", "service-time-weights"]
        mesh = subprocess.Popen(
            [sys.executable, "-m", "dmsc", "up", "--state", str(state), *ports], stdout=subprocess.DEVNULL
        )
        try:
            while (
                not (state / "mesh.json").exists() or '"ready_at": null' in (state / "mesh.json").read_text()
            ):
                if mesh.poll() is not None:
                    raise SystemExit("the mesh did not start")
                time.sleep(0.2)
            with Client(state=state) as client:
                train(client, options.steps)
                door = next(one for one in client.mesh().services if one.sid == "gateway-a").endpoint.address
            take(door, (state / "token").read_text().strip(), options)
        finally:
            mesh.send_signal(signal.SIGINT)
            mesh.wait(60)
    print(f"{options.out}: {options.out.stat().st_size / 1000:.0f} kB")


def train(client: Client, steps: int) -> None:
    """Returns in mid-run, some steps after an instance was killed."""
    job = client.submit(JobSpec.model_validate(JOB)).job
    for event in client.events(job):
        if event.result is None:
            continue
        if event.result.step == steps:
            victim = next(one for one in client.mesh().services if one.sid == f"{job}-s1-r1")
            os.kill(victim.endpoint.pid, signal.SIGKILL)
        if event.result.step >= steps + steps // 2:
            return


def take(door: str, token: str, options: argparse.Namespace) -> None:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        raise SystemExit("no Chromium on the PATH: install one (Debian: chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        page = browser.new_page(
            viewport={"width": options.width, "height": options.height},
            color_scheme="light" if options.light else "dark",
        )
        page.goto(f"{door}/dashboard/#token={token}")
        page.wait_for_selector(".happened li", timeout=60_000)
        page.wait_for_timeout(6_000)  # figures of links come every five seconds
        page.screenshot(path=str(options.out))
        browser.close()


if __name__ == "__main__":
    main()
