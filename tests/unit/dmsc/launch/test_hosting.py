"""What `dmsc up --tenant …` asks for, and what it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bus.guard.accounts import account_lines, account_of, least_store_bytes
from dmsc.cli import app
from dmsc.launch.hosting import CONNECTIONS, GIB, STORE_BYTES, HostOptions, tenant_child
from dmsc.launch.mesh_options import MeshOptions
from dmsc.state.state_folder import StateFolder
from schemas.errors import BadInput

MESH = MeshOptions(state=Path("/host"))


def options(*tenants: str, **more: Any) -> HostOptions:
    return HostOptions(tenants=tenants, mesh=MESH, **more)


@pytest.mark.parametrize(
    ("tenants", "quota_bytes", "said"),
    [
        (("a b",), None, "letters, digits, - and _ only"),
        (("red", "red"), None, "the same name twice"),
        (("red",), GIB // 2, "give more by --quota"),
        (tuple(f"t{number}" for number in range(100)), None, "give more by --quota"),
    ],
)
def test_what_cant_be_is_said(tenants: tuple[str, ...], quota_bytes: int | None, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        options(*tenants, quota_bytes=quota_bytes)


def test_shares_are_equal_and_a_quota_prevails() -> None:
    assert options("red", "blue").limits.store_bytes == STORE_BYTES // 2
    assert options("red", "blue").limits.connections == CONNECTIONS // 2
    assert options("red", "blue", quota_bytes=2 * GIB).limits.store_bytes == 2 * GIB > least_store_bytes()


def test_the_servers_copies_count_against_the_limits() -> None:
    from bus.guard.accounts import NatsAccount

    account = NatsAccount(name=account_of("red"), limits=options("red", quota_bytes=2 * GIB).limits)
    assert f"max_file: {6 * GIB}" in "\n".join(account_lines([account], 3))


def test_a_tenants_command_line_is_one_that_up_takes() -> None:
    mesh = MeshOptions(
        state=Path("/host"),
        clusters=("x", "y"),
        slots=3,
        policies=("rebalancing",),
        separate=True,
        orchestrators=2,
        metrics_port="off",
        access_file=Path("/rules.yaml"),
        tls=True,
    )
    child = tenant_child("red", StateFolder(Path("/host/tenants/red")), mesh, 8082)
    words = " ".join(child.arguments)
    for said in (
        "up --state /host/tenants/red --cluster x --cluster y --slots 3 --bind 127.0.0.1",
        "--http-port 8082",
        "--metrics-port off",
        "--orchestrators 2",
        "--separate",
        "--policy rebalancing",
        "--access-file /rules.yaml",
    ):
        assert said in words
    assert child.may_leave, "one tenant may be stopped by itself"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--quota", "2"), "name them with --tenant"),
        (("--tenant", "red", "--quota", "nan"), "GiB above 0"),
        (("--tenant", "red", "--metrics-port", "9464"), "one port is for one mesh"),
    ],
)
def test_what_does_not_go_together(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["up", *arguments, "--state", str(tmp_path)])
    assert isinstance(done.exception, BadInput)
    assert said in done.exception.text


def test_a_tenants_folder_has_its_own_secrets_and_no_guards_keys(tmp_path: Path) -> None:
    host = StateFolder(tmp_path)
    host.logs.mkdir()
    tenant = host.tenant("red")
    tenant.path.mkdir(parents=True)
    tenant.write_host_servers(["nats://127.0.0.1:4222", "nats://127.0.0.1:4223"])
    tenant.write_tokens()
    assert tenant.host_servers() == ("nats://127.0.0.1:4222", "nats://127.0.0.1:4223")
    assert tenant.bus_token() is not None
    assert tenant.guard_keys() is None
    assert not tenant.guard_file.exists()
    assert host.tenants() == ("red",)
    assert host.write_host_keys() == host.write_host_keys(), "the same at each start"
    assert host.guard_keys() is None
