"""The chart by Helm itself: the binary `helm`, or the wheel helm-sdkpy in a Python of its own.

That Python (3.12 or newer, `pip install helm-sdkpy`) is named by `DMSC_TEST_HELM_PYTHON`. Without either,
tests of the chart are skipped. No part of the product needs it.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.kubernetes.control_plane import ControlPlane
from benchmarks.kubernetes.fake_kubelet import ApiClient, Object

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "dmsc"
PYTHON = "DMSC_TEST_HELM_PYTHON"
OLD = {"podDisruptionBudget": {"apiVersion": "policy/v1beta1"}}
"""What a server before 1.21 needs in place of the chart's own values: it has no policy/v1."""


def helm() -> list[str]:
    """The words before an action; the test is skipped, in one line, where there is no Helm."""
    if python := os.environ.get(PYTHON):
        return [python, str(Path(__file__).with_name("helm_wheel.py"))]
    if shutil.which("helm"):
        return ["helm"]
    pytest.skip(f"no Helm: there is no `helm`, and {PYTHON} names no Python with helm-sdkpy")


class HelmFailure(Exception):
    """Helm has refused; its text is what it said."""


@dataclass
class HelmRelease:
    """The chart as a release of a namespace."""

    plane: ControlPlane
    namespace: str
    folder: Path
    name: str = "mesh"

    def __post_init__(self) -> None:
        """The chart is copied: a server older than the chart allows is all that some tests have."""
        self.chart = self.folder / "chart"
        shutil.copytree(CHART, self.chart)
        if self.is_old:
            file = self.chart / "Chart.yaml"
            lines = [line for line in file.read_text().splitlines() if not line.startswith("kubeVersion")]
            file.write_text("\n".join(lines) + "\n")

    @property
    def is_old(self) -> bool:
        return self.plane.minor < 25

    def run(self, action: str, values: dict[str, Any] | None = None) -> None:
        """Installs, upgrades or uninstalls.

        Raises:
            HelmFailure: it was refused.
        """
        given = {**(OLD if self.is_old else {}), **(values or {})}
        file = self.folder / "values.json"
        file.write_text(json.dumps(given))
        words, place = helm(), ["--namespace", self.namespace, "--kubeconfig", str(self.plane.kubeconfig)]
        if words == ["helm"]:
            what = [] if action == "uninstall" else [str(self.chart), "--values", str(file)]
            command = [*words, action, self.name, *what, *place]
        else:
            own = [self.name, str(self.chart), self.namespace, str(self.plane.kubeconfig), str(file)]
            command = [*words, action, *own]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise HelmFailure(done.stderr.strip())

    async def manifests(self, admin: ApiClient) -> list[Object]:
        """What Helm made of the chart's templates, as the newest revision has it."""
        found = await admin.items(
            f"/api/v1/namespaces/{self.namespace}/secrets", labelSelector=f"owner=helm,name={self.name}"
        )
        newest = max(found, key=lambda each: int(each["metadata"]["labels"]["version"]))
        packed = base64.b64decode(base64.b64decode(newest["data"]["release"]))
        text = json.loads(gzip.decompress(packed))["manifest"]
        return [document for document in yaml.safe_load_all(text) if document]
