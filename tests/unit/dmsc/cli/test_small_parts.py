"""Server-sent events, settings, ports, layout, restarts, exit codes: decisions without processes."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from dmsc.client.http_protocol import EventParser, ServerEvent
from dmsc.console.exit_codes import ExitCode, exit_code_of
from dmsc.follow.follow import printable
from dmsc.launch import ports
from dmsc.launch.layout import expected_services, lay_out
from dmsc.launch.mesh_options import MeshOptions
from dmsc.launch.supervisor import pause_before_restart
from dmsc.process.policy_loading import DEFAULT_POLICIES
from dmsc.state.settings import find_bus, find_gateway
from schemas import errors


def test_server_sent_events() -> None:
    parser = EventParser()
    text = ": hello\n\nid: 7\nevent: step\ndata: {\ndata: }\n\ndata:x\n\n"
    found = [event for line in text.split("\n") if (event := parser.feed(line)) is not None]
    assert found == [ServerEvent("7", "step", "{\n}"), ServerEvent("7", "message", "x")]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.BadJob("x"), ExitCode.BAD_INPUT),
        (errors.NotFound("x"), ExitCode.BAD_INPUT),
        (errors.BusUnreachable("x"), ExitCode.UNREACHABLE),
        (errors.Refused("x"), ExitCode.REFUSED),
        (errors.DmscError("x"), ExitCode.FAILED),
    ],
)
def test_exit_codes(error: errors.DmscError, code: ExitCode) -> None:
    assert exit_code_of(error) is code


def test_argument_beats_environment_beats_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DMSC_BUS", "DMSC_BUS_TOKEN", "DMSC_GATEWAY", "DMSC_TOKEN", "DMSC_STATE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.BusUnreachable, match=r"no mesh runs on .*dmsc up"):
        find_bus(state=tmp_path)
    with pytest.raises(errors.Unavailable, match=r"no mesh runs on .*dmsc up"):
        find_gateway(state=tmp_path)
    monkeypatch.setenv("DMSC_BUS", "nats://e1:1,nats://e2:2")
    monkeypatch.setenv("DMSC_TOKEN", "a-users")
    assert find_bus().token == "a-users", "elsewhere a user has no other: the bus goes by its role"
    monkeypatch.setenv("DMSC_BUS_TOKEN", "from-environment")
    assert find_bus().servers == ("nats://e1:1", "nats://e2:2")
    assert find_bus().token == "from-environment"
    assert find_bus("nats://arg:1", "arg").servers == ("nats://arg:1",)
    assert find_bus("nats://arg:1", "arg").token == "arg"


def test_a_port_asked_for_and_taken_is_one_line() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert not ports.is_free("127.0.0.1", port)
        with pytest.raises(
            errors.BadInput, match=rf"--http-port {port}: port {port} is taken on 127\.0\.0\.1"
        ):
            ports.choose("127.0.0.1", port, 8080, 1, "--http-port")
        found, remark = ports.choose("127.0.0.1", None, port, 2, "--http-port")
        assert port not in found
        assert len(set(found)) == 2
        assert remark.startswith(f"port {port} is taken, using")


@pytest.mark.parametrize("asked", [-1, 65536, 65535])
def test_a_port_that_can_not_be_one(asked: int) -> None:
    with pytest.raises(errors.BadInput, match="must be within"):
        ports.choose("127.0.0.1", asked, 8080, 2, "--http-port")


def test_one_process_for_the_control_plane_or_one_each(tmp_path: Path) -> None:
    together = lay_out(MeshOptions(state=tmp_path), "nats://x:1", (1, 2), tmp_path / "t", tmp_path / "logs")
    modules = [f"policy-{name}" for name in DEFAULT_POLICIES]
    assert [child.name for child in together] == ["agent-a", "agent-b", "control-plane", *modules]
    separate = lay_out(
        MeshOptions(state=tmp_path, separate=True, policies=("p.py",)),
        "nats://x:1",
        (1, 2),
        tmp_path / "t",
        tmp_path / "logs",
    )
    assert {child.name for child in separate} == {
        *("service-registry", "authorizer", "orchestrator", "router-a", "router-b", "gateway-a", "gateway-b"),
        *("accountant", "agent-a", "agent-b", "broker", "model-registry", "policy-module"),
    }
    stops = {child.name: child.stop_order for child in separate}
    assert stops["orchestrator"] < stops["agent-a"] < stops["service-registry"]


@pytest.mark.parametrize(
    ("options", "modules", "automation"),
    [
        ({}, [f"policy-{name}" for name in DEFAULT_POLICIES], None),
        ({"policies": ("none",)}, [], "off"),
        ({"policies": ("none",), "automation": "advise"}, [], "advise"),
        ({"policies": ("link-trend,transience",)}, ["policy-link-trend", "policy-transience"], None),
        ({"policies": ("p.py", "q.py"), "automation": "off"}, ["policy-module", "policy-module-2"], "off"),
    ],
)
def test_which_modules_are_started_and_whether_jobs_are_changed_by_themselves(
    options: dict[str, Any], modules: list[str], automation: str | None, tmp_path: Path
) -> None:
    children = lay_out(MeshOptions(state=tmp_path, **options), "nats://x:1", (1, 2), tmp_path, tmp_path)
    assert [child.name for child in children if child.name.startswith("policy-")] == modules
    (words,) = (child.arguments for child in children if child.name == "control-plane")
    assert (words[words.index("--automation") + 1] if "--automation" in words else None) == automation


@pytest.mark.parametrize("separate", [True, False])
def test_gateways_are_told_how_many_requests_a_user_may_send(tmp_path: Path, separate: bool) -> None:
    options = MeshOptions(state=tmp_path, separate=separate, user_rate=5_000.0)
    children = {child.name: child for child in lay_out(options, "nats://x:1", (1, 2), tmp_path, tmp_path)}
    words = children["gateway-b" if separate else "control-plane"].arguments
    assert words[words.index("--user-rate") + 1] == "5000.0"


def test_agents_of_one_machine_share_the_size_of_the_cache(tmp_path: Path) -> None:
    options = MeshOptions(state=tmp_path, cache=tmp_path / "nvme", cache_gib=5)
    children = {child.name: child for child in lay_out(options, "nats://x:1", (1, 2), tmp_path, tmp_path)}
    words = children["agent-a"].arguments
    assert words[words.index("--cache") + 1] == str(tmp_path / "nvme")
    assert words[words.index("--cache-gib") + 1] == "2.5"


def test_several_orchestrators_run_apart(tmp_path: Path) -> None:
    options = MeshOptions(state=tmp_path, orchestrators=2, policies=(), own_loop=False)
    children = {child.name: child for child in lay_out(options, "nats://x:1", (1, 2), tmp_path, tmp_path)}
    assert list(children) == ["agent-a", "agent-b", "control-plane", "orchestrator-1", "orchestrator-2"]
    assert "orchestrator" not in children["control-plane"].arguments
    assert children["orchestrator-1"].arguments == ("run", "orchestrator", "--own-loop", "off")
    stops = [children[name].stop_order for name in ("orchestrator-1", "agent-a", "control-plane")]
    assert stops == sorted(stops)


def test_several_registries_run_apart(tmp_path: Path) -> None:
    options = MeshOptions(state=tmp_path, registries=2, policies=())
    children = {child.name: child for child in lay_out(options, "nats://x:1", (1, 2), tmp_path, tmp_path)}
    registries = ["service-registry-1", "service-registry-2"]
    assert list(children) == ["agent-a", "agent-b", *registries, "control-plane"]
    assert "service-registry" not in children["control-plane"].arguments
    assert "orchestrator" in children["control-plane"].arguments
    assert children["service-registry-2"].arguments == ("run", "service-registry")
    stops = [children[name].stop_order for name in ("control-plane", "service-registry-1")]
    assert stops == sorted(stops)


def test_secrets_are_on_no_command_line(tmp_path: Path) -> None:
    children = lay_out(MeshOptions(state=tmp_path), "nats://x:1", (1, 2), tmp_path / "t", tmp_path / "logs")
    assert not any(
        "token" in argument for child in children for argument in child.arguments if "tokens" not in argument
    )


def test_what_ready_means(tmp_path: Path) -> None:
    assert expected_services(MeshOptions(state=tmp_path, clusters=("a",), node="n")) == {
        *("authorizer", "orchestrator", "gateway-a", "router-a", "a-n")
    }


def test_restarts_back_off_and_are_bounded() -> None:
    pauses = [pause_before_restart(deaths) for deaths in range(1, 8)]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_what_a_model_writes_can_not_steer_the_terminal() -> None:
    assert printable("def f():\n\x1b[31m\x00é") == "def f():\n·[31m·é"
