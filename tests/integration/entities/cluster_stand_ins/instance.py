"""A stand-in for an instance: does what its unit's tag `do:…` says and shows its payload in its log."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any


def main(payload: dict[str, Any], result: Path | None) -> int:
    deeds = [tag.removeprefix("do:") for tag in payload["start"]["unit"]["tags"] if tag.startswith("do:")]
    if "fail" in deeds:
        raise ValueError("layer 3 does not fit")
    if "end" in deeds:
        return 0
    if "stubborn" in deeds:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import torch

    print(json.dumps({**payload, "threads": torch.get_num_threads()}))
    if "busy" in deeds:
        while True:
            pass
    while True:
        time.sleep(60)
