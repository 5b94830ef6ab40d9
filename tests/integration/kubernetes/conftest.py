"""A real control plane for the tests of one module, and nodes whose pods are processes."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.kubernetes.control_plane import ControlPlane, assets
from benchmarks.kubernetes.fake_kubelet import ApiClient
from tests.waiting import eventually
from tests.warm_processes import WarmProcess, incubator, start_module

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One cluster without nodes; skipped where there is none to be had."""
    pytest.importorskip("kr8s", reason="kr8s is not installed (extra kubernetes)")
    try:
        binaries = assets()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with ControlPlane(tmp_path_factory.mktemp("kubernetes"), binaries).running() as plane:
        yield plane


@pytest_asyncio.fixture
async def admin(control_plane: ControlPlane) -> AsyncIterator[ApiClient]:
    """The administrator."""
    client = ApiClient(control_plane.kubeconfig)
    async with client.http:
        yield client


@pytest_asyncio.fixture
async def namespace(admin: ApiClient) -> AsyncIterator[str]:
    """A namespace of the test's own, with all that is in it."""
    name = f"test-{next(_numbers)}"
    await admin.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    await eventually(lambda: is_there(admin, account), "the controllers make no service account")
    yield name
    await admin.ask("DELETE", f"/api/v1/namespaces/{name}")


async def is_there(admin: ApiClient, path: str) -> bool:
    answer = await admin.http.get(path)
    return answer.is_success


def start_warm(words: Sequence[str], environment: Mapping[str, str], log: Path) -> WarmProcess:
    """Starts a pod's process out of one that has imported everything already."""
    return start_module("dmsc", tuple(words), cwd=Path(), environment={**environment, **incubator()}, out=log)
