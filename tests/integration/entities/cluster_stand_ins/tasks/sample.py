"""A stand-in for the sample worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def main(payload: dict[str, Any], result: Path | None) -> int:
    assert result is not None
    if payload["spec"]["name"] == "no-sample":
        raise RuntimeError("weights are gone")
    result.write_text(json.dumps({"text": f"def {payload['weights_url']}"}))
    return 0
