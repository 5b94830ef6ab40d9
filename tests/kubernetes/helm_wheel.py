"""Helm by the wheel helm-sdkpy, run by a Python of its own (3.12 or newer): one action, one JSON answer.

python helm_wheel.py ACTION RELEASE CHART NAMESPACE KUBECONFIG VALUES.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import helm_sdkpy


async def carry_out(
    action: str, release: str, chart: str, namespace: str, kubeconfig: str, given: dict[str, Any]
) -> Any:
    """Carries one action out."""
    configuration = helm_sdkpy.Configuration(namespace=namespace, kubeconfig=kubeconfig)
    if action == "uninstall":
        return await helm_sdkpy.Uninstall(configuration).run(release, wait=False)
    kind = {"install": helm_sdkpy.Install, "upgrade": helm_sdkpy.Upgrade}[action]
    return await kind(configuration).run(release, chart, values=given, wait=False)


try:
    *words, values = sys.argv[1:]
    print(json.dumps(asyncio.run(carry_out(*words, json.loads(Path(values).read_text())))))
except helm_sdkpy.HelmError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
