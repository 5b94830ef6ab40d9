"""Steps of builds of data sets, as a user would write them."""

from __future__ import annotations

import time
from typing import Any


def slowly(record: dict[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
    """The record as it is; a unit of many takes long enough to be killed."""
    time.sleep(wait_s)
    return record
