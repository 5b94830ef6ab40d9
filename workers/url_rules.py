"""What a process of a job opens of what the job names, as its node was started with (ADR-0035)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bus.artifacts import restrict
from schemas.urls import UrlRules


def restrict_urls(allowed: Sequence[str] | None) -> None:
    """`allowed`: the node's `--allow-url`; None: whatever the job names."""
    if allowed is not None:
        restrict(UrlRules.of(allowed, os.getcwd()))
