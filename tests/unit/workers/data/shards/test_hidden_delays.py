"""A store whose requests are sometimes slow or fail: reading ahead hides it, and no sample is lost or moved.

By the order of events, not by time: a slow answer is held until the microbatch before the one that needs it
has been taken. A microbatch of 40 ms then hides 500 ms if at least thirteen are taken meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.builders.range_server import range_server
from tests.builders.samples import epochs, opened
from tests.builders.shards import mds_files, write_all
from tests.patience import PATIENCE_S
from workers.data.prefetch import Prefetcher

SHARDS, PER_SHARD, SAMPLES, MICROBATCHES = 160, 2, 4, 16
EPOCH = SHARDS * PER_SHARD // SAMPLES
"""In microbatches: five steps."""
STEPS = EPOCH // MICROBATCHES
SPIKES, ERRORS = 10, 20
"""Of so many shards one is slow, and one fails at first: 5 %."""
SPIKE_MS, MICROBATCH_MS = 500, 40


class UnreliableStore:
    """Delays and errors of a `RangeServer`, each at the first request of a shard's bytes.

    Args:
        needs: Of each shard, the first microbatch that needs it.
    """

    def __init__(self, needs: Sequence[int]) -> None:
        by_need = sorted(range(SHARDS), key=needs.__getitem__)
        later = [shard for shard in by_need if needs[shard] >= MICROBATCHES]
        self.slow, self.failing = {*later[::SPIKES]}, {*later[5::ERRORS]}
        self.hidden_by: dict[int, int] = {}
        """Of each slow answer, how many microbatches were taken meanwhile."""
        self.failed = 0
        self._needs = needs
        self._taken = 0
        self._asked: set[int] = set()
        self._change = threading.Condition()

    def delay(self, path: str, span: str) -> bool:
        if not path.endswith(".mds") or span == "bytes=0-0":
            return False
        shard = int(path.split(".")[1])
        with self._change:
            if shard in self._asked:
                return False
            self._asked.add(shard)
            self._change.notify_all()
            if shard in self.slow:
                began = self._taken
                assert self._change.wait_for(lambda: self._taken >= self._needs[shard], PATIENCE_S)
                self.hidden_by[shard] = self._taken - began
            self.failed += shard in self.failing
            return shard in self.failing

    def took(self, microbatches: int) -> None:
        with self._change:
            self._taken = microbatches
            self._change.notify_all()

    def compute(self, until: int) -> None:
        """The time of a microbatch: what is needed before this one is asked for meanwhile."""
        due = {shard for shard, need in enumerate(self._needs) if need < until}
        with self._change:
            assert self._change.wait_for(lambda: due <= self._asked, PATIENCE_S), due - self._asked


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
async def test_delays_and_errors_of_a_store_are_hidden_and_no_sample_is_lost(tmp_path: Path) -> None:
    numbers = np.arange(SHARDS * PER_SHARD, dtype=np.int64).reshape(SHARDS, PER_SHARD, 1)
    files = mds_files({"x": "ndarray:int64:1"}, [[{"x": number} for number in shard] for shard in numbers])
    write_all(tmp_path, files)
    data = {"kind": "shards", "validation_fraction": 0}
    sizes = {"microbatches": MICROBATCHES, "microbatch_samples": SAMPLES, "steps": STEPS}
    local = await opened({**data, "source": str(tmp_path)}, **sizes)
    expected = [batch["x"].flatten() for batch in epochs(local, STEPS, MICROBATCHES)]
    local.close()
    assert torch.equal(torch.cat(expected).sort().values, torch.arange(SHARDS * PER_SHARD))
    needs = [EPOCH] * SHARDS
    for microbatch, samples in reversed([*enumerate(expected)]):
        for number in samples.tolist():
            needs[number // PER_SHARD] = microbatch

    store = UnreliableStore(needs)
    with range_server() as server:
        server.files |= files
        server.delay = store.delay
        prefetcher = Prefetcher(await opened({**data, "source": server.url}, **sizes))
        for microbatch in range(MICROBATCHES):
            prefetcher.expect("train", 0, microbatch)
        for number in range(EPOCH):
            store.compute(until=min(number + MICROBATCHES, EPOCH))
            step, microbatch = divmod(number, MICROBATCHES)
            batch, replaced = await prefetcher.get("train", step, microbatch)
            assert torch.equal(batch["x"].flatten(), expected[number]), "the same samples in the same order"
            assert not replaced
            store.took(number + 1)
            if step + 1 < STEPS:
                prefetcher.expect("train", step + 1, microbatch)  # as a data instance does
        prefetcher.close()
    assert store.failed == len(store.failing) > 0, "each error was met"
    assert store.hidden_by.keys() == store.slow, "each delay was met"
    assert min(store.hidden_by.values()) * MICROBATCH_MS >= SPIKE_MS, store.hidden_by
