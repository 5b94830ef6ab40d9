"""Samples per second and memory, from file to tensor: DMSC beside the loaders of others.

    python -m benchmarks.data [--rounds 3] [--workers 1] [--only images-folder]

All read the same MDS shards with the same number of worker processes, in interleaved rounds, each run in
processes of its own. DMSC's workers send over tensor links to a stage, others' to the training process, and
each batch is read once there: of shared memory, a process has no page before it reads it. The
first epoch is the cold one (of a store: with an empty cache), from its first batch, since processes and links
have to start before it; the last is the cached one; a file of a folder is
dropped from the page cache before each run as far as the system lets us. What is not installed is named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.data_sides.task import Answer, Task, write_shards
from benchmarks.harness.command import no_less
from benchmarks.harness.emptiness import measuring
from benchmarks.harness.figures import spread
from benchmarks.harness.meshes import new_folder
from benchmarks.harness.processes import turns

BAR = 0.9
OURS = "DMSC"
NEEDS = {"DataLoader": "torch", "StatefulDataLoader": "torchdata", "MosaicML Streaming": "streaming"}
BUCKET = "bench"


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run(side: str, task: Task, log: Path) -> Answer | None:
    """One run; None if it fails, whose reason is in the log."""
    module = "product" if side == OURS else "loaders"
    names = [] if side == OURS else [side]
    command = [sys.executable, "-m", f"benchmarks.data_sides.{module}", *names, task.text()]
    with log.open("ab") as errors:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, "PYTHONPATH": os.getcwd()}
        )
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]  # others are logs
    if done.returncode or not lines:
        return None
    return Answer(**json.loads(lines[-1]))


def drop_pages(folder: Path) -> None:
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


@contextmanager
def s3(folder: Path) -> Iterator[str]:
    """An S3 server on loopback with the files of a folder; yields its address."""
    import fsspec

    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", "5999"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    endpoint = "http://127.0.0.1:5999"
    try:
        for _ in range(300):
            with suppress(OSError):
                urllib.request.urlopen(endpoint).close()
                break
            time.sleep(0.1)
        store = fsspec.filesystem("s3", key="bench", secret="benchbench", endpoint_url=endpoint)
        store.mkdir(BUCKET)
        store.put([str(path) for path in folder.iterdir()], f"{BUCKET}/")
        yield endpoint
    finally:
        server.terminate()
        server.wait()


def compare(name: str, task: Task, sides: list[str], rounds: int, folder: Path) -> None:
    answers: dict[str, list[Answer]] = {side: [] for side in sides}
    log = folder / "errors.log"
    for number, side in turns(sides, rounds):
        cache = folder / f"cache-{number}-{side.replace(' ', '')}"
        cache.mkdir()
        drop_pages(Path(task.folder))
        answer = run(side, Task(**{**task.__dict__, "cache": str(cache)}), log)
        shutil.rmtree(cache, ignore_errors=True)
        if answer is not None:
            answers[side].append(answer)
    size = sum(path.stat().st_size for path in Path(task.folder).iterdir())
    print(f"\n{name}: {task.count:,} samples, {size / 1e6:.0f} MB, {task.workers} workers, {rounds} rounds")
    for epoch, state in ((0, "cold"), (-1, "cached")):
        medians = {}
        for side, found in answers.items():
            if found:
                rates = [answer.rates[epoch] for answer in found]
                medians[side] = statistics.median(rates)
                memory = statistics.median(answer.memory_bytes for answer in found) / 1e6
                print(f"  {state:6} {side:20} {spread(rates, ',.0f')} samples/s; workers {memory:,.0f} MB")
            elif epoch == 0:
                print(f"  {side}: failed: {log.read_text().strip().splitlines()[-1][:160]}")
        if epoch < 0:
            for side, found in answers.items():
                if found:
                    samples = 1e-3 * task.epochs * task.count
                    workers = spread([answer.cpu_s / samples for answer in found], ".3f")
                    taking = spread([answer.taking_cpu_s / samples for answer in found], ".3f")
                    first = spread([answer.first_s for answer in found], ".2f")
                    print(f"  {'first':6} {side:20} batch after {first} s")
                    print(f"  {'CPU':6} {side:20} ms a sample: workers {workers}, who takes them {taking}")
        if OURS in medians and len(medians) > 1:
            best = max(rate for side, rate in medians.items() if side != OURS)
            ratio = medians[OURS] / best
            print(f"  {state:6} DMSC ÷ best of the others: {ratio:.2f} (bar {BAR}: {verdict(ratio)})")


def verdict(ratio: float) -> str:
    return "met" if ratio >= BAR else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=no_less(int, 1), default=3)
    parser.add_argument("--workers", type=no_less(int, 1), default=1)
    parser.add_argument("--samples", type=no_less(int, 1), default=32, help="of a batch")
    parser.add_argument("--count", type=no_less(int, 1), default=8192, help="samples of the data set")
    parser.add_argument("--only", default="", help="images-folder, tokens-folder, images-s3 or tokens-s3")
    options = parser.parse_args()
    others = [side for side, module in NEEDS.items() if installed(module)]
    for side in NEEDS.keys() - set(others):
        print(f"{side}: not installed ({NEEDS[side]}), left out")
    with new_folder() as folder:
        for form in ("images", "tokens"):
            files = folder / form
            files.mkdir()
            write_shards(files, form, options.count)
            task = Task(
                form=form,
                folder=str(files),
                cache="",
                workers=options.workers,
                samples=options.samples,
                count=options.count,
                epochs=2,
            )
            if options.only in ("", f"{form}-folder"):
                compare(f"{form}, a folder", task, [OURS, *others], options.rounds, folder)
            if options.only not in ("", f"{form}-s3"):
                continue
            if not (installed("moto") and installed("s3fs")):
                print(f"\n{form}, S3: moto or s3fs is not installed, left out")
                continue
            with s3(files) as endpoint:
                sides = [OURS, *(side for side in others if side == "MosaicML Streaming")]
                remote = Task(**{**task.__dict__, "endpoint": endpoint, "bucket": BUCKET})
                compare(f"{form}, S3 on loopback", remote, sides, options.rounds, folder)


if __name__ == "__main__":
    with measuring():
        main()
