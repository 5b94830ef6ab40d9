"""The node agent with a real bus, a real fork server, real processes and real kills (draft §5.3, §5.5).

The registry (SRD) and the orchestrator (SMO) are small stand-ins that answer and remember.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from bus import subjects
from entities.accountant.ledger import take_report
from entities.cluster.config import ClusterTimes
from schemas.accounts import CountedNode, SlotReport
from schemas.cluster import (
    Analyse,
    AnalysisFailed,
    ForgetTopology,
    InstanceStart,
    InstanceStarted,
    NodeStatus,
    SampleWritten,
    WriteSample,
)
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Conflict, Refused, Unavailable
from schemas.job import JobSpec
from schemas.job_file.data import DataSpec
from schemas.job_file.model import ModelSpec
from schemas.job_file.training import TrainingSpec
from schemas.registry import InstanceState
from schemas.signals import Registration
from schemas.task_graph import ModelTopology, TopologyReleased
from schemas.telemetry import NodeSample
from tests.integration.entities.cluster_mesh import (
    HERE,
    STAND_IN_TORCH,
    Mesh,
    alive,
    job_name,
    spec,
    stand_in_mesh,
    start,
)
from tests.patience import PATIENCE_S
from tests.waiting import eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="process states from /proc, death with the parent"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with stand_in_mesh(tmp_path_factory.mktemp("cluster")) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(mesh: Mesh) -> AsyncIterator[str]:
    """The SID of an agent that many tests share; each of them leaves its slots free."""
    async with mesh.agent("a", real_torch=True, sample_every_s=0.2):
        yield "a-n"


async def test_the_agent_registers_with_srd_and_smo(mesh: Mesh, shared: str) -> None:
    """§4.4(1), §5.3: resources and capabilities are known before any job."""
    registration = await mesh.srd.heard.first(Registration, lambda m: m.record.sid == shared)
    assert registration.record.prefix == "entity/cluster/a"
    assert registration.record.kind is EntityKind.CLUSTER
    status = await mesh.smo.status(shared, lambda s: s.warm)
    assert [slot.device for slot in status.slots] == ["cpu"] * 4
    assert {(slot.kind, slot.bits_class, slot.speed["stage"]) for slot in status.slots} == {
        ("cpu", "cpu-stand-in", 2.0)
    }
    told = await mesh.srd.heard.first(
        Registration, lambda m: m.record.sid == shared and m.record.capability.slots
    )
    assert told.record.capability.memory_bytes == sum(slot.memory_bytes for slot in status.slots)
    assert told.record.capability.speed == {"stage": 2.0}
    assert status.torch_version
    sample = await mesh.smo.heard.first(NodeSample, lambda s: s.cluster == "a")
    assert sample.memory_total_bytes > sample.memory_used_bytes > 0


async def test_what_was_measured_beside_other_work_is_measured_again_once_the_node_rests(mesh: Mesh) -> None:
    folder = mesh.folder / "busy"
    async with mesh.agent("z", capabilities=folder):
        (kept,) = folder.glob("*.json")
    figures = json.loads(kept.read_text())
    figures["measured"] |= {"speed": {"stage": 1.0}, "busy": 1.0}
    kept.write_text(json.dumps(figures))
    times = ClusterTimes(measure_again_s=0.02)
    async with mesh.agent("y", capabilities=folder, times=times, sample_every_s=0.02, rests_below=1.0):
        await mesh.smo.status("y-n", lambda s: bool(s.slots) and s.slots[0].speed == {"stage": 1.0})
        told = await mesh.smo.status("y-n", lambda s: bool(s.slots) and s.slots[0].speed == {"stage": 2.0})
        assert {slot.bits_class for slot in told.slots} == {"cpu-stand-in"}
        await mesh.srd.heard.first(
            Registration,
            lambda m: m.record.sid == "y-n" and m.record.capability.speed == {"stage": 2.0},
        )
    assert json.loads(kept.read_text())["measured"]["busy"] < 1.0


async def test_an_instance_gets_its_slot_its_payload_and_its_end(mesh: Mesh, shared: str) -> None:
    order = start(job_name(), slot=2)
    sid = order.unit.sid
    started = await mesh.smo.start(shared, order)
    assert alive(started.pid)
    taken = await mesh.smo.status(shared, lambda s: bool(s.slots) and s.slots[2].busy_with == sid)
    assert [slot.busy_with for slot in taken.slots] == [None, None, sid, None]
    assert await mesh.smo.start(shared, order) == started  # a repeat starts nothing

    await eventually(lambda: "threads" in mesh.log(order))
    payload = json.loads(mesh.log(order))
    assert InstanceStart.model_validate(payload["start"]) == order
    place = {key: payload[key] for key in ("cluster", "node", "agent", "address", "ports", "device")}
    assert place == {
        "cluster": "a",
        "node": "n",
        "agent": "a-n",
        "address": "127.0.0.1",
        "ports": None,
        "device": "cpu",
    }
    assert (payload["servers"], payload["threads"]) == ([mesh.url], 2)

    await mesh.smo.stop(shared, order)
    assert not alive(started.pid)
    change = await mesh.srd.state(sid, InstanceState.GONE)
    assert change.reason == "stopped as ordered (killed by SIGTERM)"
    await mesh.smo.heard.first(
        NodeStatus, lambda s: s.sid == shared and s.warm and s.slots[2].busy_with is None and s is not taken
    )
    note = (await mesh.smo.stop(shared, order)).note
    assert note == f"{sid} {order.incarnation} is not on a-n"  # a repeat finds it done
    with pytest.raises(Conflict, match="has ended"):  # a late repeat of the start is not obeyed
        await mesh.smo.start(shared, order)


async def test_a_killed_child_is_a_fault(mesh: Mesh, shared: str) -> None:
    """§4.4(5): the agent sees the exit and the registry hears of it at once."""
    order = start(job_name(), stage=1)
    started = await mesh.smo.start(shared, order)
    os.kill(started.pid, signal.SIGKILL)
    change = await mesh.srd.state(order.unit.sid, InstanceState.FAULTED)
    assert change.incarnation == order.incarnation
    assert change.reason.startswith("killed by SIGKILL")
    judgement = await mesh.smo.judge(shared, order)
    assert (judgement.process, judgement.scope, judgement.kind) == ("gone", "instance", "structural")
    assert judgement.broken == (f"stage 0 -> {order.unit.sid}",)
    assert judgement.evidence.startswith("killed by SIGKILL")


async def test_a_crash_names_its_last_log_line(mesh: Mesh, shared: str) -> None:
    order = start(job_name(), "fail")
    await mesh.smo.start(shared, order)
    change = await mesh.srd.state(order.unit.sid, InstanceState.FAULTED)
    expected = "cluster_stand_ins.instance failed: ValueError: layer 3 does not fit"
    assert change.reason == f"exit code 1; last log line: {expected}"


async def test_a_fault_before_the_registration_is_registered_by_the_agent(mesh: Mesh, shared: str) -> None:
    order = start(job_name(), "fail", stage=1, slot=3)
    mesh.srd.unknown.add(order.unit.sid)
    await mesh.smo.start(shared, order)
    registration = await mesh.srd.heard.first(Registration, lambda m: m.record.sid == order.unit.sid)
    record = registration.record
    assert (record.state, record.job, record.stage) == (InstanceState.FAULTED, order.job, 1)
    assert record.prefix == f"train/{order.job}/stage/1"
    assert "does not fit" in record.reason


async def test_an_end_by_itself_is_no_fault(mesh: Mesh, shared: str) -> None:
    order = start(job_name(), "end", stage=-1)
    await mesh.smo.start(shared, order)
    change = await mesh.srd.state(order.unit.sid, InstanceState.GONE)
    assert change.reason == "ended by itself with exit code 0"


async def test_stopped_is_told_from_busy(mesh: Mesh, shared: str) -> None:
    """§5.5, DESIGN §5 rule 2: load is not mistaken for death."""
    job = job_name()
    busy, stopped = start(job, "busy", slot=0), start(job, slot=1, stage=1)
    pids = [(await mesh.smo.start(shared, order)).pid for order in (busy, stopped)]
    await eventually(lambda: "threads" in mesh.log(busy) and "threads" in mesh.log(stopped))
    os.kill(pids[1], signal.SIGSTOP)
    await eventually(lambda: psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED)
    verdicts = [await mesh.smo.judge(shared, order) for order in (busy, stopped)]
    assert [(v.process, v.scope, v.kind) for v in verdicts] == [
        ("running", "none", "transient"),
        ("stopped", "instance", "transient"),
    ]
    assert f"process {pids[1]} is stopped" in verdicts[1].evidence
    assert verdicts[1].broken
    assert not verdicts[0].broken
    os.kill(pids[1], signal.SIGCONT)
    await eventually(lambda: psutil.Process(pids[1]).status() != psutil.STATUS_STOPPED)
    assert (await mesh.smo.judge(shared, stopped)).process == "running"
    await asyncio.gather(*(mesh.smo.stop(shared, order, now=True) for order in (busy, stopped)))
    assert not any(map(alive, pids))
    stranger = await mesh.smo.judge(shared, start(job, stage=1, replica=7))
    assert (stranger.process, stranger.evidence) == ("unknown", f"{job}-s1-r7 never ran here")


async def test_slots_are_refused_in_one_line_and_data_needs_none(mesh: Mesh, shared: str) -> None:
    job = job_name()
    first, data = start(job, slot=1), start(job, stage=-1, slot=1)
    await mesh.smo.start(shared, first)
    await mesh.smo.start(shared, data)
    with pytest.raises(Refused, match=f"^a-n: slot 1 is held by {first.unit.sid}; choose another$"):
        await mesh.smo.start(shared, start(job, slot=1, replica=1))
    with pytest.raises(Refused, match=r"no slot 9 .* there are 4"):
        await mesh.smo.start(shared, start(job, slot=9, replica=1))
    with pytest.raises(Conflict, match=f"runs here as incarnation {first.incarnation}"):
        await mesh.smo.start(shared, start(job, slot=2))
    await asyncio.gather(*(mesh.smo.stop(shared, order) for order in (first, data)))


async def test_many_start_at_once_and_only_as_often_as_there_are_slots(mesh: Mesh, shared: str) -> None:
    job = job_name()
    orders = [start(job, slot=slot, replica=replica) for replica, slot in enumerate([0, 1, 2, 3, 0, 1, 2, 3])]
    answers = await asyncio.gather(*(mesh.smo.start(shared, o) for o in orders), return_exceptions=True)
    pids = [answer.pid for answer in answers if isinstance(answer, InstanceStarted)]
    assert len(set(pids)) == 4
    assert [isinstance(answer, Refused) for answer in answers].count(True) == 4
    released = await mesh.smo.ask(shared, subjects.FORGET_TOPOLOGY, ForgetTopology(job=job))
    assert released == TopologyReleased(job=job, cluster="a", node="n")
    assert not any(map(alive, pids))  # what is left of a forgotten job goes with it


async def test_a_stubborn_instance_gets_its_grace_and_then_sigkill(mesh: Mesh, shared: str) -> None:
    order = start(job_name(), "stubborn")
    pid = (await mesh.smo.start(shared, order)).pid
    await eventually(lambda: "threads" in mesh.log(order))
    began = time.monotonic()
    await mesh.smo.stop(shared, order)
    assert time.monotonic() - began > 0.5
    assert not alive(pid)
    assert (await mesh.srd.state(order.unit.sid, InstanceState.GONE)).reason.endswith("SIGKILL)")


async def test_the_analysis_reaches_the_orchestrator_and_is_kept(
    mesh: Mesh, shared: str, tmp_path: Path
) -> None:
    """§5.3: the topology goes to the SMO, serves judgements, and is dropped at the end (§4.4(6))."""
    job, runs = job_name(), tmp_path / "runs"
    order = Analyse(job=job, spec=spec(source=str(runs)))
    await asyncio.gather(*(mesh.smo.ask(shared, subjects.ANALYSE, order) for _ in range(3)))
    topology = await mesh.smo.heard.first(ModelTopology, lambda t: t.job == job)
    assert (topology.cluster, topology.node, len(topology.layers)) == ("a", "n", 2)
    wires = [(edge.upstream, edge.downstream, edge.bytes) for edge in topology.edges]
    assert wires == [(-1, 0, 32), (0, 1, 64), (-1, 1, 16)], "§4.3: graphs, too, are handed over by the MIC"
    await mesh.smo.ask(shared, subjects.ANALYSE, order)  # a new orchestrator asks again
    await mesh.smo.heard.first(ModelTopology, lambda t: t.job == job and t is not topology)
    assert len(runs.read_text().splitlines()) == 1  # one worker for all of them

    instance = start(job)
    os.kill((await mesh.smo.start(shared, instance)).pid, signal.SIGKILL)
    await mesh.srd.state(instance.unit.sid, InstanceState.FAULTED)
    sid = instance.unit.sid
    assert (await mesh.smo.judge(shared, instance)).broken == (
        f"data -> {sid}: 32 bytes a microbatch",
        f"{sid} -> stage 1: output of layer 0 (layer0), 64 bytes a microbatch",
        "the batch -> layer 1 (layer1): 16 bytes a microbatch",
    )
    await mesh.smo.ask(shared, subjects.FORGET_TOPOLOGY, ForgetTopology(job=job))
    assert (await mesh.smo.judge(shared, instance)).broken == (f"data -> {sid}", f"{sid} -> stage 1")


@pytest.mark.parametrize(
    ("mishap", "code", "text"),
    [
        ("bad-model", "bad_model", "factory tiny:model failed: no such width"),
        (
            "crash",
            "internal",
            "analysis of the model on n gave no result "
            "(killed by SIGKILL; last log line: could not map the weights)",
        ),
    ],
)
async def test_a_failed_analysis_is_one_line(
    mesh: Mesh, shared: str, tmp_path: Path, mishap: str, code: str, text: str
) -> None:
    job = job_name()
    order = Analyse(job=job, spec=spec(mishap, source=str(tmp_path / "runs")))
    await mesh.smo.ask(shared, subjects.ANALYSE, order)
    failed = await mesh.smo.heard.first(AnalysisFailed, lambda f: f.job == job)
    assert (failed.code, failed.text) == (code, text)


async def test_a_sample_is_written_or_its_failure_is(mesh: Mesh, shared: str) -> None:
    for name in ("fine", "no-sample"):
        order = WriteSample(job=name, spec=spec(name), weights_url="bus://w")
        await mesh.smo.ask(shared, subjects.WRITE_SAMPLE, order)
    fine = await mesh.smo.heard.first(SampleWritten, lambda s: s.job == "fine")
    assert (fine.text, fine.error) == ("def bus://w", "")
    failed = await mesh.smo.heard.first(SampleWritten, lambda s: s.job == "no-sample")
    assert failed.text == ""
    assert failed.error.endswith("cluster_stand_ins.tasks.sample failed: RuntimeError: weights are gone)")


async def test_an_analysis_that_hangs_is_ended_at_its_deadline(mesh: Mesh, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    async with mesh.agent("slow", analysis_timeout_s=0.5):
        order = Analyse(job="hangs", spec=spec("hang", source=str(runs)))
        await mesh.smo.ask("slow-n", subjects.ANALYSE, order)
        failed = await mesh.smo.heard.first(AnalysisFailed, lambda f: f.job == "hangs")
        assert failed.code == "no_progress"
        assert not alive(int(runs.read_text()))


@pytest.mark.parametrize("works", ["large", "reads"])
async def test_an_analysis_that_works_has_the_time_that_it_needs(
    mesh: Mesh, tmp_path: Path, works: str
) -> None:
    async with mesh.agent(works, analysis_timeout_s=1.0):
        order = Analyse(job=works, spec=spec(works, source=str(tmp_path / "runs")))
        await mesh.smo.ask(f"{works}-n", subjects.ANALYSE, order)
        answers = (ModelTopology, AnalysisFailed)
        found = await mesh.smo.heard.first(answers, lambda answer: answer.job == works)
        assert isinstance(found, ModelTopology), found
        assert len(found.layers) == 2


async def test_an_analysis_that_computes_for_ever_holds_up_nobody_and_ends_with_its_job(
    mesh: Mesh, tmp_path: Path
) -> None:
    endless, other = tmp_path / "endless", tmp_path / "other"
    async with mesh.agent("two", analysis_alone_s=0.5):
        order = Analyse(job="endless", spec=spec("endless", source=str(endless)))
        await mesh.smo.ask("two-n", subjects.ANALYSE, order)
        await eventually(endless.exists)
        await mesh.smo.ask(
            "two-n", subjects.ANALYSE, Analyse(job="fine", spec=spec("fine", source=str(other)))
        )
        await mesh.smo.heard.first(ModelTopology, lambda topology: topology.job == "fine")
        pid = int(await eventually(endless.read_text))
        assert alive(pid)
        await mesh.smo.ask("two-n", subjects.ANALYSE, order)
        assert len(endless.read_text().split()) == 1, "a repeated order begins nothing anew"
        await mesh.smo.ask("two-n", subjects.FORGET_TOPOLOGY, ForgetTopology(job="endless"))
        assert not alive(pid)


async def test_the_real_analysis_worker_answers_through_the_agent(mesh: Mesh, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("to be or not to be\n" * 200)
    model = ModelSpec(
        factory="workers.models.gpt:byte_gpt", args={"layers": 2, "width": 16, "heads": 2, "context": 16}
    )
    good = JobSpec(
        name="real",
        model=model,
        data=DataSpec(source=data.as_uri(), sample_tokens=16),
        training=TrainingSpec(steps=1, microbatches=2),
    )
    bad = good.model_copy(update={"model": ModelSpec(factory="no_such_module:model")})
    async with mesh.agent("real", real_torch=True, worker_package="workers"):
        await mesh.smo.ask("real-n", subjects.ANALYSE, Analyse(job="real-good", spec=good))
        await mesh.smo.ask("real-n", subjects.ANALYSE, Analyse(job="real-bad", spec=bad))
        topology = await mesh.smo.heard.first(ModelTopology, lambda t: t.job == "real-good")
        assert len(topology.layers) >= 2
        assert all(layer.output_bytes > 0 for layer in topology.layers)
        failed = await mesh.smo.heard.first(AnalysisFailed, lambda f: f.job == "real-bad")
        assert failed.code == "bad_model"
        assert "no_such_module" in failed.text
        assert "\n" not in failed.text


async def test_a_killed_fork_server_is_replaced_and_its_instances_reported(mesh: Mesh) -> None:
    reports: list[SlotReport] = []

    async def reported(message: SlotReport, envelope: Envelope) -> None:
        reports.append(message)

    await mesh.smo.bus.subscribe(subjects.SLOT_REPORT, reported, agent="b-n")
    async with mesh.agent("b") as agent:
        orders = [start(job_name(), slot=slot) for slot in range(2)]
        pids = [(await mesh.smo.start("b-n", order)).pid for order in orders]
        killed = agent.fork_server_pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        for order in orders:
            change = await mesh.srd.state(order.unit.sid, InstanceState.FAULTED)
            assert change.reason.startswith("for want of others: lost with the fork server")
        assert (await mesh.smo.judge("b-n", orders[0])).scope == "node"
        await eventually(lambda: not any(map(alive, pids)))
        await mesh.smo.status("b-n", lambda s: not s.warm)
        again = start(job_name(), slot=0)
        assert alive((await mesh.smo.start("b-n", again)).pid)  # waits for the new server
        assert agent.fork_server_pid not in (None, killed)
        assert (await mesh.smo.judge("b-n", orders[0])).scope == "instance"
    await eventually(lambda: counted(reports).get(again.job, 0.0) > 0)
    seconds = counted(reports)
    offered_s = seconds.pop("offered")
    assert seconds.keys() == {"", *(order.job for order in (*orders, again))}
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) == pytest.approx(offered_s)


def counted(reports: list[SlotReport]) -> dict[str, float]:
    """By the reports of an agent: how long each job held slots, nobody did (""), and they were offered."""
    node, seconds = CountedNode(), Counter[str]()
    for report in reports:
        taken = take_report(node, report, time.time())
        node = taken.node
        for charge in taken.charges:
            seconds["offered"] += charge.amounts.get("offered_s", 0.0)
            seconds[charge.key.payer] += charge.amounts.get("held_s", 0.0)
    return dict(seconds)


async def test_an_agent_that_ends_leaves_nothing(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir("/proc/self/fd")), {p.pid for p in psutil.Process().children(recursive=True)}
    async with mesh.agent("c") as agent:
        server = agent.fork_server_pid
        assert server is not None
        orders = [
            start(job_name(), *deeds, slot=slot) for slot, deeds in enumerate([(), ("stubborn",), ("busy",)])
        ]
        pids = [server] + [(await mesh.smo.start("c-n", order)).pid for order in orders]
        await eventually(lambda: all("threads" in mesh.log(order) for order in orders))
        assert os.listdir(tmp_path)
    assert not any(map(alive, pids))
    assert not os.listdir(tmp_path)
    after = set(os.listdir("/proc/self/fd")), {p.pid for p in psutil.Process().children(recursive=True)}
    # what an earlier test left to the garbage collector may be gone
    assert all(now <= then for now, then in zip(after, before, strict=True)), (after, before)
    for order in orders:
        assert "as ordered" in (await mesh.srd.state(order.unit.sid, InstanceState.GONE)).reason
    await mesh.srd.state("c-n", InstanceState.GONE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_survives_the_agents_process(mesh: Mesh, tmp_path: Path, number: int) -> None:
    """Killed, it can clean up nothing: fork server and instances end by themselves."""
    cluster = f"own{number:d}"
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    agent = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "run_agent.py"),
        mesh.url,
        cluster,
        str(mesh.folder / "logs"),
        env={
            **os.environ,
            "TMPDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), str(STAND_IN_TORCH)]),
        },
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        sid = f"{cluster}-own"
        await mesh.smo.status(sid, lambda s: s.warm)
        orders = [
            start(job_name(), *deeds, slot=slot) for slot, deeds in enumerate([(), ("stubborn",), ("busy",)])
        ]
        for order in orders:
            await mesh.smo.start(sid, order)
        await eventually(lambda: all("threads" in mesh.log(order) for order in orders))
        family = [process.pid for process in psutil.Process(agent.pid).children(recursive=True)]
        assert len(family) == 4  # the fork server and three instances
        agent.send_signal(number)
        await asyncio.wait_for(agent.wait(), PATIENCE_S)
        await eventually(lambda: not any(map(alive, family)))
        # torch may leave a cache folder of its own
        await eventually(lambda: not list(scratch.glob("dmsc-*")))
    finally:
        if agent.returncode is None:
            agent.kill()
            await agent.wait()


async def test_a_fork_server_that_cannot_start_ends_the_agent_with_its_last_line(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: no such file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"does not start: ImportError: libtorch\.so: no such file"):
        async with mesh.agent("broken"):
            pass
