"""docker-compose.yml: every entity its own service, and only commands that `dmsc` knows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from bus.security.credentials import Credential
from deploy import make_secrets
from dmsc.cli import app
from dmsc.process.composition import ENTITIES
from dmsc.state import identities

ROOT = Path(__file__).resolve().parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
COMMANDS = {
    name: one["command"]
    for name, one in SERVICES.items()
    if one["image"] == "dmsc:local" and "command" in one
}


def test_every_entity_is_a_service_of_its_own_in_two_clusters() -> None:
    alone = {
        command[1]: name
        for name, command in COMMANDS.items()
        if command[0] == "run" and "--cluster" not in command
    }
    assert alone.pop("tracer") == "tracer"
    assert set(alone) == {
        "service-registry",
        "authorizer",
        "orchestrator",
        "broker",
        "accountant",
        "model-registry",
        "provisioner",
    }
    for cluster in "ab":
        beside = [command[:2] for command in COMMANDS.values() if cluster in command]
        assert sorted(command[-1] if command[0] == "run" else command[0] for command in beside) == [
            "gateway",
            "join",
            "router",
        ]
    assert {*alone, "gateway", "router"} == set(ENTITIES)


@pytest.fixture(scope="module")
def program() -> Any:
    """All of `dmsc`'s commands, which take half a second to make."""
    return typer.main.get_command(app)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "secrets"])
def test_its_command_is_one_that_dmsc_parses(name: str, program: Any) -> None:
    group = program
    arguments = list(COMMANDS[name])
    while hasattr(group, "commands"):
        group = group.commands[arguments.pop(0)]
    group.make_context(name, arguments)  # parses, runs nothing


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command[0] == "run"])
def test_it_is_called_as_its_kind_is(name: str) -> None:
    """Several of a kind have a name each, which everybody else on the bus knows them by."""
    command = COMMANDS[name]
    given = command[command.index("--name") + 1] if "--name" in command else None
    called = identities.called(command[1:2], given)
    clusters = [command[command.index("--cluster") + 1]] if "--cluster" in command else []
    found = identities.entities(command[1:2], clusters, called)
    assert [one.name for one in found] == ([name] if command[1] != "tracer" else [])


def test_services_do_not_run_as_root_and_wait_for_the_bus() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER dmsc"]
    for name in COMMANDS:
        if name != "secrets":
            assert SERVICES[name]["depends_on"]["nats"]["condition"] == "service_healthy", name
    assert "healthz" in " ".join(SERVICES["nats"]["healthcheck"]["test"])


def test_with_tls_every_service_speaks_it() -> None:
    more: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "deploy" / "compose.tls.yml").read_text())[
        "services"
    ]
    assert {name for name in more if name != "nats"} == {
        name for name, one in SERVICES.items() if one["image"] == "dmsc:local" and name != "secrets"
    }
    for name, one in more.items():
        assert "./certificates:/tls:ro" in one["volumes"], name
        if name != "nats":
            assert one["environment"]["DMSC_BUS"].startswith("tls://"), name
        if COMMANDS.get(name, [])[:2] == ["run", "gateway"]:
            assert {"DMSC_TLS_CERT", "DMSC_TLS_KEY"} <= set(one["environment"]), name
            assert "healthcheck" not in one, f"{name}: tools merge lists differently"
            (check,) = [part for part in SERVICES[name]["healthcheck"]["test"] if "healthz" in part]
            assert {"DMSC_TLS_CERT", "DMSC_CA_FILE"} <= set(check.split('"')), name


def test_nobody_comes_in_by_a_password_that_everybody_knows() -> None:
    grafana = SERVICES["grafana"]["environment"]
    assert grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert grafana["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert grafana["GF_AUTH_BASIC_ENABLED"] == "false"
    assert grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    for name, one in SERVICES.items():
        given = one.get("environment", {})
        secret = [key for key in given if "PASSWORD" in key or "SECRET" in key or "TOKEN" in key]
        assert not secret, f"{name}: secrets are made on the first start, and lie in volumes"
        for port in one.get("ports", ()):
            assert str(port).removeprefix("${DMSC_PUBLISH:-").startswith("127.0.0.1:"), name


def test_the_server_shows_its_pages_to_its_own_container_alone() -> None:
    lines = (ROOT / "deploy" / "nats.conf").read_text().splitlines()
    (pages,) = [line for line in lines if line.startswith("http")]
    assert pages.startswith('http: "127.0.0.1:')


def test_secrets_stay_over_restarts_unless_they_are_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> dict[str, str]:
        make_secrets.main()
        return {str(path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}

    monkeypatch.setattr(sys, "argv", ["make_secrets.py", str(tmp_path)])
    first = made()
    assert made() == first
    monkeypatch.setattr(make_secrets, "DEFAULT_POLICIES", ("link-trend", "path-faults"))
    after = made()
    changed = {path for path in first if after[path] != first[path]}
    assert changed == {str(tmp_path / "modules" / "policy")}
    credentials = [Credential.parse(text) for text in after[changed.pop()].split()]
    assert [one.identity.module for one in credentials] == ["link-trend", "path-faults"]
