"""Builders under their names of before: the tests of whole entities take them from here."""

from __future__ import annotations

from tests.builders.jobs import job, spec
from tests.builders.records import instance, service
from tests.builders.routes import policy
from tests.builders.telemetry import compute
from tests.builders.telemetry import linked_sample as sample

__all__ = ["compute", "instance", "job", "policy", "sample", "service", "spec"]
