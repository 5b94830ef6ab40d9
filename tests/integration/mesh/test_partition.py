"""Two nodes that no longer reach each other, though both reach the bus: a cut that lasts (DESIGN §5 rule 8).

Cuts that heal at once are in `test_transaction_faults`. This one takes network namespaces; see
`partition_namespace`, which runs there.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.mesh import partition_namespace
from tests.integration.mesh.conftest import Mesh
from tests.integration.mesh.expected_weights import undisturbed
from tests.patience import PATIENCE_S

ENTER = ("unshare", "--user", "--map-root-user", "--net")
NEEDED = ("unshare", "nsenter", "ip", "bridge")
TRIAL = (
    "ip link add bridge type bridge && ip link add port type veth && ip link set port master bridge && "
    "bridge link set dev port isolated on"
)
"""What the script needs of the kernel, in a namespace that is gone afterwards."""


@pytest.fixture(scope="module")
def namespaces() -> None:
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no cut between nodes without {', '.join(missing)} (util-linux, iproute2)")
    tried = subprocess.run([*ENTER, "sh", "-c", TRIAL], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"the system allows no network namespace with a bridge: {tried.stderr.strip()[-200:]}")


@pytest.mark.usefixtures("namespaces")
def test_two_nodes_are_cut_off_from_each_other(mesh: Mesh, tmp_path: Path) -> None:
    command = [*ENTER, sys.executable, partition_namespace.__file__, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        try:
            out, said = script.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            script.send_signal(signal.SIGINT)  # it ends what it has started
            out, said = script.communicate()
    print(said[-4000:])
    assert script.returncode == 0, f"ended with {script.returncode}, or not within {PATIENCE_S:.0f} s"
    told = json.loads(out)
    texts = told["texts"]
    assert told["state"] == "done", (told["reason"], texts)
    assert told["weights"] == undisturbed(mesh.client, partition_namespace.spec(tmp_path))
    assert told["steps"] == list(range(partition_namespace.STEPS)), texts
    cuts = [text for text in texts if "do not reach each other" in text]
    assert len(cuts) == 1, texts
    assert cuts[0].startswith("fault: nodes a/n and b/n ")
    side = "a" if "a/n is kept" in cuts[0] else "b"
    assert told["places"] == [side] * len(told["places"])
