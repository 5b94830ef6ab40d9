"""`dmsc up` and everything that one does with a running mesh; real server, real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from dmsc.process.policy_loading import DEFAULT_POLICIES
from dmsc.state.state_folder import MeshFile, StateFolder
from tests.integration.dmsc.command_line import (
    dmsc,
    processes_mentioning,
    running,
    wait_for,
)
from tests.patience import PATIENCE_S

PORTS = ("--nats-port", "0", "--http-port", "0")


def read(folder: Path) -> MeshFile:
    mesh = StateFolder(folder / ".dmsc").mesh()
    assert mesh is not None
    return mesh


def family(mesh: MeshFile) -> list[int]:
    """The supervisor and everything below it, at this moment."""
    supervisor = psutil.Process(mesh.pid)
    return [supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))]


def _zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_nothing_left(folder: Path, mesh: MeshFile, pids: Sequence[int]) -> None:
    """No process, no port, no lock. Orphans get the time that their last resort takes."""

    def left() -> list[str]:
        alive = [f"pid {pid}" for pid in pids if psutil.pid_exists(pid) and not _zombie(pid)]
        return alive + processes_mentioning(str(folder))

    wait_for(lambda: not left(), lambda: "\n".join(left()))
    for url in (*mesh.servers, *mesh.gateways.values()):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0, f"{url} still listens"
    assert StateFolder(folder / ".dmsc").owner() is None


@pytest.fixture(scope="module")
def mesh_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder (with a space) on which a mesh runs for this module."""
    folder = tmp_path_factory.mktemp("a mesh")
    done = dmsc("up", "--detach", "--slots", "1", *PORTS, cwd=folder)
    assert done.returncode == 0, done.stderr
    mesh = read(folder)
    try:
        yield folder
    finally:
        pids = family(mesh)
        done = dmsc("down", cwd=folder)
        assert done.returncode == 0, done.stderr
        assert not (folder / ".dmsc" / "mesh.json").exists()
        assert_nothing_left(folder, mesh, pids)


def test_status_knows_every_entity(mesh_folder: Path) -> None:
    status = json.loads(dmsc("status", "--json", cwd=mesh_folder).stdout)
    expected = sorted(
        ["service-registry", "authorizer", "orchestrator", "model-registry"]
        + [*["gateway", "router", "cluster", "broker"] * 2]
        + ["accountant"]
        + ["functional-module"] * len(DEFAULT_POLICIES)
    )
    deadline = time.monotonic() + PATIENCE_S
    # torch is still being loaded; brokers serve before they are registered
    while (
        not all(node["warm"] for node in status["nodes"]) or kinds_of(status) != expected
    ) and time.monotonic() < deadline:
        status = json.loads(dmsc("status", "--json", cwd=mesh_folder).stdout)
    assert kinds_of(status) == expected
    assert sorted(node["cluster"] for node in status["nodes"]) == ["a", "b"]
    assert [len(node["slots"]) for node in status["nodes"]] == [1, 1]
    words = dmsc("status", cwd=mesh_folder).stdout
    assert "router-b" in words
    assert read(mesh_folder).metrics["control-plane"] in words


def kinds_of(status: dict[str, Any]) -> list[str]:
    return sorted(service["kind"] for service in status["services"] if service["state"] == "active")


def test_each_process_tells_its_metrics_and_the_gateways_know_where(mesh_folder: Path) -> None:
    mesh = read(mesh_folder)
    assert sorted(mesh.metrics) == ["agent-a", "agent-b", "control-plane"]
    pages = {name: httpx.get(url, timeout=PATIENCE_S).text for name, url in mesh.metrics.items()}
    assert 'dmsc_node_slots{cluster="a",node=' in pages["agent-a"]
    assert 'dmsc_bus_round_trip_seconds{service="router-b"}' in pages["control-plane"]
    token = (mesh_folder / ".dmsc" / "token").read_text().strip()
    targets = httpx.get(
        f"{mesh.gateways['b']}/v1/metrics/targets",
        headers={"Authorization": f"Bearer {token}"},
        timeout=PATIENCE_S,
    ).json()
    told = {url.split("/")[2] for url in mesh.metrics.values()}
    assert {target for entry in targets for target in entry["targets"]} == told


def test_a_gateway_tells_the_queues_metrics_beside_those_of_its_process(mesh_folder: Path) -> None:
    mesh = read(mesh_folder)
    token = (mesh_folder / ".dmsc" / "token").read_text().strip()
    bearer = {"Authorization": f"Bearer {token}"}
    door = mesh.gateways["b"]
    status = httpx.get(f"{door}/v1/queue", headers=bearer, timeout=PATIENCE_S).json()  # as of then
    page = httpx.get(f"{door}/metrics", headers=bearer, timeout=PATIENCE_S).text
    told = dict(line.split() for line in page.splitlines() if line.startswith("dmsc_queue_"))
    assert {name.partition("{")[0] for name in told} == {
        "dmsc_queue_jobs",
        "dmsc_queue_builds",
        "dmsc_queue_free_slots",
        "dmsc_queue_lacking_slots",
    }
    waiting = next(value for name, value in told.items() if name.startswith("dmsc_queue_jobs"))
    assert float(waiting) == status["waiting"] == 0


def test_secrets_are_private_and_on_no_command_line(mesh_folder: Path) -> None:
    for name in ("token", "bus_token", "guard.json", "tokens.yaml"):
        path = mesh_folder / ".dmsc" / name
        assert path.stat().st_mode & 0o077 == 0
    for name in ("token", "bus_token"):
        assert processes_mentioning((mesh_folder / ".dmsc" / name).read_text().strip()) == []


def test_a_second_up_names_the_first(mesh_folder: Path) -> None:
    for arguments in (("up",), ("up", "--detach")):
        done = dmsc(*arguments, cwd=mesh_folder)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(
            f"dmsc: a mesh already runs on {mesh_folder}/.dmsc (pid {read(mesh_folder).pid})"
        )


def test_a_wrong_token_is_refused(mesh_folder: Path) -> None:
    done = dmsc("jobs", "--token", "wrong", cwd=mesh_folder)
    assert (done.returncode, done.stderr) == (4, "dmsc: unknown token; ask the operator for one\n")
    done = dmsc("tap", "--bus-token", "wrong", cwd=mesh_folder)
    assert done.returncode == 4
    assert len(done.stderr.splitlines()) == 1


def test_no_jobs_and_no_such_job(mesh_folder: Path) -> None:
    assert json.loads(dmsc("jobs", "--json", cwd=mesh_folder).stdout) == []
    done = dmsc("cancel", "none", cwd=mesh_folder)
    assert done.returncode == 2
    assert "none" in done.stderr


def test_a_job_that_can_not_be_trained_fails_with_one_line(mesh_folder: Path) -> None:
    (mesh_folder / "bad.yaml").write_text(
        "name: bad\nmodel: {factory: 'no_such_module:build'}\ntraining: {steps: 1}\n"
    )
    done = dmsc("train", "bad.yaml", cwd=mesh_folder)
    assert done.returncode == 1
    assert "no_such_module" in done.stdout
    job = json.loads(dmsc("jobs", "--json", cwd=mesh_folder).stdout)[-1]
    assert job["state"] == "failed"
    again = dmsc("attach", job["job"], cwd=mesh_folder)
    assert again.returncode == 1
    assert "no_such_module" in again.stdout


def test_a_model_of_ones_own_is_trained_and_its_microbatches_followed(mesh_folder: Path) -> None:
    (mesh_folder / "my_model.py").write_text(
        "from torch import nn\n"
        "def build(width):\n    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256))\n"
    )
    (mesh_folder / "mine.yaml").write_text(
        "name: mine\nmodel: {factory: 'my_model:build', args: {width: 8}}\ndata: {sample_tokens: 16}\n"
        "training: {steps: 2, microbatches: 2, microbatch_samples: 2}\n"
    )
    done = dmsc("train", "mine.yaml", "--out", "mine", cwd=mesh_folder)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((mesh_folder / "mine" / "record.json").read_text())
    assert len((mesh_folder / "mine" / "curve.jsonl").read_text().splitlines()) == 2
    assert list((mesh_folder / "mine" / "weights").glob("*.safetensors"))
    followed = dmsc("tap", "--microbatch", f"{record['job']}/1/0", cwd=mesh_folder)
    assert followed.returncode == 0, followed.stderr
    assert "has stage 0 from" in followed.stdout
    replayed = dmsc("attach", record["job"], "--out", "again", cwd=mesh_folder)
    assert replayed.returncode == 0, replayed.stderr
    first, again = ((mesh_folder / name / "curve.jsonl").read_text() for name in ("mine", "again"))
    assert first == again


def test_tap_decodes_filters_and_counts(mesh_folder: Path) -> None:
    arguments = ("tap", "registry.heartbeat.>", "--filter", "sender.name=router-*", "--count", "2")
    done = dmsc(*arguments, "--json", cwd=mesh_folder)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert all('"router-' in line for line in done.stdout.splitlines())
    assert "router-" in dmsc(*arguments, cwd=mesh_folder).stdout
    assert "bytes" in dmsc(*arguments, "--raw", cwd=mesh_folder).stdout
    rates = dmsc("tap", "registry.heartbeat.>", "--rate", "--count", "3", cwd=mesh_folder)
    assert "heartbeat" in rates.stdout


def test_tap_refuses_what_matches_nothing(mesh_folder: Path) -> None:
    for arguments in (("signl.>",), (">", "--filter", "nonsense"), ("--microbatch", "x")):
        done = dmsc("tap", *arguments, cwd=mesh_folder)
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_logs(mesh_folder: Path) -> None:
    done = dmsc("logs", "--grep", "registered", "--json", cwd=mesh_folder)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert any(line["fields"].get("sid") == "router-a" for line in lines)
    assert len(dmsc("logs", "--last", "3", cwd=mesh_folder).stdout.splitlines()) == 3
    assert dmsc("logs", "--sid", "nobody", cwd=mesh_folder).stdout == ""
    assert '"router ready"' in dmsc("logs", "--sid", "router-b", "--json", cwd=mesh_folder).stdout
    assert dmsc("logs", "--since", "1h", "--level", "critical", cwd=mesh_folder).stdout == ""


def test_doctor_finds_all_well(mesh_folder: Path) -> None:
    done = dmsc("doctor", "--json", cwd=mesh_folder)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    wrong = [finding for finding in findings.values() if not finding["ok"]]
    assert not wrong
    assert done.returncode == 0
    assert {"torch", "disk", "server", "jetstream", "clocks", "gateway", "versions"} <= set(findings)


def test_the_default_policies_run_and_are_started_again(mesh_folder: Path) -> None:
    def states() -> dict[str, tuple[str, int]]:
        listed = json.loads(dmsc("policy", "list", "--json", cwd=mesh_folder).stdout)
        return {row["module"]: (row["state"], row["crashes"]) for row in listed if "module" in row}

    def pids() -> set[int]:
        """Of those that run; one that is started again has none for a moment."""
        children = read(mesh_folder).children
        return {children[f"policy-{name}"] for name in DEFAULT_POLICIES if f"policy-{name}" in children}

    def are_others() -> bool:
        return len(now := pids()) == len(DEFAULT_POLICIES) and now.isdisjoint(before)

    wait_for(lambda: states() == dict.fromkeys(DEFAULT_POLICIES, ("active", 0)), lambda: str(states()))
    before = pids()
    assert len(before) == len(DEFAULT_POLICIES)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_for(are_others)
    wait_for(lambda: states() == dict.fromkeys(DEFAULT_POLICIES, ("active", 1)), lambda: str(states()))
    said = (mesh_folder / ".dmsc" / "logs" / "up.log").read_text()
    assert all(f"policy-{name} died (SIGKILL); starting it again" in said for name in DEFAULT_POLICIES)
    automation = json.loads(dmsc("policy", "automation", "--json", cwd=mesh_folder).stdout)
    assert automation["holds"] == "act"


def test_a_policy_of_ones_own_is_added_and_retired(mesh_folder: Path) -> None:
    (mesh_folder / "mine.py").write_text(
        "from dmsc import Policy\n"
        "class Mine(Policy):\n    name = 'mine'\n    def decide(self, view, now): ...\n"
    )

    def states() -> dict[str, str]:
        listed = json.loads(dmsc("policy", "list", "--json", cwd=mesh_folder).stdout)
        return {row["name"]: row["state"] for row in listed}

    with running("policy", "run", "mine.py", cwd=mesh_folder) as policy:
        wait_for(lambda: states().get("mine") == "active", lambda: policy.output)
        assert states()["service-time-weights"] == "not running"
        policy.interrupt()
        assert policy.wait() == 0
        assert "Traceback" not in policy.output


def test_another_node_joins_and_leaves(mesh_folder: Path) -> None:
    def nodes() -> list[str]:
        status = json.loads(dmsc("status", "--json", cwd=mesh_folder).stdout)
        return [node["node"] for node in status["nodes"]]

    mesh = read(mesh_folder)
    elsewhere = mesh_folder / "elsewhere"
    elsewhere.mkdir()
    credential = elsewhere / "b.cred"
    made = dmsc(
        "credential", "agent", "--cluster", "b", "--expires", "1h", "-o", str(credential), cwd=mesh_folder
    )
    assert made.returncode == 0, made.stderr
    assert credential.stat().st_mode & 0o077 == 0
    other = dmsc("join", mesh.servers[0], "--cluster", "a", "--credential", str(credential), cwd=elsewhere)
    assert (other.returncode, len(other.stderr.splitlines())) == (2, 1)
    assert "the credential for the bus is that of cluster join-b, and this is a-" in other.stderr
    arguments = ("join", mesh.servers[0], "--cluster", "b", "--node", "extra", "--slots", "1")
    with running(*arguments, "--credential", str(credential), cwd=elsewhere) as node:
        wait_for(lambda: "extra" in nodes(), lambda: node.output)
        node.interrupt()
        assert node.wait() == 0
        assert "Traceback" not in node.output


def test_a_killed_child_is_started_again(mesh_folder: Path) -> None:
    pid = read(mesh_folder).children["control-plane"]
    os.kill(pid, signal.SIGKILL)
    log = mesh_folder / ".dmsc" / "logs" / "up.log"
    wait_for(lambda: "control-plane died (SIGKILL" in log.read_text(), log.read_text)
    wait_for(lambda: dmsc("status", cwd=mesh_folder).returncode == 0)


def test_a_child_that_can_not_be_started_again_just_now_is_started_later(mesh_folder: Path) -> None:
    """Its log can't be opened: as where the disk is full, or there are too many files or processes."""
    logs = mesh_folder / ".dmsc" / "logs"
    own, up = logs / "agent-b.log", logs / "up.log"
    own.rename(logs / "agent-b.kept")
    own.mkdir()
    pid = read(mesh_folder).children["agent-b"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: f"agent-b can't be started: {own} is no plain file" in up.read_text(), up.read_text)
    own.rmdir()
    (logs / "agent-b.kept").rename(own)
    wait_for(lambda: read(mesh_folder).children.get("agent-b", pid) != pid)
    wait_for(lambda: dmsc("status", cwd=mesh_folder).returncode == 0)


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked from a prefork server on Linux only")
def test_children_are_the_supervisors_own_and_need_no_prefork_server_to_come_back(mesh_folder: Path) -> None:
    mesh = read(mesh_folder)
    up = psutil.Process(mesh.pid)
    direct = {child.pid: child.cmdline() for child in up.children()}
    assert set(mesh.children.values()) <= direct.keys()
    assert " -m dmsc join " in " ".join(direct[mesh.children["agent-a"]])
    (prefork_server,) = (pid for pid, line in direct.items() if line and line[0].startswith("dmsc-prefork"))

    agent = f"--agent {mesh.children['agent-b']} "

    def fork_servers() -> list[psutil.Process]:
        return [one for one in up.children(recursive=True) if agent in " ".join(one.cmdline())]

    wait_for(lambda: len(fork_servers()) == 1)  # the mesh is up before its nodes are warm
    (orphan,) = fork_servers()
    os.kill(mesh.children["agent-b"], signal.SIGKILL)
    orphan.wait(PATIENCE_S)  # its fork server: ended by itself, and was waited for
    wait_for(lambda: read(mesh_folder).children["agent-b"] != mesh.children["agent-b"])

    os.kill(prefork_server, signal.SIGKILL)
    os.kill(mesh.children["agent-a"], signal.SIGKILL)
    wait_for(lambda: read(mesh_folder).children["agent-a"] != mesh.children["agent-a"])

    def offered() -> set[str]:
        status = json.loads(dmsc("status", "--json", cwd=mesh_folder).stdout)
        return {node["cluster"] for node in status["nodes"] if node["warm"]}

    wait_for(lambda: offered() == {"a", "b"})


def test_a_killed_server_comes_back_on_the_same_port(mesh_folder: Path) -> None:
    os.kill(read(mesh_folder).children["bus"], signal.SIGKILL)
    log = mesh_folder / ".dmsc" / "logs" / "up.log"
    wait_for(lambda: "the bus's server died" in log.read_text(), log.read_text)
    answer: subprocess.CompletedProcess[str]

    def answered() -> bool:
        nonlocal answer
        answer = dmsc("jobs", "--json", cwd=mesh_folder)
        return answer.returncode == 0

    wait_for(answered, lambda: answer.stderr)
    assert len(json.loads(answer.stdout)) >= 2


def test_only_messages_on_stdout_while_the_server_dies(mesh_folder: Path) -> None:
    with (
        running("tap", "registry.heartbeat.>", "--json", cwd=mesh_folder, apart=True) as tap,
        running("logs", "--json", "--follow", cwd=mesh_folder, apart=True) as logs,
    ):
        tap.until("heartbeat")
        logs.until("event")
        # the test before killed it, too: its successor is in the file a moment later
        wait_for(lambda: psutil.pid_exists(read(mesh_folder).children["bus"]))
        os.kill(read(mesh_folder).children["bus"], signal.SIGKILL)
        for command in (tap, logs):
            command.until(lambda text: "bus connection lost" in text and "is back" in text, errors=True)
            assert all(isinstance(json.loads(line), dict) for line in command.output.splitlines())


def test_ctrl_c_leaves_nothing_and_taken_ports_are_avoided(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    with ExitStack() as stack:
        for port in (4222, 8080):
            holder = stack.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind(("127.0.0.1", port))
                holder.listen()
            except OSError:
                pass  # something else has it: as good
        up = stack.enter_context(running("up", "--separate", "--cluster", "a", cwd=folder))
        up.until("mesh ready in")
        assert "port 4222 is taken" in up.output
        assert "port 8080 is taken, using" in up.output
        mesh = read(folder)
        assert set(mesh.children) == {
            *(
                "bus",
                "service-registry",
                "authorizer",
                "orchestrator",
                "broker",
                "accountant",
                "model-registry",
            ),
            *("router-a", "gateway-a", "agent-a"),
            *(f"policy-{name}" for name in DEFAULT_POLICIES),
        }
        pids = family(mesh)
        up.interrupt()
        assert up.wait() == 0
        assert "stopping the mesh" in up.output
        assert "Traceback" not in up.output
    assert_nothing_left(folder, mesh, pids)
    assert not (folder / ".dmsc" / "lock").exists()
    assert not (folder / ".dmsc" / "mesh.json").exists()


def test_ctrl_c_while_starting_leaves_nothing(tmp_path: Path) -> None:
    with running("up", *PORTS, "--cluster", "a", cwd=tmp_path) as up:
        wait_for((tmp_path / ".dmsc" / "mesh.json").exists, lambda: up.output)
        mesh = read(tmp_path)
        pids = family(mesh)
        up.interrupt()
        assert up.wait() == 130
        assert "Traceback" not in up.output
    assert_nothing_left(tmp_path, mesh, pids)


def test_sigkill_of_the_supervisor_orphans_nothing(tmp_path: Path) -> None:
    with running("up", *PORTS, "--cluster", "a", cwd=tmp_path, warm=True) as up:
        up.until("mesh ready in")
        mesh = read(tmp_path)
        pids = family(mesh)
        assert len(pids) >= 5  # supervisor, server, control plane, agent, fork server
        os.kill(mesh.pid, signal.SIGKILL)
        up.wait()
        assert_nothing_left(tmp_path, mesh, pids)
        assert dmsc("down", cwd=tmp_path).returncode == 3
