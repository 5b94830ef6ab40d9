"""Draws windows of sources, each in a process with so many MiB of memory beyond what it begins with.

    python -m tests.unit.workers.data.kinds.limited_windows MIB SOURCE…

Prints a list: for each source the SHA-256 of two steps' batches, or null where memory did not suffice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from functools import partial

from tests.builders.limited_memory import within
from tests.builders.samples import epochs, opened


def drawn(source: str) -> dict[str, str]:
    data = {"source": source, "sample_tokens": 1 << 19}
    found = hashlib.sha256()
    batches = asyncio.run(opened(data, microbatch_samples=1))
    for split in ("train", "validation"):
        for batch in epochs(batches, steps=2, split=split):
            found.update(batch["targets"].numpy().tobytes())
    batches.close()
    return {"sha256": found.hexdigest()}


def main() -> None:
    room = int(sys.argv[1]) << 20
    answers = [within(room, partial(drawn, source)) for source in sys.argv[2:]]
    print(json.dumps([answer and answer["sha256"] for answer in answers]))


if __name__ == "__main__":
    main()
