"""The command line without a mesh: help, exit codes, one line for everything that is not there."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from dmsc.cli import app
from dmsc.launch.ports import any_free
from dmsc.process.composition import node_name
from tests.integration.dmsc.command_line import dmsc
from tests.integration.mesh.conftest import tiny_job


def commands_below(group: TyperGroup, *path: str) -> Iterator[tuple[str, str]]:
    """Each command, as it is typed after `dmsc`, with its help."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands_below(command, *path, name)
        else:
            yield " ".join((*path, name)), str(command.help)


def test_help_ends_with_the_exit_codes(tmp_path: Path) -> None:
    done = dmsc("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "Exit codes: 0 done" in done.stdout


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    """So that it is there at once: importing nats, httpx or FastAPI would double its 0.25 s."""
    import subprocess
    import sys

    from tests.integration.dmsc.command_line import environment

    heavy = ("nats", "httpx", "fastapi", "pydantic", "torch", "yaml")
    code = f"import dmsc.cli, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_help_of_each_command_shows_an_example() -> None:
    app_group = get_command(app)
    assert isinstance(app_group, TyperGroup)
    texts = dict(commands_below(app_group))
    assert len(texts) > 60
    without = [name for name, text in texts.items() if f"dmsc {name}" not in text.partition("Example:")[2]]
    assert without == []


def test_completion_can_be_shown(tmp_path: Path) -> None:
    # which shell runs this is guessed from parent processes, which a test may not have
    done = dmsc("--show-completion", "bash", cwd=tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete" in done.stdout + done.stderr


def test_usage_is_exit_code_2(tmp_path: Path) -> None:
    assert dmsc("trian", cwd=tmp_path).returncode == 2
    assert dmsc("train", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "jobs",
        "cancel j1",
        "park j1",
        "resume j1",
        "attach j1",
        "tap",
        "logs",
        "store j1 s0-r0",
        "policy list",
        "queue",
        "down",
    ],
)
def test_no_mesh_is_one_line_and_exit_code_3(command: str, tmp_path: Path) -> None:
    done = dmsc(*command.split(), cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith("dmsc: no mesh runs on ")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    (port,) = any_free("127.0.0.1")
    for arguments in (
        ("tap", "--bus", f"nats://127.0.0.1:{port}"),
        ("join", f"nats://127.0.0.1:{port}", "--wait", "0.5"),
        ("status", "--gateway", f"http://127.0.0.1:{port}"),
    ):
        done = dmsc(*arguments, cwd=tmp_path)
        assert done.returncode == 3, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("dmsc: ")]
        assert str(port) in line
        assert "Traceback" not in done.stderr


def test_a_port_that_was_asked_for_and_is_taken(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        for option in ("--nats-port", "--http-port"):
            other = "--http-port" if option == "--nats-port" else "--nats-port"
            done = dmsc("up", option, str(port), other, "0", cwd=tmp_path)
            assert done.returncode == 2
            assert done.stderr.startswith(f"dmsc: {option} {port}: port {port} is taken on 127.0.0.1; ")
            assert len(done.stderr.splitlines()) == 1
            assert not (tmp_path / ".dmsc" / "lock").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train", "none.yaml"), "dmsc: none.yaml: No such file or directory"),
        (("run", "gatway", "--bus", "nats://127.0.0.1:1"), "dmsc: gatway: no entity, and neither the name"),
        (("run", "gateway", "--bus", "nats://127.0.0.1:1"), "dmsc: gateway serves a cluster: say which"),
        (("run", "authorizer", "--bus", "nats://127.0.0.1:1"), "dmsc: authorizer needs the users' file"),
        (("join", "nats://127.0.0.1:1", "--ports", "9-x"), "dmsc: --ports 9-x: write it as LO-HI"),
        (("join", "nats://127.0.0.1:1", "--cluster", "a.b"), "dmsc: --cluster 'a.b': use letters"),
        (("up", "--cluster", "a b"), "dmsc: --cluster 'a b': use letters"),
        (("up", "--cluster", "a", "--cluster", "a"), "dmsc: --cluster: the same name twice"),
        (("logs", "--since", "soon", "--bus", "nats://127.0.0.1:1"), "dmsc: --since soon: write 30s"),
        (
            ("up", "--policy", "path-fault"),
            "dmsc: --policy path-fault: neither the name of a policy nor a file",
        ),
        (("up", "--metrics-port", "x"), "dmsc: --metrics-port x: a port, 0 for any free one, or off"),
        (("logs", "--grep", "(", "--bus", "nats://127.0.0.1:1"), "dmsc: --grep (: "),
        (("store", "j", "s", "-t", "x", "--bus", "nats://127.0.0.1:1"), "dmsc: --table x: configuration, "),
        (("store", "j", "s", "-w", "x", "--bus", "nats://127.0.0.1:1"), "dmsc: --where x: write it as "),
        (("policy", "run", "none.py", "--bus", "nats://127.0.0.1:1"), "dmsc: none.py: no such file"),
        (
            ("cost", "--recording", "r", "--user", "u"),
            "dmsc: --recording is of one job, and of all that it used; leave out --user",
        ),
        (
            ("cost", "--recording", "r", "--service", "s", "--all"),
            "dmsc: --recording is of one job, and of all that it used; leave out --service, --all",
        ),
        (
            ("ask", "s", "p", "--aggregation", "vote", "--consent"),
            "dmsc: --consent: nothing of a vote",
        ),
        (("ask", "s", "p", "--aggregation", "weighted"), "dmsc: --aggregation weighted: of texts there are"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    done = dmsc(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(expected)
    assert len(done.stderr.splitlines()) == 1


JOB = """
name: j
model: {factory: "models:build"}
training: {steps: 2}
parallel: {stages: 1, replicas: REPLICAS}
"""
TRACE = "submit_s,slots,run_s\n0,64,7200\n0,64,3600\n"


@pytest.mark.parametrize(
    ("arguments", "replicas", "expected"),
    [
        ("--deadline 0", "1", "--deadline 0: give hours above 0"),
        ("--topology job.yaml", "1", "job.yaml: kind is None; give fat_tree, dragonfly or links, or a Graph"),
        ("--best", "1", "no mesh answers: no mesh runs on "),
        ("--slots 2 --compare", "1", "--compare is about the job's own slots, or those of --slot: leave one"),
        ("", "{min: 3, want: 2, max: 4}", "job.yaml:5: parallel.replicas: min 3, want 2, max 4: give min ≤ "),
    ],
)
def test_a_plan_of_what_is_wrong_is_one_line(
    arguments: str, replicas: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("REPLICAS", replicas), encoding="utf-8")
    done = dmsc("plan", "job.yaml", *arguments.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"dmsc: {expected}")
    assert len(done.stderr.splitlines()) == 1


def test_a_plan_without_a_mesh(tmp_path: Path) -> None:
    job = tiny_job("planned", parallel={"stages": 2, "replicas": 1})
    (tmp_path / "job.yaml").write_text(job.model_dump_json(exclude_unset=True), encoding="utf-8")
    (tmp_path / "net.yaml").write_text("kind: fat_tree\narity: 4\ngbps: 1\n", encoding="utf-8")
    options = ("--compare", "--price", "3600", "--topology", "net.yaml", "--json")
    done = dmsc("plan", "job.yaml", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    own, best = json.loads(done.stdout)
    assert own["replicas"] == [1, 1]
    assert own["forecast"]["busiest_link_ms"] > 0
    assert best["slots"] in (1, 2)
    for plan in (own, best):
        assert plan["hours"] == pytest.approx(8 * plan["forecast"]["step_ms"] / 3.6e6)
        assert plan["price"] == pytest.approx(3600 * plan["hours"] * plan["slots"])


def test_a_machine_that_the_topology_lacks_starts_no_mesh(tmp_path: Path) -> None:
    (tmp_path / "net.yaml").write_text("kind: fat_tree\narity: 2\n", encoding="utf-8")
    done = dmsc("up", "--topology", "net.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"dmsc: net.yaml: has no host {node_name()}, as this node is called, nor a-"
    )
    assert done.stderr.endswith(": hosts are host-0, host-1; name them as the nodes are named\n")


def test_a_trace_of_jobs_is_queued(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text(TRACE, encoding="utf-8")
    done = dmsc("simulate", "--queue", "jobs.csv", cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "2 jobs; the last ended after 3 h, slots 100% busy",
        "completion: mean 2.5 h, median 2.5 h",
        "wait: mean 1 h, longest 2 h",
        "0 parks, 0 changes of size, 0 deadlines missed, 3 decisions",
    ]
    (tmp_path / "jobs.csv").write_text(TRACE.replace("0,64", "nan,64"), encoding="utf-8")
    done = dmsc("simulate", "--queue", "jobs.csv", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("dmsc: jobs.csv:2: submit_s is nan: give a number")
    assert len(done.stderr.splitlines()) == 1


def test_doctor_without_a_mesh_says_what_to_do(tmp_path: Path) -> None:
    done = dmsc("doctor", cwd=tmp_path)
    assert done.returncode == 1
    assert "✗ mesh: no mesh runs on" in done.stdout
    assert "→ start one with `dmsc up`" in done.stdout
    assert "✓ torch: " in done.stdout
